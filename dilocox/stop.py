"""When a run must stop before its last step: signals, `exit_interval`, a time limit, a lost launcher."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from dilocox.config.schema import RunConfig

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Notes reasons to stop; `StepReports` checks them.

    Signals only set a flag: the step that is running ends, then all ranks of the island save and leave
    together. Repeated signals change nothing (torchrun, srun and a batch script often send one each).

    Attributes:
        reason: first reason seen on this rank, or None.
    """

    def __init__(self, run: RunConfig) -> None:
        self.reason: str | None = None
        self._interval = run.exit_interval
        minutes = run.exit_duration_in_mins
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._parent = os.getppid()
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    @property
    def is_set(self) -> bool:
        return self.reason is not None

    def check(self, inner_steps_done: int) -> bool:
        """Checks clock, step count and parent; True if this rank has a reason to stop."""
        if self.reason is None:
            if self._interval is not None and inner_steps_done % self._interval == 0:
                self.reason = f"run.exit_interval {self._interval}"
            elif self._deadline is not None and time.monotonic() > self._deadline:
                self.reason = "run.exit_duration_in_mins has passed"
            elif os.getppid() != self._parent:
                self.reason = "the process that started this rank is gone"
        return self.is_set

    def note(self, reason: str) -> None:
        """Notes a reason; the first one stays."""
        if self.reason is None:
            self.reason = reason

    def restore(self) -> None:
        """Restores the signal handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.note(signal.Signals(number).name)
