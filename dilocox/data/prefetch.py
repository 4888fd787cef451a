"""Reads the next batch while the current step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from dilocox.data.datasets import MicroBatch


class BatchSource(Protocol):
    """`data.datasets.Data` is one."""

    def batches(self, consumed_samples: int = 0) -> Iterator[list[MicroBatch]]:
        """Micro-batches of this rank, one list per step."""


@dataclass(frozen=True)
class _Ready:
    """A batch on the device of this rank, and what makes its copies complete (None on the CPU)."""

    microbatches: list[MicroBatch]
    copied: torch.cuda.Event | None


class Prefetcher:
    """Batches of one rank, each read, collated and moved to the device one step ahead by one thread.

    Which samples a step gets depends on the number of steps done alone, so a position is all there is to
    restore.

    Memory: one batch more than the step that runs; on CUDA both in pinned memory and on the device.

    Args:
        source: opened data sets of this rank. The thread alone reads its training batches.
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
        """The next batch is the one after `inner_step` inner steps."""
        self._settle()
        batches = self._source.batches(inner_step * self._global_batch_size)
        self._read = lambda: self._prepare(next(batches, None))
        self._next = self._thread.submit(self._read)

    def take(self) -> list[MicroBatch]:
        """The micro-batches of the next inner step.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        assert self._next is not None and self._read is not None, "seek comes first"
        ready = self._next.result()
        if ready is None:
            raise IndexError("there are no batches after the last inner step")
        self._next = self._thread.submit(self._read)
        if ready.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.copied)
            for microbatch in ready.microbatches:
                for values in microbatch.values():
                    # The memory belongs to the copy stream's allocator: it is free when this stream is done.
                    values.record_stream(stream)
        return ready.microbatches

    def close(self) -> None:
        """Waits for the batch that is being read, and ends the thread."""
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        # The data sets are not made for two readers at once; an error of a batch that is not used is moot.
        if self._next is not None and not self._next.cancel():
            self._next.exception()
        self._next = None

    def _prepare(self, microbatches: list[MicroBatch] | None) -> _Ready | None:
        if microbatches is None or self._device.type != "cuda":
            return None if microbatches is None else _Ready(microbatches, None)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            # Only a copy from pinned memory overlaps with what the device computes.
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
