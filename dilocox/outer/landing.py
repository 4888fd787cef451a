"""APPLY: what a sync that has come back does to position, reducer, anchor and weights. Level 2.

This is the only place where level 2 changes them; it runs in the training thread. The order matters:

1. A received state is loaded first: a committed mean belongs on top of it.
2. Then the reducer keeps or drops the residuals of this sync.
3. Then the outer step moves the anchor, and the delay mode moves the weights.
"""

from __future__ import annotations

from torch import Tensor

from dilocox.outer.fragment import Fragment
from dilocox.outer.fragment_set import FragmentSet
from dilocox.outer.reporter import Reporter
from dilocox.outer.schedule import Event
from dilocox.outer.shared_state import SharedState
from dilocox.outer.sync.request import PendingSync, SyncResult, SyncStats
from dilocox.outer.sync.roles import Role


class Landing:
    """Applies results of syncs to the fragments of one rank."""

    def __init__(
        self, fragments: FragmentSet, state: SharedState, *, num_islands: int, report: Reporter
    ) -> None:
        self._fragments = fragments
        self._state = state
        self._num_islands = num_islands
        self._report = report
        self._num_fallbacks = 0

    def without_sync(self, event: Event, measured: PendingSync | None) -> None:
        """An APPLY with nothing in flight. In place: anchor and weights (`eager`)."""
        fragment = self._fragments.all[event.fragment]
        fragment.mode.nothing_in_flight(_fresh(measured, fragment), share=1.0 / self._num_islands)

    def land(
        self,
        pending: PendingSync,
        result: SyncResult,
        measured: PendingSync | None,
        *,
        blocked_s: float,
    ) -> bool:
        """Applies a finished sync. In place: everything that level 2 keeps, and the shards.

        Args:
            pending: the request that this island submitted.
            measured: measured since, not on the WAN yet; None without one.
            blocked_s: seconds that training stood still for the result.

        Returns: True if another island's state was loaded; `measured` is void then.
        """
        observed = result.role is Role.OBSERVE and result.committed
        loaded_reducer = None
        if result.leader is not None and result.reducer_is_loaded:
            loaded_reducer = result.leader.fragment
        self._move(pending, result if observed else None)
        adopted = self.load_received(reducer_loaded=loaded_reducer)
        own = self._fragments.all[pending.event.fragment]
        fragment = own
        if result.role is Role.OBSERVE and result.leader is not None:
            fragment = self._fragments.all[result.leader.fragment]
        self._record(fragment, pending, result, blocked_s)
        measured = None if adopted else measured
        if not result.committed:
            fragment.reducer.discard()
        if (observed or not result.committed) and not adopted:
            own.discard(
                pending.deltas,
                _fresh(measured, own),
                share=1.0 / self._num_islands,
                num_tokens=pending.num_tokens,
            )
        if result.committed:
            self._commit(fragment, result, measured)
        return adopted

    def load_received(self, *, reducer_loaded: int | None) -> bool:
        """Loads a state that another island handed over; returns whether there was one.

        In place: anchors, outer optimizers, residuals, schedule, shards.

        Args:
            reducer_loaded: see `FragmentSet.load_shared_state`.
        """
        received = self._state.take_received()
        if received is None:
            return False
        self._fragments.load_shared_state(received, reducer_loaded=reducer_loaded)
        self._report.event(
            "heal", self._state.position.inner_step, outer_step=self._fragments.num_outer_steps
        )
        return True

    def _move(self, pending: PendingSync, observed: SyncResult | None) -> None:
        """Moves to where the island is whose state or result this one takes over."""
        there = None
        if (received := self._state.received) is not None:
            there = int(received["inner_step"])
        if observed is not None and observed.leader is not None:
            there = observed.leader.inner_step
        if there is not None:
            # Both have done the same number of steps since their launch.
            self._state.move_to(self._state.position.inner_step + there - pending.inner_step)

    def _commit(self, fragment: Fragment, result: SyncResult, measured: PendingSync | None) -> None:
        assert result.mean is not None
        contributed = result.weight > 0
        fragment.reducer.commit(result.compensated, result.mean, observed=not contributed)
        if contributed:
            fragment.guard.remember(result.norm)
        fragment.apply(
            result.mean,
            _fresh(measured, fragment),
            num_participants=result.num_participants,
            contributed=contributed,
        )
        if fragment.number == len(self._fragments.all) - 1:
            inner_step = self._state.position.inner_step
            interval = self._fragments.adapt_interval(result, inner_step)
            if interval is not None:
                self._report.event("interval", inner_step, sync_interval=interval)

    def _record(self, fragment: Fragment, pending: PendingSync, result: SyncResult, blocked_s: float) -> None:
        step = pending.inner_step
        if result.abstained is not None:
            self._report.event("abstain", step, fragment=fragment.number, reason=result.abstained)
        if result.error is not None:
            self._report.event("discard", step, fragment=fragment.number, reason=result.error)
        num_fallbacks = sum(f.reducer.num_fallbacks for f in self._fragments.all)
        if num_fallbacks > self._num_fallbacks:
            calls, self._num_fallbacks = num_fallbacks - self._num_fallbacks, num_fallbacks
            self._report.event("codec_fallback", step, fragment=fragment.number, calls=calls)
        self._report.sync(
            SyncStats(
                inner_step=step,
                outer_step=fragment.num_syncs + 1,
                fragment=fragment.number,
                num_participants=result.num_participants,
                pseudo_gradient_norm=result.norm,
                cosine_to_mean=result.cosine,
                payload_bytes_sent=result.payload_bytes_sent,
                exchange_s=result.exchange_s,
                waiting_s=result.waiting_s,
                blocked_s=blocked_s,
                codec=self._fragments.config.codec,
                committed=result.committed,
            )
        )


def _fresh(measured: PendingSync | None, fragment: Fragment) -> list[Tensor] | None:
    """Own pseudo-gradient of a fragment that is measured and not on the WAN yet."""
    if measured is None or measured.event.fragment != fragment.number:
        return None
    return measured.deltas
