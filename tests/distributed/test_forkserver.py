"""The helper itself: results in order, failures with their traceback, no waiting for the dead."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.forkserver import PRELOAD, RankError, run_islands, run_ranks


def _sum_of_ranks(rank, factor):
    total = torch.tensor([float(rank * factor)])
    dist.all_reduce(total)
    return rank, total


def _fail_on_one(rank):
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _die_on_one(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _sleep(rank):
    time.sleep(60)


def _world(island, rank):
    return island, rank, dist.get_world_size(), torch.get_num_threads()


def _preloaded(rank):
    server_threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    return server_threads, [name for name in PRELOAD if name not in sys.modules]


def test_the_server_has_every_module_and_no_thread_that_a_fork_would_lose():
    assert run_ranks(_preloaded, 1) == [(1, [])]


def test_results_come_in_rank_order_and_collectives_work():
    assert run_ranks(_sum_of_ranks, 3, 2) == [(rank, torch.tensor([6.0])) for rank in range(3)]


def test_each_island_is_a_world_of_its_own_and_uses_one_thread():
    assert run_islands(_world, 2, 2) == [[(i, r, 2, 1) for r in range(2)] for i in range(2)]


def test_an_exception_carries_the_traceback_of_its_rank():
    with pytest.raises(RankError, match=r"(?s)island 0 rank 1: .*_fail_on_one.*ValueError: the reason"):
        run_ranks(_fail_on_one, 2)


def test_a_dead_rank_is_named():
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        run_ranks(_die_on_one, 2)


def test_the_timeout_kills_the_ranks():
    with pytest.raises(RankError, match="not finished in time: island 0 rank 0, island 0 rank 1"):
        run_ranks(_sleep, 2, timeout_s=1)
