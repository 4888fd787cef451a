"""Command lines of a run's jobs: one lighthouse, one torchrun job per island."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dilocox.config.schema import Config
from dilocox.launch.processes import JobSpec
from dilocox.run_folder import CONFIG, torchrun_dir

TRAIN = ("-m", "dilocox", "train")
LIGHTHOUSE = (sys.executable, "-m", "dilocox", "lighthouse")


def needs_lighthouse(config: Config) -> bool:
    """Whether the islands need a lighthouse that the settings do not name."""
    meets = config.parallel.num_islands > 1 and config.outer.method != "none"
    return meets and config.wan.lighthouse is None


def lighthouse_spec(config: Config, bind: str) -> JobSpec:
    command = [*LIGHTHOUSE, "--bind", bind, "--min-islands", str(config.wan.min_islands)]
    command += ["--grace-s", str(config.wan.grace_s)]
    return JobSpec("lighthouse", command, {"PYTHONUNBUFFERED": "1"})


def island_spec(
    config: Config,
    run_dir: Path,
    *,
    island_id: int,
    train_arguments: Sequence[str],
    wrap: str = "",
    train: Sequence[str] = TRAIN,
) -> JobSpec:
    """torchrun for one island on this host.

    torchrun binds its store to a port that the kernel picks (endpoint port 0) and hands the open store to
    the ranks, so no port is chosen first and taken later.

    Args:
        train_arguments: what follows `--island-id I`.
        wrap: command that the whole job is run under; `{island}` becomes the island's id.
        train: what torchrun starts.
    """
    logs = torchrun_dir(run_dir, island_id)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    torchrun += ["--nproc-per-node", str(config.parallel.ranks_per_island), "--max-restarts", "0"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    torchrun += ["--rdzv-id", f"island-{island_id}", "--role", "rank", "--tee", "3", "--log-dir", str(logs)]
    program = [*train, str(run_dir / CONFIG), "--island-id", str(island_id), *train_arguments]
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(config)), "PYTHONUNBUFFERED": "1"}
    command = [*shlex.split(wrap.replace("{island}", str(island_id))), *torchrun, *program]
    return JobSpec(f"island {island_id}", command, environment, _gpus(config, island_id))


def threads_per_rank(config: Config) -> int:
    """The cores this process may use, shared by all ranks of all islands."""
    if config.run.threads_per_rank is not None:
        return config.run.threads_per_rank
    num_ranks = config.parallel.num_islands * config.parallel.ranks_per_island
    return max(1, num_cores() // num_ranks)


def num_cores() -> int:
    """Cores this process may use, which can be fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpu(config: Config) -> bool:
    """Whether ranks on this host compute on a GPU."""
    if config.run.device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _gpus(config: Config, island_id: int) -> tuple[int, int] | None:
    """GPUs of an island: its own ones if there are enough for all, else every island sees all."""
    if not has_gpu(config):
        return None
    import torch

    size = config.parallel.ranks_per_island
    if torch.cuda.device_count() < size * config.parallel.num_islands:
        return None
    return island_id * size, (island_id + 1) * size
