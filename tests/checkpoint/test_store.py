"""Resuming equals never having stopped, bit for bit; a checkpoint that does not fit is refused untouched."""

import json
import resource
import shutil
from pathlib import Path

import psutil
import pytest
import torch

from dilocox.checkpoint import files as checkpoint_files
from dilocox.errors import CheckpointError
from dilocox.param_shard import ShardState
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import (
    DP2_DISTRIBUTED,
    LAYOUTS,
    VOCAB_SIZE,
    join_island,
    make_config,
    make_inner,
    make_masters,
    train,
)

DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
CASES = {
    "adam, dropout": {"model": DROPOUT},
    "sgd": {"inner": {"optimizer": "sgd", "lr": 0.1}},
    "DP2 distributed": {"parallel": DP2_DISTRIBUTED, "model": DROPOUT},
    "TP2xPP2 bf16": {"parallel": LAYOUTS["TP2xPP2"], "model": {"params_dtype": "bf16"} | DROPOUT},
    "PP2xDP2 distributed bf16": {
        "parallel": LAYOUTS["PP2xDP2 distributed optimizer"],
        "model": {"params_dtype": "bf16"},
    },
    "fp16": {"model": {"params_dtype": "fp16"}},
}


def _checkpoints(folder, inner, config):
    from dilocox.checkpoint.store import Checkpoints

    return Checkpoints(Path(folder), inner.island, config=config, vocab_size=VOCAB_SIZE)


def _state(inner):
    from dilocox.checkpoint.store import TrainState

    return TrainState(make_masters(inner), inner.optimizer, inner.scheduler)


def _outer_state(inner, iteration):
    """What level 2 could give: one kind on all shards, one on those of a layer, and values of both sorts."""
    rank = inner.island.rank
    kinds = {"anchor": {}, "optimizer_momentum_buffer": {}}
    for shard in make_masters(inner).shards:
        values = torch.full_like(shard.tensor, 0.0 if shard.replicated else rank)  # copies are equal
        kinds["anchor"][shard.name] = values + iteration
        if shard.layer == 0:
            kinds["optimizer_momentum_buffer"][shard.name] = values - iteration
    return ShardState(
        tensors=kinds,
        common={"outer_step": iteration, "names": ["a", None]},
        layout_bound={"basis": torch.full((3,), float(rank + iteration))},
    )


def _same(mine, other):
    """Equality of nested values that hold tensors."""
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(_same(mine[key], other[key]) for key in mine)
    return torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def _save(checkpoints, inner, iteration, retain=5):
    return checkpoints.save(
        iteration,
        _state(inner),
        outer=_outer_state(inner, iteration),
        common={"consumed": 8 * iteration},
        retain=retain,
    )


def _straight(rank, config):
    return train(make_inner(config, join_island(rank, config)), config, range(6))


def _saving(rank, config, folder):
    inner = make_inner(config, join_island(rank, config))
    checkpoints = _checkpoints(folder, inner, config)
    steps = []
    for iteration in (0, 2, 4):
        _save(checkpoints, inner, iteration)
        steps += train(inner, config, range(iteration, iteration + 2))
    return steps, [child.name() for child in psutil.Process().children()]


def _resuming(rank, config, folder):
    """Steps after loading each of the checkpoints, the latest one first."""
    island = join_island(rank, config)
    resumed = []
    for iteration, position in ((None, 4), (2, 2), (0, 0)):
        inner = make_inner(config, island)
        train(inner, config, range(10, 13))  # whatever was there before is replaced
        loaded = _checkpoints(folder, inner, config).load(_state(inner), iteration)
        assert loaded.iteration == position
        assert loaded.layout_changed is None
        assert loaded.common == {"consumed": 8 * position}
        expected = _outer_state(inner, position)
        assert _same(loaded.outer.tensors, expected.tensors)
        assert loaded.outer.common == expected.common
        assert _same(loaded.outer.layout_bound, expected.layout_bound)
        resumed.append(train(inner, config, range(position, 6)))
    return resumed


FOUR_RANKS = [case for case in CASES if make_config(**CASES[case]).parallel.ranks_per_island == 4]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.heavy) if c in FOUR_RANKS else c for c in CASES]
)
def test_resuming_equals_never_having_stopped(case, tmp_path):
    config = make_config(**CASES[case])
    world_size = config.parallel.ranks_per_island
    straight = run_ranks(_straight, world_size, config)
    saving = run_ranks(_saving, world_size, config, str(tmp_path))
    assert [steps for steps, _ in saving] == straight, "saving has disturbed training"
    assert [children for _, children in saving] == [[]] * world_size, "saving has left processes behind"
    resumed = run_ranks(_resuming, world_size, config, str(tmp_path))
    assert resumed == [[steps[4:], steps[2:], steps] for steps in straight]


