"""Reads the next batch while the current step runs (level 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from dilocox.data.datasets import MicroBatch


class BatchSource(Protocol):
    """Where batches come from, such as `data.datasets.Data`."""

    def batches(self, consumed_samples: int = 0) -> Iterator[list[MicroBatch]]:
        """Yields the micro-batches of this rank, one list per step."""


@dataclass(frozen=True)
class _Ready:
    """A batch on the device of this rank, and the event that completes its copies (None on the CPU)."""

    microbatches: list[MicroBatch]
    copied: torch.cuda.Event | None


class Prefetcher:
    """Batches of one rank, each read, collated and moved to the device one step ahead by one thread.

    The samples of a step depend only on the number of steps done, so a resume needs nothing but `seek`.

    Memory: one batch beside that of the running step; on CUDA in pinned memory and on the device.

    Args:
        source: opened data sets of this rank. Only the thread reads training batches from it.
        global_batch_size: samples per inner step.
        device: where the training thread needs the batches.
    """

    def __init__(self, source: BatchSource, *, global_batch_size: int, device: torch.device) -> None:
        self._source = source
        self._global_batch_size = global_batch_size
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._copy_stream: torch.cuda.Stream | None = None
        self._read: Callable[[], _Ready | None] | None = None
        self._next: Future[_Ready | None] | None = None

    def seek(self, inner_step: int) -> None:
        """Makes the next batch the one after `inner_step` inner steps."""
        self._settle()
        batches = self._source.batches(inner_step * self._global_batch_size)
        self._read = lambda: self._prepare(next(batches, None))
        self._next = self._thread.submit(self._read)

    def take(self) -> list[MicroBatch]:
        """Returns the micro-batches of the next inner step.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        assert self._next is not None and self._read is not None, "seek comes first"
        ready = self._next.result()
        if ready is None:
            raise IndexError("there are no batches after the last inner step")
        # Only one batch ahead, and only now: an earlier start would hold a third batch in memory.
        self._next = self._thread.submit(self._read)
        if ready.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.copied)
            for microbatch in ready.microbatches:
                for values in microbatch.values():
                    # Allocated on the copy stream: without this the allocator could reuse it too early.
                    values.record_stream(stream)
        return ready.microbatches

    def close(self) -> None:
        """Waits for the batch that is being read, and ends the thread."""
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        # Data sets allow one reader at a time, so the running read must end. Its batch is not used, and an
        # error in it does not matter.
        if self._next is not None and not self._next.cancel():
            self._next.exception()
        self._next = None

    def _prepare(self, microbatches: list[MicroBatch] | None) -> _Ready | None:
        if microbatches is None or self._device.type != "cuda":
            return None if microbatches is None else _Ready(microbatches, None)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            # Only a copy from pinned memory overlaps with computation on the device.
            moved = [
                {
                    name: values.pin_memory().to(self._device, non_blocking=True)
                    for name, values in microbatch.items()
                }
                for microbatch in microbatches
            ]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copy_stream)
        return _Ready(moved, copied)
