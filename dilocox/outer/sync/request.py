"""What this island says of itself to the others, and what it brings to a sync. Level 2."""

from __future__ import annotations

from dataclasses import replace

from dilocox.config.schema import OuterConfig
from dilocox.outer.outer_state import OuterState
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.sync.pending import PendingSync
from dilocox.outer.sync.runner import SyncRequest
from dilocox.outer.wan.base import Member


class Proposals:
    """Makes hellos and proposals from the state of the outer loop.

    Args:
        hello: identity of this island; the numbers of the round are filled in here.
    """

    def __init__(self, config: OuterConfig, state: OuterState, hello: Member) -> None:
        self._config = config
        self._state = state
        self._hello = hello

    def to_join(self, inner_step: int) -> Member:
        """Asks to be let in, having done inner_step inner steps."""
        comparable = inner_step == 0 or self._config.delay_mode != "eager"
        return replace(
            self._hello,
            kind="join",
            weight=0.0,
            inner_step=inner_step,
            anchor_hash=self._state.anchor_hash() if comparable else "",
        )

    def of(self, flight: PendingSync) -> SyncRequest:
        """Brings what was measured."""
        fragment = self._state.fragments[flight.event.fragment]
        return SyncRequest(
            hello=self._to_sync(fragment.number, flight.inner_step),
            deltas=flight.message,
            shards=fragment.shards,
            averaging=self._state.averaging[fragment.number],
            judge=fragment.guard.reason_to_abstain,
            anchor=() if self._config.delay_mode == "eager" else fragment.anchor,
        )

    def of_anchor(self, inner_step: int) -> SyncRequest:
        """Brings the anchor itself, without codec, residual or guard.

        The end of `eager`, whose anchors are each island's own until they are averaged once, in fp32.
        """
        (fragment,) = self._state.fragments
        return SyncRequest(
            hello=self._to_sync(fragment.number, inner_step),
            deltas=[anchor.clone() for anchor in fragment.anchor],
            shards=fragment.shards,
            averaging=FragmentReducer.exact(fragment.shards, island=self._hello.island),
            judge=lambda norm: None,
        )

    def _to_sync(self, number: int, inner_step: int) -> Member:
        fragment = self._state.fragments[number]
        return replace(
            self._hello,
            outer_step=fragment.num_syncs,
            fragment=number,
            inner_step=inner_step,
            weight=float(fragment.num_tokens) if self._config.island_weights == "by_tokens" else 1.0,
        )
