"""Where level 2 tells what it did."""

from __future__ import annotations

from typing import Protocol

from dilocox.metrics.records import Scalar, SyncRecord


class Reporter(Protocol):
    """`metrics.recorder.Recorder` is one."""

    def sync(self, record: SyncRecord) -> None:
        """After a fragment was applied, or its sync discarded."""

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Anything else: waiting, join, heal, abstain, discard ..."""
