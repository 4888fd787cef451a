"""Sums over the records of one island; after a resume they are summed again from the file."""

from __future__ import annotations

from collections import Counter

from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, Record, SyncRecord

FAILURE_EVENTS = ("discard", "abstain", "leave", "heal", "skipped_step", "codec_fallback")
"""Events after which the run continued although something had failed."""


class Totals:
    """Sums of an island's records for its summary."""

    def __init__(self) -> None:
        self.inner_steps = 0
        self.tokens = 0
        self.payload_bytes_sent = 0
        self.num_committed_syncs = 0
        self.exchange_s = 0.0
        self.blocked_s = 0.0
        self.last_lm_loss: float | None = None
        self.first_val_loss: float | None = None
        self.val_loss: float | None = None
        self.events: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        if isinstance(record, InnerRecord):
            self.inner_steps = record.inner_step
            self.tokens += record.tokens
            self.last_lm_loss = record.lm_loss
        elif isinstance(record, SyncRecord):
            self._add_sync(record)
        elif isinstance(record, EvalRecord):
            self.first_val_loss = record.val_loss if self.first_val_loss is None else self.first_val_loss
            self.val_loss = record.val_loss
        elif isinstance(record, EventRecord):
            self.events[record.event] += 1

    def _add_sync(self, record: SyncRecord) -> None:
        self.payload_bytes_sent += record.payload_bytes_sent
        self.exchange_s += record.exchange_s
        self.blocked_s += record.blocked_s
        self.num_committed_syncs += record.committed

    @property
    def failures(self) -> dict[str, int]:
        """How often each of `FAILURE_EVENTS` happened."""
        return {event: self.events[event] for event in FAILURE_EVENTS}
