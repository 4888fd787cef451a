"""What must be equal to load a checkpoint, and what may differ."""

import json

import pytest

from dilocox.checkpoint import identity
from dilocox.config.defaults import resolve
from dilocox.config.load import LOCAL_LEAVES
from dilocox.config.schema import Config
from dilocox.errors import CheckpointError

CONFIG = resolve(Config())


def write(folder, fields):
    (folder / identity.IDENTITY_FILE).write_text(json.dumps(fields))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, identity.identity_of(CONFIG, 61))
    return tmp_path


LEAVES = [(section, leaf) for section, values in CONFIG for leaf, _ in values]


@pytest.mark.parametrize(("section", "leaf"), LEAVES, ids=".".join)
def test_every_setting_is_compared_unless_it_is_local_or_says_how_an_island_computes(tmp_path, section, leaf):
    saved = identity.identity_of(CONFIG, 61)
    own, saved["settings"][section][leaf] = saved["settings"][section][leaf], "another value"
    write(tmp_path, saved)
    local = LOCAL_LEAVES.get(section, frozenset())
    if local is None or leaf in local or f"{section}.{leaf}" in identity.FREE_LEAVES:
        identity.read_identity(tmp_path, CONFIG, 61)
        return
    with pytest.raises(CheckpointError) as caught:
        identity.read_identity(tmp_path, CONFIG, 61)
    assert str(caught.value).endswith(f"another run: {section}.{leaf} is 'another value' there, {own!r} here")


def test_what_says_how_an_island_computes_is_there():
    assert {f"{section}.{leaf}" for section, leaf in LEAVES}.issuperset(identity.FREE_LEAVES)


def test_the_layout_may_differ(folder):
    parallel = CONFIG.parallel.model_copy(
        update={
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 3,
            "ranks_per_island": 24,
            "nodes_per_island": 3,
            "use_distributed_optimizer": True,
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
        }
    )
    config = CONFIG.model_copy(update={"parallel": parallel})
    found = identity.read_identity(folder, config, 61)
    assert str(identity.Layout(**found["layout"])) == "TP1 x PP1 x DP1"
    assert str(identity.Layout.of(config)) == "TP2 x PP3 x DP4 with the distributed optimizer"


def test_every_difference_is_named(folder):
    inner, run = CONFIG.inner.model_copy(update={"lr": 0.5}), CONFIG.run.model_copy(update={"seed": 7})
    config = CONFIG.model_copy(update={"inner": inner, "run": run})
    with pytest.raises(CheckpointError) as caught:
        identity.read_identity(folder, config, 62)
    assert str(caught.value) == (
        f"{folder} belongs to another run: run.seed is 1234 there, 7 here; "
        "inner.lr is 0.001 there, 0.5 here; the tokenizer's vocabulary is 61 there, 62 here"
    )


@pytest.mark.parametrize(
    ("number", "reader"), [(1, "version 0.1.0 (commit ea94644)"), (3, "another version")]
)
def test_other_formats_are_refused_with_what_reads_them(folder, number, reader):
    write(folder, {"format": number})
    with pytest.raises(CheckpointError, match="has format") as caught:
        identity.read_identity(folder, CONFIG, 61)
    assert f"format {number}, which {reader} of dilocox reads; this one reads 2" in str(caught.value)


def test_a_folder_without_identity_is_incomplete(tmp_path):
    with pytest.raises(CheckpointError, match=r"dilocox.json is missing"):
        identity.read_identity(tmp_path, CONFIG, 61)
