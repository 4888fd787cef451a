"""One background thread for everything that touches the WAN. Level 2.

Quorum, encoding, collective and decoding run here while the training thread continues. Jobs run one after
another in the order they were submitted, which is the same on all ranks of the island.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


class SyncThread:
    """Runs jobs in order; a daemon, so a job that waits for a dead island cannot keep the process.

    On CUDA the jobs run on a stream of their own: it starts after the work that was queued on the
    submitting thread's stream, and the caller's stream waits for it in `result`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; the future holds its result or its exception."""
        future: Future[T] = Future()
        if self._stream is not None:
            # In the submitting thread: its current stream is the one that made the job's tensors.
            self._stream.wait_stream(torch.cuda.current_stream())

        def run() -> None:
            try:
                with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                    value = job()
                future.set_result(value)
            except BaseException as error:
                # The training thread raises it in `result`; this thread must live for the next job.
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def result(self, future: Future[T]) -> T:
        """Waits for a job; tensors it made are ready for the caller's stream."""
        value = future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return value

    def close(self) -> None:
        """Ends the thread after the jobs that are queued; does not wait for them."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
