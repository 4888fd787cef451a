"""A pseudo-gradient on its way over the WAN. Level 2."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilocox.metrics.records import SyncRecord
from dilocox.outer.schedule import Event, EventKind
from dilocox.outer.sync.runner import SyncResult


@dataclass
class PendingSync:
    """Measured, and started once `future` is there.

    Attributes:
        event: the START it belongs to.
        inner_step: inner steps done when it was measured.
        deltas: pseudo-gradient, one fp32 tensor a shard.
        message: what crosses the WAN; the deltas themselves but for `eager`.
    """

    event: Event
    inner_step: int
    deltas: list[Tensor]
    message: list[Tensor]
    future: Future[SyncResult] | None = None

    def record(self, outcome: SyncResult, *, outer_step: int, blocked_s: float, codec: str) -> SyncRecord:
        """What metrics and log say of it.

        Args:
            outer_step: number of this outer step of the fragment, from one.
            blocked_s: seconds that training stood still for it.
        """
        return SyncRecord(
            inner_step=self.inner_step,
            outer_step=outer_step,
            fragment=self.event.fragment,
            num_participants=outcome.num_participants,
            pseudo_gradient_norm=outcome.norm,
            cosine_to_mean=outcome.cosine,
            payload_bytes_sent=outcome.payload_bytes_sent,
            exchange_s=outcome.exchange_s,
            waiting_s=outcome.waiting_s,
            blocked_s=blocked_s,
            codec=codec,
            committed=outcome.committed,
        )

    def state_dict(self) -> dict[str, Any]:
        """What it takes to start it again. Not copies."""
        return {
            "event": [self.event.fragment, self.event.round],
            "inner_step": self.inner_step,
            "deltas": self.deltas,
            "message": self.message,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PendingSync:
        """Inverse of `state_dict`; not started."""
        event = Event(EventKind.START, *state["event"])
        return cls(event, state["inner_step"], state["deltas"], state["message"])
