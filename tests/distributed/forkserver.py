"""Runs a function on several gloo processes, for tests.

The processes come from a fork server that has torch, megatron-core, torchft, the whole trainer, and what test
modules import, so that a test does not pay for imports: 8 s per process, of which the trainer's own are
1.5 s. Each process uses one thread: the tests share two cores.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

# Nothing here may start a thread when it is imported: a fork would lose it. Level 2's own modules are not
# here: a test trains with their imports blocked.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "torchft.manager",
    "torchft.process_group",
    "torchft.checkpointing.pg_transport",
    "dilocox.train",
    "sentencepiece",
    "pytest",
    "hypothesis",
]
GRACE_AFTER_FAILURE_S = 3.0


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the text holds its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Runs `fn(rank, *args)` on `world_size` processes that are one gloo world.

    The default process group exists when `fn` starts (`dilocox.backend.init_island` then keeps it).

    Args:
        fn: function at module level of a test module; it and its arguments are pickled.
        world_size: number of processes.
        args: passed on to every rank.
        timeout_s: all processes are killed after this time.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    return run_islands(_without_island, 1, world_size, fn, *args, timeout_s=timeout_s)[0]


def run_islands(
    fn: Callable[..., Any], num_islands: int, ranks_per_island: int, *args: Any, timeout_s: float = 120.0
) -> list[list[Any]]:
    """Runs `fn(island, rank, *args)`; each island is a gloo world of its own.

    Returns:
        `result[island][rank]`.
    """
    folder = Path(tempfile.mkdtemp(prefix="dilocox-ranks-"))
    places = [(island, rank) for island in range(num_islands) for rank in range(ranks_per_island)]
    jobs = [_start(fn, place, ranks_per_island, folder, args) for place in places]
    try:
        answers = _collect(jobs, places, time.monotonic() + timeout_s)
    finally:
        for process, receiver in jobs:
            process.kill()
            process.join()
            receiver.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [answers[i * ranks_per_island : (i + 1) * ranks_per_island] for i in range(num_islands)]


def _without_island(island: int, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    return fn(rank, *args)


def _start(
    fn: Callable[..., Any], place: tuple[int, int], world_size: int, folder: Path, args: tuple[Any, ...]
) -> tuple[ForkServerProcess, Connection]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    # Plain pickle copies tensors; multiprocessing's own pickler would share them by file descriptor.
    call = pickle.dumps((fn, args))
    # Not a daemon: saving a checkpoint starts a process.
    process = context.Process(target=_worker, args=(call, place, world_size, str(folder), sender))
    with _one_thread_environment():
        process.start()  # the first start also starts the server, which keeps this environment
    sender.close()
    return process, receiver


@contextlib.contextmanager
def _one_thread_environment() -> Iterator[None]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(call: bytes, place: tuple[int, int], world_size: int, folder: str, sender: Connection) -> None:
    warnings.simplefilter("ignore")  # of third parties; the tests in the main process are strict
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    island, rank = place
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/island_{island}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        fn, args = pickle.loads(call)
        answer = (True, fn(island, rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    # Stay until the parent ends all ranks at once: one that leaves while others still connect breaks them.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _collect(
    jobs: list[tuple[ForkServerProcess, Connection]], places: list[tuple[int, int]], deadline: float
) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {receiver: index for index, (_, receiver) in enumerate(jobs)}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            index = waiting.pop(receiver)
            where = "island {} rank {}".format(*places[index])
            try:
                succeeded, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                jobs[index][0].join(5)
                succeeded, answer = False, f"died with exit code {jobs[index][0].exitcode}"
            if succeeded:
                answers[index] = answer
            else:
                failures.append(f"{where}: {answer}")
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
    if failures:
        raise RankError("\n".join(failures))
    if waiting:
        late = ["island {} rank {}".format(*places[index]) for index in waiting.values()]
        raise RankError(f"not finished in time: {', '.join(late)}")
    return [answers[index] for index in range(len(jobs))]
