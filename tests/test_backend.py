"""Device choice, the island's groups, and megatron-core's CUDA calls landing on the CPU only where asked."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from dilocox.backend import Backend, choose_backend, shutdown
from dilocox.errors import ConfigError
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import LAYOUTS, join_island, make_config, make_inner, train


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_over_gloo_is_chosen(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend(device) == Backend(torch.device("cpu"), "gloo")


def test_with_gpus_each_local_rank_gets_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_backend("auto", local_rank=1) == Backend(torch.device("cuda", 1), "nccl")
    assert choose_backend("cpu", local_rank=1) == Backend(torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match="local rank 2 has no GPU, this host has 2"):
        choose_backend("cuda", local_rank=2)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"run\.device = 'cuda': this host has no usable GPU"):
        choose_backend("cuda")


def _groups(rank, config):
    from megatron.core import parallel_state

    island = join_island(rank, config)
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "control": island.control_group,
        "sync": island.sync_group,
    }
    return island.coordinate, {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_groups_are_those_of_the_topology():
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "ranks_per_island": 8}
    results = run_ranks(_groups, 8, make_config(parallel=parallel))
    coordinates = [coordinate for coordinate, _ in results]
    for coordinate, groups in results:
        for axis in ("tp", "dp", "pp"):
            others = {"tp", "dp", "pp"} - {axis}
            assert groups[axis] == [
                rank
                for rank, other in enumerate(coordinates)
                if all(getattr(other, name) == getattr(coordinate, name) for name in others)
            ]
        assert groups["control"] == groups["sync"] == list(range(8))


def _wrong_size(rank, config):
    with pytest.raises(AssertionError) as caught:
        join_island(rank, config)
    return str(caught.value), dist.is_initialized(), torch.zeros(1).type()


def test_a_world_of_another_size_is_refused_and_nothing_stays():
    (answer,) = set(run_ranks(_wrong_size, 2, make_config(parallel=LAYOUTS["TP2xPP2"])))
    assert answer == ("2 ranks for a layout of 4", False, "torch.FloatTensor")


def _stand_in(rank, config):
    before = torch.cuda.current_device, torch.cuda.Stream, torch.cuda.get_rng_state
    island = join_island(rank, config)
    seen = {
        "factory": torch.zeros(1, device="cuda").device.type,
        "current": torch.ones(1, device=torch.cuda.current_device()).device.type,
        "moved": torch.zeros(1).to("cuda").device.type,
        "cuda()": torch.zeros(1).cuda().device.type,
        "type": torch.zeros(1).type(),
        "cast": torch.zeros(1).type(torch.float64).dtype,
    }
    elsewhere = []

    def try_in_thread():
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError):
            elsewhere.append(torch.zeros(1).type())

    thread = threading.Thread(target=try_in_thread)
    thread.start()
    thread.join()
    shutdown(island)
    after = torch.cuda.current_device, torch.cuda.Stream, torch.cuda.get_rng_state
    return seen, elsewhere, before == after, torch.zeros(1).type()


def test_cuda_means_cpu_in_the_training_thread_until_shutdown():
    ((seen, elsewhere, restored, type_after),) = run_ranks(_stand_in, 1, make_config())
    assert seen == {
        "factory": "cpu",
        "current": "cpu",
        "moved": "cpu",
        "cuda()": "cpu",
        "type": "torch.cuda.FloatTensor",
        "cast": torch.float64,
    }
    assert elsewhere == ["torch.FloatTensor"], "another thread keeps torch's own meaning"
    assert restored
    assert type_after == "torch.FloatTensor"


def _island_twice(rank, config):
    losses = []
    for _ in range(2):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        island = join_island(rank, config)
        losses.append(train(make_inner(config, island), config, range(2)))
        shutdown(island)
    return losses


def test_an_island_can_be_made_again_after_shutdown():
    ((first, second),) = run_ranks(_island_twice, 1, make_config())
    assert first == second


def _dropout(rank, config):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    island = join_island(rank, config)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    return island.coordinate, torch.rand(4), inside


def test_random_streams_follow_stage_and_model_copy():
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "ranks_per_island": 4}
    results = run_ranks(_dropout, 4, make_config(parallel=parallel))
    for coordinate, outside, inside in results:
        for other, other_outside, other_inside in results:
            assert torch.equal(outside, other_outside) == (coordinate.dp == other.dp)
            assert torch.equal(inside, other_inside) == (coordinate == other)


def test_importing_both_levels_says_nothing():
    program = (
        "from dilocox.backend import quiet_third_parties; quiet_third_parties();"
        "import dilocox.inner.model, dilocox.inner.step, dilocox.trainer"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "")
