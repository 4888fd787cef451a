"""DiLoCo between islands: MEASURE, START and APPLY on the fragments this rank owns a part of. Level 2.

The training thread calls the three verbs in the order that the schedule gives. What is in flight belongs
to the exchange thread; anchors, momentum, residuals and weights change in APPLY alone. A sync that
failed changes nothing: its progress is in the next MEASURE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer.outer_state import OuterState
from dilocox.outer.reporter import Reporter
from dilocox.outer.schedule import Event, EventKind
from dilocox.outer.sync.pending import PendingSync
from dilocox.outer.sync.request import Proposals
from dilocox.outer.sync.runner import JoinRules, SyncRequest, SyncResult, SyncRunner
from dilocox.outer.sync.thread import SyncThread
from dilocox.outer.wan.base import Member
from dilocox.param_shard import ParamShard
from dilocox.position import Position

State = dict[str, Any]


class DilocoLoop:
    """The outer loop of one rank; a `OuterLoop`.

    Collective: every verb, by all ranks of the island in the same order.

    Args:
        config: resolved `outer` section.
        shards: fp32 shards that this rank owns.
        fragments: indices into shards, one list a fragment.
        exchange: runs syncs; its WAN group joins the ranks of this coordinate.
        rules: when a starting island may begin.
        hello: identity of this island; the numbers of the round are filled in here.
        publish: makes the model's weights follow the shards. Collective in the island.
        report: metrics and log.
    """

    interface: str | None = None
    reduce_gradients: Callable[[], None] | None = None

    def __init__(
        self,
        config: OuterConfig,
        *,
        shards: Sequence[ParamShard],
        fragments: Sequence[Sequence[int]],
        exchange: SyncRunner,
        rules: JoinRules,
        hello: Member,
        publish: Callable[[], None],
        report: Reporter,
    ) -> None:
        self.state = OuterState(config, shards, fragments, island=hello.island)
        self._config = config
        self._exchange = exchange
        self._rules = rules
        self._proposals = Proposals(config, self.state, hello)
        self._publish = publish
        self._report = report
        self._thread = SyncThread(self.state.device)
        self._measured: PendingSync | None = None
        self._flying: PendingSync | None = None
        self._inner_step = 0
        self._num_applied = (
            0  # syncs as the WAN counts them, without one that is committed but not applied yet
        )
        exchange.wan.serve_state(self.state.shared_state)

    # -- the three verbs -------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        return Position(self._inner_step, self._num_applied)

    def step_done(self, num_tokens: int) -> None:
        """Counts one more inner step."""
        self._inner_step += 1
        self.state.add_tokens(num_tokens)

    def events(self) -> Iterator[Event]:
        """What is due after the inner steps done, in order."""
        return iter(self.state.schedule.after(self._inner_step - 1))

    def measure(self, event: Event) -> None:
        """MEASURE: takes the pseudo-gradient; weights untouched."""
        deltas = self.state.fragments[event.fragment].measure()
        self._measured = PendingSync(event, self._inner_step, deltas, deltas)

    def start(self, event: Event) -> None:
        """START: puts what was measured on the WAN and returns at once."""
        flight, self._measured = self._measured, None
        assert flight is not None and flight.event.fragment == event.fragment
        flight.message = self.state.fragments[event.fragment].message(flight.deltas)
        self._launch(flight)

    def apply(self, event: Event) -> None:
        """APPLY: outer step on the anchor, then the weights. Waits for the exchange if it must.

        In place: anchor, momentum, residual and shards of the fragment, then the model's weights.
        """
        flight, self._flying = self._flying, None
        outcome = None if flight is None else self._land(flight)
        fragment = self.state.fragments[event.fragment]
        fresh = self._measured if self._measured and self._measured.event.fragment == event.fragment else None
        pending = [] if fresh is None else [fresh.deltas]
        if self._config.delay_mode == "eager":
            met = outcome.num_participants if outcome and outcome.committed else self._rules.num_islands
            fragment.update_eagerly(outcome, pending[0] if pending else None, share=1.0 / met)
        elif outcome is not None and outcome.average is not None:
            fragment.update(outcome.average.mean, pending=pending, take_anchor=outcome.weight == 0)
        elif flight is not None:
            fragment.give_back(flight.deltas)
        self._publish()
        if outcome is not None and event.fragment == len(self.state.fragments) - 1:
            self._follow_rank(outcome, self._inner_step)

    def drain(self) -> None:
        """Applies what is in flight when training ends; `eager` islands then average their anchors."""
        for event in self.state.schedule.drain(self._inner_step - 1):
            self.apply(event)
        if self._config.delay_mode == "eager":
            self._average_anchors(self._inner_step)

    # -- joining and leaving ---------------------------------------------------------------------

    def join(self, inner_step: int) -> int:
        """Waits for the other islands, or steps into a run that goes on without this one.

        Args:
            inner_step: inner steps this island has done.

        Returns: inner steps done as the run counts them; more than `inner_step` if this island was behind.

        Raises:
            WanError: too few islands until the timeout, or an island that does not fit.
        """
        hello = self._proposals.to_join(inner_step)
        waiting = partial(self._report.event, "waiting", inner_step)
        job = partial(self._exchange.join, hello, self._rules, listen=self._listener, waiting=waiting)
        joined = self._thread.result(self._thread.submit(job))
        self._inner_step = joined.inner_step
        if joined.healed is not None:
            self._adopt(joined.healed, joined.inner_step)
        self._publish()
        self._num_applied = self._exchange.wan.step - int(joined.outcome is not None)
        self._report.event("join", joined.inner_step, islands=joined.num_islands)
        if joined.outcome is not None:
            self._step_in(joined.inner_step, joined.fragment, joined.outcome)
        elif self._flying is not None:
            self._launch(self._flying)  # in flight when the checkpoint was written
        return joined.inner_step

    def close(self) -> None:
        """Breaks off what is in flight and leaves the WAN."""
        self._thread.close()
        self._exchange.wan.abort()
        self._exchange.wan.shutdown()

    # -- state -----------------------------------------------------------------------------------

    @property
    def num_outer_steps(self) -> int:
        """Outer steps completed."""
        return self.state.num_outer_steps

    def anchors(self) -> list[Tensor]:
        """fp32, one a shard; not copies."""
        return self.state.anchors()

    def predicted_bytes(self) -> int:
        """Payload bytes of this rank that the formula gives for the syncs done."""
        return self.state.predicted_bytes(self._rules.num_islands)

    def state_dict(self) -> State:
        """Everything of this rank, a sync in flight included: resuming starts that sync again."""
        flight = None if self._flying is None else self._flying.state_dict()
        return {**self.state.state_dict(), "num_applied": self._num_applied, "flight": flight}

    def load_state_dict(self, state: State) -> None:
        """Continues from a `state_dict` of a rank with the same shards; before `join`."""
        self.state.load_state_dict(state)
        self._num_applied = state["num_applied"]
        self._exchange.wan.set_step(self._num_applied)
        self._flying = None if state["flight"] is None else PendingSync.from_state_dict(state["flight"])

    # -- internals -------------------------------------------------------------------------------

    def _launch(self, flight: PendingSync) -> None:
        # One in flight: two would contend for the link, and the later would not see the earlier's update.
        assert self._flying is None or self._flying is flight, "another fragment is still in flight"
        self._flying = flight
        flight.future = self._thread.submit(partial(self._exchange.run, self._proposals.of(flight)))

    def _listener(self, running: Member, healed: State | None) -> SyncRequest:
        """A proposal with nothing in it, to hear the result of a sync that is under way."""
        if healed is not None:
            self._adopt(healed, running.inner_step)
        start = Event(EventKind.START, running.fragment, 0)
        return self._proposals.of(self._empty_flight(start, running.inner_step))

    def _step_in(self, inner_step: int, fragment: int, outcome: SyncResult) -> None:
        """Goes on as an island that has just started the sync which this one has listened to."""
        events = self.state.schedule.after(inner_step - 1)
        start = next(i for i, e in enumerate(events) if e.kind is EventKind.START and e.fragment == fragment)
        self._flying = self._empty_flight(events[start], inner_step)
        self._flying.future = Future()
        self._flying.future.set_result(replace(outcome, healed=None))
        for event in events[start + 1 :]:
            self.apply(event)

    def _empty_flight(self, event: Event, inner_step: int) -> PendingSync:
        zeros = [torch.zeros_like(anchor) for anchor in self.state.fragments[event.fragment].anchor]
        return PendingSync(event, inner_step, zeros, zeros)

    def _land(self, flight: PendingSync) -> SyncResult:
        """Waits for a sync and settles everything but anchor and weights."""
        assert flight.future is not None
        started = time.perf_counter()
        outcome = self._thread.result(flight.future)
        blocked_s = time.perf_counter() - started
        fragment = self.state.fragments[flight.event.fragment]
        averaging = self.state.averaging[flight.event.fragment]
        if outcome.average is None:
            averaging.discard()
        else:
            if outcome.healed is not None:
                self._adopt(outcome.healed, flight.inner_step)
            averaging.commit(outcome.sent, outcome.average, listened=outcome.weight == 0)
            if outcome.weight > 0:
                fragment.guard.remember(outcome.norm)
        self._num_applied = self._exchange.wan.step
        self._record(flight, outcome, blocked_s)
        return outcome

    def _adopt(self, state: State, inner_step: int) -> None:
        self.state.adopt(state)
        self._report.event("heal", inner_step, outer_step=self.state.num_outer_steps)

    def _record(self, flight: PendingSync, outcome: SyncResult, blocked_s: float) -> None:
        p, step = flight.event.fragment, flight.inner_step
        if outcome.abstained is not None:
            self._report.event("abstain", step, fragment=p, reason=outcome.abstained)
        if outcome.error is not None:
            self._report.event("discard", step, fragment=p, reason=outcome.error)
        outer_step = self.state.fragments[p].num_syncs + 1
        record = flight.record(outcome, outer_step=outer_step, blocked_s=blocked_s, codec=self._config.codec)
        self._report.sync(record)

    def _follow_rank(self, outcome: SyncResult, inner_step: int) -> None:
        """H follows the rank (DiLoCoX, 2506.21263); the scale is equal on all islands and ranks."""
        if self._config.adaptive_interval and outcome.interval_scale is not None:
            wanted = self._config.sync_interval * outcome.interval_scale
            if (interval := self.state.adapt_interval(wanted, inner_step - 1)) is not None:
                self._report.event("interval", inner_step, sync_interval=interval)

    def _average_anchors(self, inner_step: int) -> None:
        """`eager`: the islands' own anchors become one."""
        (fragment,) = self.state.fragments
        proposal = self._proposals.of_anchor(inner_step)
        outcome = self._thread.result(self._thread.submit(partial(self._exchange.run, proposal)))
        if outcome.average is None:
            self._report.event("discard", inner_step, fragment=0, reason=outcome.error)
            return
        fragment.take_anchor(outcome.average.mean)
        self._publish()
