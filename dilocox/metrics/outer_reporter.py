"""What level 2 reports, as records: level 2 itself imports no metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import Scalar, SyncRecord

if TYPE_CHECKING:
    from dilocox.outer.sync.request import SyncStats


class OuterReporter:
    """Hands to the recorder what level 2 reports; an `outer.reporter.Reporter`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def sync(self, stats: SyncStats) -> None:
        """After a fragment was applied, or its sync discarded."""
        self._recorder.sync(SyncRecord(**asdict(stats)))

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Anything else."""
        self._recorder.event(event, inner_step, **details)
