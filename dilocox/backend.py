"""Device, process groups and random generators of one island. No other module chooses a device."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from dilocox.config.schema import RunConfig
from dilocox.cpu_backend import CpuStandIn
from dilocox.errors import ConfigError
from dilocox.topology import Coordinate, Topology

GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Backend:
    """Device and transport of an island.

    Attributes:
        device: `cpu`, or this rank's GPU.
        distributed_backend: transport of the island's own groups.
    """

    device: torch.device
    distributed_backend: Literal["gloo", "nccl"]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Island:
    """This rank's place in its running island.

    Attributes:
        control_group: gloo group of all ranks of the island, for small messages of the training thread.
        sync_group: gloo group of the same ranks, for the sync thread alone: its collectives overlap those of
            the training thread.
    """

    backend: Backend
    topology: Topology
    rank: int
    coordinate: Coordinate
    control_group: dist.ProcessGroup
    sync_group: dist.ProcessGroup
    _undo: ExitStack = field(repr=False)


def quiet_third_parties() -> None:
    """Hides import-time warnings of megatron-core and torch; call it before the first of those imports."""
    for module in ("megatron", "transformer_engine", "torchft", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?$")
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def choose_backend(device: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> Backend:
    """Picks the device of this rank.

    Args:
        local_rank: number of this rank among those of its host; picks the GPU.

    Raises:
        ConfigError: `cuda` without a usable GPU, or fewer GPUs than ranks on this host.
    """
    num_gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus == 0:
        raise ConfigError("run.device", device, "this host has no usable GPU; use cpu or auto")
    if num_gpus == 0:
        return Backend(torch.device("cpu"), "gloo")
    if local_rank >= num_gpus:
        raise ConfigError(
            "run.device",
            device,
            f"local rank {local_rank} has no GPU, this host has {num_gpus}; start fewer ranks",
        )
    return Backend(torch.device("cuda", local_rank), "nccl")


def init_island(backend: Backend, topology: Topology, *, rank: int, run: RunConfig) -> Island:
    """Joins the island's own world and sets up Megatron's groups and random generators.

    If no default process group exists, it is created from the environment that torchrun sets.

    Collective: all ranks of the island.

    Args:
        rank: this rank in the island's world.
        run: seeds the generators and sets the CPU threads of a rank.

    Raises:
        AssertionError: the world does not have the ranks that the layout needs; `dilocox train` compares them
            before. What was set up before is undone.
    """
    with ExitStack() as undo:
        if backend.is_cuda:
            torch.cuda.set_device(backend.device)
        else:
            undo.enter_context(CpuStandIn())
        if run.threads_per_rank is not None:
            torch.set_num_threads(run.threads_per_rank)
        if not dist.is_initialized():
            dist.init_process_group(
                backend.distributed_backend,
                rank=rank,
                world_size=topology.ranks_per_island,
                timeout=GROUP_TIMEOUT,
                device_id=backend.device if backend.is_cuda else None,
            )
        undo.callback(_leave_groups)
        if (world_size := dist.get_world_size()) != topology.ranks_per_island:
            raise AssertionError(f"{world_size} ranks for a layout of {topology.ranks_per_island}")
        coordinate = topology.coordinate(rank)
        _init_megatron_groups(topology, rank, coordinate)
        seed_generators(run.seed, topology, coordinate)
        control_group, sync_group = (dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) for _ in range(2))
        return Island(backend, topology, rank, coordinate, control_group, sync_group, undo.pop_all())


def shutdown(island: Island) -> None:
    """Leaves all groups of the island. Collective: all ranks of the island."""
    island._undo.close()


def _leave_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def seed_generators(seed: int, topology: Topology, coordinate: Coordinate) -> None:
    """Seeds dropout: tensor parallel ranks share the stream of their stage and model copy.

    Initial weights do not use these generators, see `inner/initial_weights.py`.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stream = seed + 100 * (coordinate.pp * topology.dp + coordinate.dp)
    torch.manual_seed(stream)
    model_parallel_cuda_manual_seed(stream)


def _init_megatron_groups(topology: Topology, rank: int, coordinate: Coordinate) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    megatron = Coordinate(
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
    )
    if megatron != coordinate:
        raise AssertionError(f"rank {rank}: topology says {coordinate}, megatron-core says {megatron}")
