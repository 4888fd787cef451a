"""Seconds and tokens of a training loop, and overlap efficiency."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Seconds = float


class Throughput:
    """Adds up seconds and tokens of one island's training loop over all its resumes.

    The wall clock runs between `start` and `stop`, less the seconds inside `paused` (validation and
    checkpoints are neither training nor communication). All figures cover what `load_state_dict` has
    restored from earlier parts of the run.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.perf_counter) -> None:
        self._clock = clock
        self._started_at: Seconds | None = None
        self._wall_s = 0.0
        self.compute_s = 0.0
        self.tokens = 0

    def start(self) -> None:
        """Starts the wall clock."""
        self._started_at = self._clock()

    def stop(self) -> None:
        """Stops the wall clock; may be called twice."""
        self._wall_s = self.wall_s
        self._started_at = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the wall clock inside the `with`."""
        running = self._started_at is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()

    def add_step(self, *, tokens: int, compute_s: Seconds) -> None:
        """Adds one inner step: the island's tokens, and seconds of inner compute."""
        self.tokens += tokens
        self.compute_s += compute_s

    @property
    def wall_s(self) -> Seconds:
        running = 0.0 if self._started_at is None else self._clock() - self._started_at
        return self._wall_s + running

    def state_dict(self) -> dict[str, float]:
        return {
            "wall_s": self.wall_s,
            "compute_s": self.compute_s,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._wall_s = state["wall_s"]
        self.compute_s = state["compute_s"]
        self.tokens = int(state["tokens"])


def overlap_efficiency(*, exchange_s: Seconds, blocked_s: Seconds) -> float | None:
    """Returns 1 - blocked / exchange, never below 0: blocked may include waiting for a late island."""
    return max(0.0, 1.0 - blocked_s / exchange_s) if exchange_s > 0 else None
