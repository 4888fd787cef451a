"""The interface through which level 2 reports what it did: it imports no metrics. Level 2."""

from __future__ import annotations

from typing import Protocol

from dilocox.outer.sync.request import SyncStats

Scalar = str | int | float | bool | None


class Reporter(Protocol):
    """Receives reports of level 2."""

    def sync(self, stats: SyncStats) -> None:
        """Reports a sync, once its fragment was applied or the sync discarded."""

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Reports anything else: waiting, join, heal, abstain, discard ..."""
