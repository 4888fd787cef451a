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
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import DP2_DISTRIBUTED, LAYOUTS, join_island, make_config, make_inner, train

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


def _checkpoints(folder, island, fingerprint="f"):
    from dilocox.checkpoint.store import Checkpoints

    return Checkpoints(Path(folder), island, fingerprint=fingerprint)


def _state(inner):
    from dilocox.checkpoint.store import TrainState

    return TrainState(inner.model, inner.optimizer, inner.scheduler)


def _outer_state(rank, iteration):
    return {"anchor": torch.full((3,), float(rank + iteration)), "step": iteration, "names": ["a", None]}


def _save(checkpoints, inner, iteration, retain=5):
    rank = inner.island.rank
    return checkpoints.save(
        iteration,
        _state(inner),
        common={"consumed": 8 * iteration},
        rank_state=_outer_state(rank, iteration),
        retain=retain,
    )


def _straight(rank, config):
    return train(make_inner(config, join_island(rank, config)), config, range(6))


def _saving(rank, config, folder):
    inner = make_inner(config, join_island(rank, config))
    checkpoints = _checkpoints(folder, inner.island)
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
        loaded = _checkpoints(folder, island).load(_state(inner), iteration)
        assert loaded.iteration == position
        assert loaded.common == {"consumed": 8 * position}
        expected = _outer_state(rank, position)
        assert torch.equal(loaded.rank_state.pop("anchor"), expected.pop("anchor"))
        assert loaded.rank_state == expected
        resumed.append(train(inner, config, range(position, 6)))
    return resumed


@pytest.mark.parametrize("case", CASES)
def test_resuming_equals_never_having_stopped(case, tmp_path):
    config = make_config(**CASES[case])
    world_size = config.parallel.ranks_per_island
    straight = run_ranks(_straight, world_size, config)
    saving = run_ranks(_saving, world_size, config, str(tmp_path))
    assert [steps for steps, _ in saving] == straight, "saving has disturbed training"
    assert [children for _, children in saving] == [[]] * world_size, "saving has left processes behind"
    resumed = run_ranks(_resuming, world_size, config, str(tmp_path))
    assert resumed == [[steps[4:], steps[2:], steps] for steps in straight]


def _refused(rank, config, folder, fingerprint):
    inner = make_inner(config, join_island(rank, config))
    with pytest.raises(CheckpointError) as caught:
        _checkpoints(folder, inner.island, fingerprint).load(_state(inner))
    return str(caught.value), train(inner, config, range(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_saving, 2, make_config(parallel=LAYOUTS["DP2"]), str(folder))
    return folder


def refusals(folder, parallel=None, fingerprint="f"):
    """Messages of the refusing ranks, after checking that nothing was loaded into the model."""
    config = make_config(parallel=parallel or LAYOUTS["DP2"])
    world_size = config.parallel.ranks_per_island
    untouched = [steps[:2] for steps in run_ranks(_straight, world_size, config)]
    results = run_ranks(_refused, world_size, config, str(folder), fingerprint)
    assert [steps for _, steps in results] == untouched
    return [message for message, _ in results]


def test_another_layout_is_refused_with_both(saved):
    for message in refusals(saved, LAYOUTS["TP2"]):
        assert (
            "its layout is {'tp': 1, 'pp': 1, 'dp': 2}, this run's is {'tp': 2, 'pp': 1, 'dp': 1}" in message
        )


def test_another_configuration_is_refused_with_both_fingerprints(saved):
    assert all("its fingerprint is f, this run's is g" in text for text in refusals(saved, fingerprint="g"))


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
    checkpoints = _checkpoints(folder, inner.island)
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
    assert identity == {
        "format": 1,
        "fingerprint": "f",
        "layout": {"tp": 1, "pp": 1, "dp": 2},
        "iteration": 2,
        "common": {"consumed": 16},
        "files": files,
    }
