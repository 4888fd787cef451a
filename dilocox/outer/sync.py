"""Level 2 of one rank: MEASURE, START and APPLY on the fragments it owns a part of.

The training thread calls the three verbs in the order that the schedule gives. What is in flight belongs
to the exchange thread; anchors, momentum, residuals and weights change in APPLY alone. A sync that
failed changes nothing: its progress is in the next MEASURE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dilocox.config import OuterConfig
from dilocox.metrics.records import SyncRecord
from dilocox.outer.averaging import Averaging
from dilocox.outer.exchange import Exchange, JoinRules, Outcome, Proposal
from dilocox.outer.exchange_thread import ExchangeThread
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.hashing import hash_tensors
from dilocox.outer.optimizer import build_outer_optimizer
from dilocox.outer.schedule import Event, EventKind, Phase, Schedule
from dilocox.outer.wan.base import Hello
from dilocox.pieces import Piece

State = dict[str, Any]


class Reporter(Protocol):
    """Where level 2 tells what it did; `metrics.Recorder` is one."""

    def sync(self, record: SyncRecord) -> None: ...

    def event(self, event: str, inner_step: int, **details: str | int | float | bool | None) -> None: ...


@dataclass
class Flight:
    """A pseudo-gradient on its way: measured, and started once `future` is there.

    Attributes:
        inner_step: inner steps done when it was measured.
        message: what crosses the WAN; the deltas themselves but for `eager`.
    """

    event: Event
    inner_step: int
    deltas: list[Tensor]
    message: list[Tensor]
    future: Future[Outcome] | None = None


class OuterSync:
    """The outer loop's state and verbs.

    Collective: every verb, by all ranks of the island in the same order.

    Args:
        config: resolved `outer` section.
        pieces: fp32 pieces that this rank owns.
        fragments: indices into pieces, one list a fragment.
        exchange: runs syncs; its WAN group joins the ranks of this coordinate.
        hello: identity of this island; the numbers of the round are filled in here.
        publish: makes the model's weights follow the pieces. Collective in the island.
        report: metrics and log.
    """

    def __init__(
        self,
        config: OuterConfig,
        *,
        pieces: Sequence[Piece],
        fragments: Sequence[Sequence[int]],
        exchange: Exchange,
        hello: Hello,
        publish: Callable[[], None],
        report: Reporter,
    ) -> None:
        self.schedule = Schedule.from_config(config)
        self._config = config
        self._exchange = exchange
        self._hello = hello
        self._publish = publish
        self._report = report
        self._fragment_indices = [list(indices) for indices in fragments]
        self._num_pieces = len(pieces)
        optimizer = build_outer_optimizer(config)
        owned = [[pieces[i] for i in indices] for indices in fragments]
        self.fragments = [FragmentState(config, p, own, optimizer) for p, own in enumerate(owned)]
        self._averaging = [Averaging(config, p, own, hello) for p, own in enumerate(owned)]
        self._thread = ExchangeThread(pieces[0].tensor.device if pieces else torch.device("cpu"))
        self._measured: Flight | None = None
        self._flying: Flight | None = None
        exchange.wan.serve_state(self.shared_state)

    # -- the three verbs -------------------------------------------------------------------------

    def measure(self, event: Event, inner_step: int) -> None:
        """MEASURE: takes the pseudo-gradient; weights untouched.

        Args:
            inner_step: inner steps done.
        """
        deltas = self.fragments[event.fragment].measure()
        self._measured = Flight(event, inner_step, deltas, deltas)

    def start(self, event: Event) -> None:
        """START: puts what was measured on the WAN and returns at once."""
        flight, self._measured = self._measured, None
        assert flight is not None and flight.event.fragment == event.fragment
        flight.message = self.fragments[event.fragment].message(flight.deltas)
        self._launch(flight)

    def apply(self, event: Event, inner_step: int) -> None:
        """APPLY: outer step on the anchor, then the weights. Waits for the exchange if it must.

        Args:
            inner_step: inner steps done.

        In place: anchor, momentum, residual and pieces of the fragment, then the model's weights.
        """
        flight, self._flying = self._flying, None
        outcome = None if flight is None else self._land(flight)
        fragment = self.fragments[event.fragment]
        fresh = self._measured if self._measured and self._measured.event.fragment == event.fragment else None
        pending = [fresh.deltas] if fresh is not None else []
        if self._config.delay_mode == "eager":
            share = 1.0 / (outcome.num_participants if outcome and outcome.committed else self._num_islands)
            fragment.update_eagerly(outcome, pending[0] if pending else None, share=share)
        elif outcome is not None and outcome.average is not None:
            unfit = outcome.abstained is not None or outcome.healed is not None
            fragment.update(outcome.average.mean, pending=pending, take_anchor=unfit)
        elif flight is not None:
            fragment.give_back(flight.deltas)
        self._publish()
        if outcome is not None and event.fragment == len(self.fragments) - 1:
            self._adapt(outcome, inner_step)

    def drain(self, inner_step: int) -> None:
        """Applies what is in flight when training ends; `eager` islands then average their anchors.

        Args:
            inner_step: 0-based index of the last step.
        """
        for event in self.schedule.drain(inner_step):
            self.apply(event, inner_step + 1)
        if self._config.delay_mode == "eager":
            self._average_anchors(inner_step + 1)

    # -- joining and leaving ---------------------------------------------------------------------

    def join(self, inner_step: int, rules: JoinRules) -> int:
        """Waits for the other islands, or steps into a run that goes on without this one.

        Args:
            inner_step: inner steps this island has done.

        Returns: inner steps done as the run counts them; more than `inner_step` if this island was behind.

        Raises:
            WanError: too few islands until the timeout, or an island that does not fit.
        """
        hello = replace(
            self._hello, kind="join", weight=0.0, inner_step=inner_step, anchor_hash=self.anchor_hash()
        )
        waiting = partial(self._report.event, "waiting", inner_step)
        job = partial(self._exchange.join, hello, rules, listen=self._listener, waiting=waiting)
        joined = self._thread.result(self._thread.submit(job))
        if joined.healed is not None:
            self._adopt(joined.healed, joined.inner_step)
            self._publish()
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
        """Outer steps completed: committed syncs of every fragment."""
        return min(fragment.num_syncs for fragment in self.fragments)

    def anchors(self) -> list[Tensor]:
        """The anchors in the order of the pieces; not copies."""
        anchors: dict[int, Tensor] = {}
        for indices, fragment in zip(self._fragment_indices, self.fragments, strict=True):
            anchors.update(zip(indices, fragment.anchor, strict=True))
        return [anchors[i] for i in range(len(anchors))]

    def anchor_hash(self) -> str:
        """Hash of this rank's anchors; equal on all islands."""
        return hash_tensors(self.anchors())

    def add_tokens(self, num_tokens: int) -> None:
        """Counts the island's tokens, for weights by tokens."""
        for fragment in self.fragments:
            fragment.num_tokens += num_tokens

    def shared_state(self) -> State:
        """What must be equal on all islands; handed to an island that is behind. Not copies."""
        return {
            "fragments": [fragment.shared_state() for fragment in self.fragments],
            "averaging": [averaging.shared_state() for averaging in self._averaging],
            "phases": [[p.begin, p.first_launch, p.sync_interval] for p in self.schedule.phases],
        }

    def state_dict(self) -> State:
        """Everything of this rank, a sync in flight included: resuming starts that sync again."""
        flight = self._flying
        return {
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "averaging": [averaging.state_dict() for averaging in self._averaging],
            "phases": self.shared_state()["phases"],
            "step": self._exchange.wan.step,
            "flight": flight
            and {
                "event": [flight.event.fragment, flight.event.round],
                "inner_step": flight.inner_step,
                "deltas": flight.deltas,
                "message": flight.message,
            },
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from a `state_dict` of a rank with the same pieces; before `join`."""
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        for averaging, saved in zip(self._averaging, state["averaging"], strict=True):
            averaging.load_state_dict(saved)
        self._set_phases(state["phases"])
        self._exchange.wan.set_step(state["step"])
        if flight := state["flight"]:
            event = Event(EventKind.START, *flight["event"])
            self._flying = Flight(event, flight["inner_step"], flight["deltas"], flight["message"])

    # -- internals -------------------------------------------------------------------------------

    def _launch(self, flight: Flight) -> None:
        # One in flight: two would contend for the same link, and the later one could not see the earlier's update.
        assert self._flying is None or self._flying is flight, f"{self._flying} is still in flight"
        self._flying = flight
        flight.future = self._thread.submit(partial(self._exchange.run, self._proposal(flight)))

    def _proposal(self, flight: Flight) -> Proposal:
        p = flight.event.fragment
        fragment, averaging = self.fragments[p], self._averaging[p]
        eager = self._config.delay_mode == "eager"
        hello = replace(
            self._hello,
            outer_step=fragment.num_syncs,
            fragment=p,
            inner_step=flight.inner_step,
            weight=float(fragment.num_tokens) if self._config.island_weights == "by_tokens" else 1.0,
            anchor_hash="" if eager else hash_tensors(fragment.anchor),
        )
        return Proposal(
            hello=hello,
            deltas=flight.message,
            pieces=fragment.pieces,
            averaging=averaging,
            judge=fragment.guard.reason_to_abstain,
        )

    def _listener(self, running: Hello, healed: State | None) -> Proposal:
        """A proposal with nothing in it, to hear the result of a sync that is under way."""
        if healed is not None:
            self._adopt(healed, running.inner_step)
        zeros = [torch.zeros_like(anchor) for anchor in self.fragments[running.fragment].anchor]
        event = Event(EventKind.START, running.fragment, 0)
        return self._proposal(Flight(event, running.inner_step, zeros, zeros))

    def _step_in(self, inner_step: int, fragment: int, outcome: Outcome) -> None:
        """Goes on as an island that has just started the sync which this one has listened to."""
        events = self.schedule.after(inner_step - 1)
        start = next(i for i, e in enumerate(events) if e.kind is EventKind.START and e.fragment == fragment)
        zeros = [torch.zeros_like(anchor) for anchor in self.fragments[fragment].anchor]
        future: Future[Outcome] = Future()
        future.set_result(outcome)
        self._flying = Flight(events[start], inner_step, zeros, zeros, future)
        for event in events[start + 1 :]:
            self.apply(event, inner_step)

    def _land(self, flight: Flight) -> Outcome:
        """Waits for a sync and settles everything but anchor and weights."""
        assert flight.future is not None
        started = time.perf_counter()
        outcome = self._thread.result(flight.future)
        blocked_s = time.perf_counter() - started
        fragment, averaging = self.fragments[flight.event.fragment], self._averaging[flight.event.fragment]
        if outcome.healed is not None and outcome.committed:
            self._adopt(outcome.healed, flight.inner_step)
        if outcome.average is not None:
            averaging.commit(outcome.sent, outcome.average, abstained=outcome.weight == 0)
            if outcome.weight > 0:
                fragment.guard.remember(outcome.norm)
        else:
            averaging.discard()
        self._record(flight, outcome, blocked_s)
        return outcome

    def _record(self, flight: Flight, outcome: Outcome, blocked_s: float) -> None:
        p, step = flight.event.fragment, flight.inner_step
        if outcome.abstained is not None:
            self._report.event("abstain", step, fragment=p, reason=outcome.abstained)
        if outcome.error is not None:
            self._report.event("discard", step, fragment=p, reason=outcome.error)
        self._report.sync(
            SyncRecord(
                inner_step=step,
                outer_step=self.fragments[p].num_syncs + 1,
                fragment=p,
                num_participants=outcome.num_participants,
                pseudo_gradient_norm=outcome.norm,
                cosine_to_mean=outcome.cosine,
                payload_bytes_sent=outcome.payload_bytes_sent,
                exchange_s=outcome.exchange_s,
                blocked_s=blocked_s,
                codec=self._config.codec,
                committed=outcome.committed,
            )
        )

    def _adopt(self, state: State, inner_step: int) -> None:
        self._report.event("heal", inner_step, outer_step=state["fragments"][0]["num_syncs"])
        for fragment, theirs in zip(self.fragments, state["fragments"], strict=True):
            fragment.adopt(theirs)
            fragment.reset()
        for averaging, theirs in zip(self._averaging, state["averaging"], strict=True):
            averaging.adopt(theirs)
        self._set_phases(state["phases"])

    def _set_phases(self, phases: Sequence[Sequence[int]]) -> None:
        self.schedule = replace(self.schedule, phases=tuple(Phase(*phase) for phase in phases))

    def _adapt(self, outcome: Outcome, inner_step: int) -> None:
        """Follows the rank with H (DiLoCoX); the scale is equal on all islands and ranks."""
        if not self._config.adaptive_interval or outcome.interval_scale is None:
            return
        wanted = self.schedule.fitting_interval(self._config.sync_interval * outcome.interval_scale)
        if wanted != self.schedule.sync_interval(inner_step):
            self.schedule = self.schedule.with_interval(wanted, inner_step)
            self._report.event("interval", inner_step + 1, sync_interval=wanted)

    def _average_anchors(self, inner_step: int) -> None:
        """Blocking fp32 average of island-specific anchors (`eager`)."""
        fragment = self.fragments[0]
        anchors = [anchor.clone() for anchor in fragment.anchor]
        event = Event(EventKind.START, 0, fragment.num_syncs)
        proposal = replace(
            self._proposal(Flight(event, inner_step, anchors, anchors)),
            averaging=Averaging.exact(fragment.number, self._hello),
            judge=lambda norm: None,
        )
        outcome = self._thread.result(self._thread.submit(partial(self._exchange.run, proposal)))
        if outcome.average is None:
            self._report.event("discard", inner_step, fragment=0, reason=outcome.error)
            return
        for anchor, mean in zip(fragment.anchor, outcome.average.mean, strict=True):
            anchor.copy_(mean)
        fragment.reset()
        self._publish()
