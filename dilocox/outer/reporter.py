"""Where level 2 tells what it did. Level 2 imports no metrics."""

from __future__ import annotations

from typing import Protocol

from dilocox.outer.sync.request import SyncStats

Scalar = str | int | float | bool | None


class Reporter(Protocol):
    """Takes what happened at level 2."""

    def sync(self, stats: SyncStats) -> None:
        """After a fragment was applied, or its sync discarded."""

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Anything else: waiting, join, heal, abstain, discard ..."""
