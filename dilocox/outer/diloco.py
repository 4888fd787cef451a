"""DiLoCo between islands: MEASURE, START and APPLY on the fragments this rank owns a part of. Level 2.

The training thread calls the three verbs in the order that the schedule gives. What is in flight belongs
to the sync thread; anchors, momentum, residuals and weights change in APPLY alone. A sync that failed
changes nothing: its progress is in the next MEASURE. A received state is loaded at the next APPLY, even if
the sync that brought it failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dilocox.outer.fragment import Fragment
from dilocox.outer.fragment_set import FragmentSet
from dilocox.outer.landing import Landing
from dilocox.outer.members import MemberInfo
from dilocox.outer.modes.base import EventKind
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.reporter import Reporter
from dilocox.outer.schedule import Event
from dilocox.outer.sync.join import Joiner, JoinRules, Offer
from dilocox.outer.sync.request import PendingSync, SyncRequest, SyncResult
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.sync.thread import SyncThread
from dilocox.param_shard import ShardState
from dilocox.position import Position


class DilocoLoop:
    """The outer loop of one rank; an `OuterLoop`.

    Collective: every verb, by all ranks of the island in the same order.

    Args:
        fragments: level 2 of this rank.
        runner: runs syncs; its WAN group joins the ranks of this coordinate.
        rules: when a starting island may begin.
        members: makes the member infos of this island.
        publish: makes the model's weights follow the shards. Collective in the island.
        report: receives reports of level 2.
    """

    interface: str | None = None
    reduce_gradients: Callable[[], None] | None = None

    def __init__(
        self,
        fragments: FragmentSet,
        runner: SyncRunner,
        *,
        rules: JoinRules,
        members: MemberInfo,
        publish: Callable[[], None],
        report: Reporter,
    ) -> None:
        self.fragments = fragments
        self._state = runner.state
        self._runner = runner
        self._rules = rules
        self._members = members
        self._publish = publish
        self._report = report
        self._thread = SyncThread(fragments.device)
        self._landing = Landing(fragments, runner.state, num_islands=rules.num_islands, report=report)
        self._measured: PendingSync | None = None
        self._pending: PendingSync | None = None

    @property
    def position(self) -> Position:
        """See `OuterLoop.position`."""
        return self._state.position

    # -- the three verbs -------------------------------------------------------------------------

    def step_done(self, num_tokens: int) -> None:
        """One more inner step is done, on `num_tokens` tokens of this island."""
        self._state.step_done()
        self.fragments.add_tokens(num_tokens)

    def events(self) -> Iterator[Event]:
        """What is due after the inner steps done, in order.

        An APPLY may move the position to where the other islands are. They are at the same place of the
        same list, so the rest of the list is that of the new position.
        """
        index = 0
        while index < len(due := self.fragments.schedule.after(self.position.inner_step)):
            yield due[index]
            index += 1

    def measure(self, event: Event) -> None:
        """MEASURE: takes the pseudo-gradient; weights untouched."""
        deltas, num_tokens = self.fragments.all[event.fragment].measure()
        self._measured = PendingSync(event, self.position.inner_step, deltas, num_tokens, deltas)

    def start(self, event: Event) -> None:
        """START: puts what was measured on the WAN and returns at once."""
        if self._measured is not None and self._measured.event.fragment != event.fragment:
            # An APPLY in between has moved this island, and with it what is due now.
            void, self._measured = self._measured, None
            self.fragments.all[void.event.fragment].discard(
                void.deltas, None, share=1.0, num_tokens=void.num_tokens
            )
        if self._measured is None:
            self.measure(event)
        pending, self._measured = self._measured, None
        assert pending is not None
        pending.event, pending.inner_step = event, self.position.inner_step
        pending.payload = self.fragments.all[event.fragment].mode.payload(pending.deltas)
        self._submit(pending)

    def apply(self, event: Event) -> None:
        """APPLY: outer step on the anchor, then the weights. Waits for the sync if it must.

        In place: anchor, outer optimizer, residual and shards of the fragment, then the model's weights.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            self._landing.without_sync(event, self._measured)
        else:
            result, blocked_s = self._wait(pending)
            if self._landing.land(pending, result, self._measured, blocked_s=blocked_s):
                self._measured = None  # it belongs to a trajectory that has been left
        self._publish()

    def drain(self) -> None:
        """Applies what is in flight when training ends; `eager` islands then average their anchors."""
        for event in self.fragments.schedule.drain(self.position.inner_step):
            self.apply(event)
        if not self.fragments.anchors_are_shared:
            self._average_anchors()

    # -- joining and leaving ---------------------------------------------------------------------

    def join(self, inner_step: int) -> int:
        """Waits for the other islands, or takes part in a sync that is under way.

        Args:
            inner_step: inner steps this island has done.

        Returns: inner steps done as the run counts them.

        Raises:
            WanError: too few islands until the timeout, or an island that does not fit.
        """
        self._state.move_to(inner_step)
        self._state.launch(inner_step)
        joiner = Joiner(
            self._runner,
            self._rules,
            island=self._members.island,
            member=partial(self._members.to_join, inner_step),
            waiting=partial(self._report.event, "waiting", inner_step),
        )
        offer = self._thread.result(self._thread.submit(joiner.join))
        self._state.move_to(offer.inner_step)
        if self._landing.load_received(reducer_loaded=None):
            self._pending = None  # it belongs to a trajectory that has been left
        self._publish()
        self._report.event("join", offer.inner_step, islands=offer.num_islands)
        if offer.session is not None:
            self._observe(offer)
        elif self._pending is not None:
            self._submit(self._pending)  # in flight when the checkpoint was written
        return self.position.inner_step

    def close(self) -> None:
        """Breaks off what is in flight and leaves the WAN."""
        self._thread.close()
        self._runner.wan.abort()
        self._runner.wan.shutdown()

    # -- state -----------------------------------------------------------------------------------

    @property
    def num_outer_steps(self) -> int:
        """Outer steps completed."""
        return self.fragments.num_outer_steps

    def anchors(self) -> list[Tensor]:
        """fp32, one per shard; not copies."""
        return self.fragments.anchors()

    def predicted_bytes(self) -> int:
        """Payload bytes of this rank that the formula gives for the syncs done."""
        return self.fragments.predicted_bytes(self._rules.num_islands)

    def state_dict(self) -> ShardState:
        """Everything of this rank, a sync in flight included: resuming starts that sync again."""
        return self.fragments.state_dict(self._pending)

    def load_state_dict(self, state: ShardState) -> None:
        """Continues from a `state_dict` of any layout; before `join`. Collective: all ranks of the island."""
        self._pending = self.fragments.load_state_dict(state)
        # One rank may find its fragment as it was while another stage does not: all of them decide alike.
        if self._runner.control.sum([float(not self.fragments.holds(state))])[0]:
            assert self._pending is not None
            self.fragments.measure_again(state)
            self._report.event(
                "discard",
                self._pending.inner_step,
                fragment=self._pending.event.fragment,
                reason="it was in flight when the checkpoint was written, under other pipeline stages, which "
                "have other fragments; its progress is in the next sync",
            )
            self._pending = None

    # -- internals -------------------------------------------------------------------------------

    def _submit(self, pending: PendingSync) -> None:
        # One in flight: two would contend for the link, and the later would not see the earlier's update.
        assert self._pending is None or self._pending is pending, "another fragment is still in flight"
        self._pending = pending
        fragment = self.fragments.all[pending.event.fragment]
        request = SyncRequest(
            member=self._members.to_sync(pending, fragment),
            payload=pending.payload,
            target=fragment,
            abstain_reason=fragment.guard.reason_to_abstain,
            anchor=fragment.anchor if fragment.mode.anchors_are_shared else (),
        )
        self._state.launch(pending.inner_step)
        pending.future = self._thread.submit(partial(self._runner.run, request))

    def _observe(self, offer: Offer) -> None:
        """Continues as if this island had started the sync that it observes."""
        assert offer.session is not None and offer.roles is not None
        leader = offer.roles.leader
        event = Event(EventKind.START, leader.fragment, leader.outer_step)
        zeros = [torch.zeros_like(anchor) for anchor in self.fragments.all[leader.fragment].anchor]
        self._pending = PendingSync(event, offer.inner_step, zeros, 0, zeros)
        self._state.launch(offer.inner_step)
        job = partial(self._runner.observe, offer.session, offer.roles, self._members.island)
        self._pending.future = self._thread.submit(job)
        due = list(self.fragments.schedule.after(offer.inner_step))
        start = next(i for i, e in enumerate(due) if e.kind is EventKind.START)
        for follows in due[start + 1 :]:  # `blocking` applies at once
            self.apply(follows)

    def _wait(self, pending: PendingSync) -> tuple[SyncResult, float]:
        assert pending.future is not None
        started = time.perf_counter()
        result = self._thread.result(pending.future)
        return result, time.perf_counter() - started

    def _average_anchors(self) -> None:
        """`eager`: the islands' own anchors become one, in fp32 and without a guard."""
        (fragment,) = self.fragments.all
        inner_step = self.position.inner_step
        target = _Anchors(fragment, island=self._members.island)
        request = SyncRequest(
            member=self._members.to_average_anchors(inner_step, fragment),
            payload=[anchor.clone() for anchor in fragment.anchor],
            target=target,
            abstain_reason=lambda norm: None,
        )
        self._state.launch(inner_step)
        result = self._thread.result(self._thread.submit(partial(self._runner.run, request)))
        if result.mean is None:
            self._report.event("discard", inner_step, fragment=0, reason=result.error)
            return
        fragment.set_anchor(result.mean.mean)
        self._publish()


class _Anchors:
    """The anchors of a fragment as what a sync averages: without codec and residual."""

    def __init__(self, fragment: Fragment, *, island: int) -> None:
        self.shards = fragment.shards
        self.reducer = FragmentReducer.exact(fragment.shards, island=island)
