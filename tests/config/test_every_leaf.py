"""Every leaf of the configuration is documented, is read, and has an effect that can be seen."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dilocox.config.load import load_config
from dilocox.config.schema import Config
from dilocox.data.preprocess.train_tokenizer import train_sentencepiece
from dilocox.errors import ConfigError
from tests.config import observers
from tests.config.effects import BASE, EFFECTS, LONELY, TRAINED, WHOLE_RUN, Effect, Refusal
from tests.data.pairs import write_pair

PACKAGE = Path(observers.__file__).parents[2] / "dilocox"
FIELDS = {
    f"{section}.{leaf}": field
    for section, of_config in Config.model_fields.items()
    for leaf, field in of_config.annotation.model_fields.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora, two tokenizers, and the base configuration."""
    folder = tmp_path_factory.mktemp("leaves")
    generator = np.random.default_rng(0)
    for name, count in (("a", 60), ("b", 80)):
        write_pair(folder / name, generator.integers(0, 60, (count, 40)).tolist())
        text = " ".join(f"{name}{number}" for number in range(300))
        (folder / f"{name}.model").write_bytes(train_sentencepiece([text], 300, num_bytes=len(text)))
    (folder / "run.yaml").write_text(BASE.replace("FOLDER", str(folder)))
    return folder


def overrides_of(leaf: str, folder: Path) -> tuple[list[str], list[str]]:
    """Overrides without and with the changed leaf."""
    effect = EFFECTS[leaf]
    base = [override.replace("FOLDER", str(folder)) for override in effect.base]
    old = effect.old if isinstance(effect, Effect) else None
    before = base if old is None else [*base, f"{leaf}={old}".replace("FOLDER", str(folder))]
    return before, [*base, f"{leaf}={effect.value}".replace("FOLDER", str(folder))]


def configs_of(leaf: str, folder: Path) -> tuple[Config, Config]:
    before, after = overrides_of(leaf, folder)
    return load_config(folder / "run.yaml", before), load_config(folder / "run.yaml", after)


def leaves_seen_by(observer: object) -> list[str]:
    return [leaf for leaf, e in EFFECTS.items() if isinstance(e, Effect) and e.seen == observer]


@cache
def names_in_the_package() -> frozenset[str]:
    """Attributes that are read outside of the config room, and strings, which may be handed to getattr."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "config" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return frozenset(names)


def test_no_leaf_is_left_out():
    assert set(EFFECTS) == set(FIELDS)


@pytest.mark.parametrize("leaf", FIELDS)
def test_a_leaf_is_documented(leaf):
    text = FIELDS[leaf].description or ""
    assert len(text.split()) >= 3 and text.rstrip().endswith((".", ")"))


@pytest.mark.parametrize("leaf", FIELDS)
def test_a_leaf_is_read_outside_of_the_config_room(leaf):
    assert leaf.partition(".")[2] in names_in_the_package()


@pytest.mark.parametrize("leaf", [leaf for leaf, e in EFFECTS.items() if isinstance(e, Refusal)])
def test_a_leaf_is_refused(leaf, folder):
    before, after = overrides_of(leaf, folder)
    load_config(folder / "run.yaml", before)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "run.yaml", after)
    assert caught.value.field == (EFFECTS[leaf].field or leaf)


SEEN_IN_THIS_PROCESS = [
    leaf for leaf, effect in EFFECTS.items() if isinstance(effect, Effect) and callable(effect.seen)
]


@pytest.mark.parametrize("leaf", SEEN_IN_THIS_PROCESS)
def test_a_leaf_has_an_effect(leaf, folder):
    seen = EFFECTS[leaf].seen
    before, after = configs_of(leaf, folder)
    assert repr(seen(before)) == repr(seen(before)), "the observer sees what is not there"
    assert repr(seen(before)) != repr(seen(after))


@pytest.mark.parametrize("observer", [TRAINED, WHOLE_RUN, LONELY])
def test_leaves_have_an_effect_on_running_ranks(observer, folder):
    """All in one go: the first two cases are equal, then come base and changed of each leaf."""
    leaves = leaves_seen_by(observer)
    pairs = [overrides_of(leaf, folder) for leaf in leaves]
    cases = [pairs[0][0]]
    for case in (case for pair in pairs for case in pair):
        if case not in cases:
            cases.append(case)
    cases.append(cases[0])
    path = folder / "run.yaml"
    match observer:
        case "trained":
            found = observers.trained([load_config(path, case) for case in cases])
        case "whole run":
            found = observers.whole_runs(path, cases)
        case "lonely":
            found = observers.lonely(path, cases)
    assert repr(found[0]) == repr(found[-1]), "the observer sees what is not there"
    seen = dict(zip(map(tuple, cases), map(repr, found), strict=True))
    unseen = [
        leaf
        for leaf, (before, after) in zip(leaves, pairs, strict=True)
        if seen[tuple(before)] == seen[tuple(after)]
    ]
    assert unseen == []
