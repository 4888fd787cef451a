"""Turns reports of level 2 into records: level 2 itself imports no metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import Scalar, SyncRecord

if TYPE_CHECKING:
    from dilocox.outer.sync.request import SyncStats


class OuterReporter:
    """Passes reports of level 2 to the recorder; an `outer.reporter.Reporter`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def sync(self, stats: SyncStats) -> None:
        """See `Reporter.sync`."""
        self._recorder.sync(SyncRecord(**asdict(stats)))

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """See `Reporter.event`."""
        self._recorder.event(event, inner_step, **details)