def _refused(rank, config, folder):
    inner = make_inner(config, join_island(rank, config))
    with pytest.raises(CheckpointError) as caught:
        _checkpoints(folder, inner, config).load(_state(inner))
    return str(caught.value), train(inner, config, range(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_saving, 2, make_config(parallel=LAYOUTS["DP2"]), str(folder))
    return folder


def refusals(folder, **sections):
    """Messages of the refusing ranks, after checking that nothing was loaded into the model."""
    config = make_config(parallel=LAYOUTS["DP2"], **sections)
    untouched = [steps[:2] for steps in run_ranks(_straight, 2, config)]
    results = run_ranks(_refused, 2, config, str(folder))
    assert [steps for _, steps in results] == untouched
    return [message for message, _ in results]


def test_other_settings_are_refused_by_name_with_both_values(saved):
    other = {"inner": {"clip_grad": 0.5}, "model": {"init_method_std": 0.03}}
    for message in refusals(saved, **other):
        assert "belongs to another run: " in message
        assert "model.init_method_std is 0.02 there, 0.03 here; " in message
        assert message.endswith("inner.clip_grad is 1.0 there, 0.5 here")


def change_identity(folder, **fields):
    path = folder / "iter_0000004" / "dilocox.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_another_vocabulary_is_refused(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    change_identity(folder, vocab_size=62)
    for message in refusals(folder):
        assert "the tokenizer's vocabulary is 62 there, 61 here" in message


def test_the_format_of_version_0_1_0_is_refused_with_the_version_that_reads_it(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    # as commit ea94644 wrote it, in all that is read before the refusal
    old = {"format": 1, "fingerprint": "f", "layout": {"tp": 1, "pp": 1, "dp": 2}, "iteration": 4}
    (folder / "iter_0000004" / "dilocox.json").write_text(json.dumps(old | {"common": {}, "files": {}}))
    for message in refusals(folder):
        assert "has format 1, which version 0.1.0 (commit ea94644) of dilocox reads" in message


def copy_of(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_missing_file_is_named_on_all_ranks(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    (folder / "iter_0000004" / "rank_0001.pt").unlink()
    for message in refusals(folder):
        assert "incomplete checkpoint: " in message
        assert "rank_0001.pt is missing" in message


def test_a_cut_off_file_is_named_on_all_ranks(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    part = next((folder / "iter_0000004").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    for message in refusals(folder):
        assert f"{part} has {part.stat().st_size} bytes, not {part.stat().st_size + 1}" in message


def test_an_empty_folder_is_refused(tmp_path):
    assert all(f"no checkpoint in {tmp_path}" in message for message in refusals(tmp_path))


def _full_disk(rank, config, folder):
    inner = make_inner(config, join_island(rank, config))
    checkpoints = _checkpoints(folder, inner, config)
    _save(checkpoints, inner, 0)
    steps = train(inner, config, range(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # its files cannot grow beyond 1,000 bytes, as if the disk were full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    with pytest.raises(CheckpointError) as caught:
        _save(checkpoints, inner, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    steps += train(inner, config, range(2, 4))
    _save(checkpoints, inner, 4)
    return str(caught.value), steps + train(inner, config, range(4, 6))


@pytest.mark.parametrize("parallel", [LAYOUTS["DP2"], LAYOUTS["PP2"]], ids=["DP2", "PP2"])
def test_a_full_disk_fails_on_all_ranks_and_training_goes_on(tmp_path, parallel):
    config = make_config(parallel=parallel)
    results = run_ranks(_full_disk, 2, config, str(tmp_path))
    assert all("checkpoint 2 was not written: rank" in message for message, _ in results)
    assert [steps for _, steps in results] == run_ranks(_straight, 2, config)
    assert checkpoint_files.iterations(tmp_path) == [0, 4]
    assert len(list(tmp_path.iterdir())) == 3, "what was half written is gone"


def test_what_a_checkpoint_is_can_be_read_without_torch(saved):
    files = checkpoint_files.contents(saved / "iter_0000002")
    del files["dilocox.json"]
    identity = json.loads((saved / "iter_0000002" / "dilocox.json").read_text())
    config = make_config(parallel=LAYOUTS["DP2"])
    assert identity.pop("settings") == config.model_dump()
    assert identity.pop("inner")["optimizer"] == {"num_steps": 2, "loss_scale": {}}
    assert identity == {
        "format": 2,
        "layout": {"tp": 1, "pp": 1, "dp": 2, "distributed_optimizer": False},
        "vocab_size": VOCAB_SIZE,
        "iteration": 2,
        "outer": {"outer_step": 2, "names": ["a", None]},
        "common": {"consumed": 16},
        "files": files,
    }
