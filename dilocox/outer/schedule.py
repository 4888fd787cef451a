"""When level 2 acts: pure integers, no torch, no state.

A fragment is launched every H/P inner steps, in turn, so each one is synced every H. Everything follows
from the number of inner steps done: a run resumed from any step sees the same events. The first window of
fragment p is (p+1) * H/P steps, shorter than H for all but the last: it measures what has been done so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dilocox.config.defaults import DelayMode
from dilocox.config.schema import OuterConfig


class EventKind(Enum):
    """What level 2 does after an inner step."""

    MEASURE = "measure"
    START = "start"
    APPLY = "apply"


@dataclass(frozen=True)
class Event:
    """One action of level 2.

    Attributes:
        fragment: 0 <= fragment < num_fragments.
        round: which sync of this fragment, from 0. `eager` applies the own pseudo-gradient of this round
            with what the others sent in the one before; its drain is one round more, with nothing fresh.
    """

    kind: EventKind
    fragment: int
    round: int


@dataclass(frozen=True)
class Phase:
    """A stretch of whole rounds with one interval.

    Attributes:
        begin: inner steps done when it begins.
        first_launch: launches before it.
        sync_interval: H.
    """

    begin: int
    first_launch: int
    sync_interval: int


@dataclass(frozen=True)
class Schedule:
    """The events of a run.

    Attributes:
        num_fragments: P.
        overlap_delay: tau; in the one-round delay modes it is H/P whatever the interval becomes.
        phases: oldest first; more than one only with an adaptive interval.
    """

    num_fragments: int
    overlap_delay: int
    delay_mode: DelayMode
    phases: tuple[Phase, ...]

    @classmethod
    def build(
        cls, *, sync_interval: int, num_fragments: int = 1, overlap_delay: int = 0, delay_mode: DelayMode
    ) -> Schedule:
        """A schedule with a constant interval."""
        first = Phase(begin=0, first_launch=0, sync_interval=sync_interval)
        return cls(num_fragments, overlap_delay, delay_mode, (first,))

    @classmethod
    def from_config(cls, outer: OuterConfig) -> Schedule:
        """The schedule of a resolved configuration with method diloco."""
        assert outer.delay_mode is not None
        return cls.build(
            sync_interval=outer.sync_interval,
            num_fragments=outer.num_fragments,
            overlap_delay=outer.overlap_delay,
            delay_mode=outer.delay_mode,
        )

    def __post_init__(self) -> None:
        for phase in self.phases:
            slot = phase.sync_interval // self.num_fragments
            if slot < 1 or phase.sync_interval % self.num_fragments:
                raise ValueError(
                    f"interval {phase.sync_interval} is no multiple of {self.num_fragments} fragments"
                )
            if self.delay_mode == "streaming" and not 0 < self.overlap_delay < slot:
                raise ValueError(f"streaming needs 0 < overlap_delay < {slot}, not {self.overlap_delay}")
        if self.delay_mode == "eager" and self.num_fragments != 1:
            raise ValueError("eager works on one fragment")

    def after(self, inner_step: int) -> list[Event]:
        """The events due after an inner step, in the order in which they must happen.

        Args:
            inner_step: 0-based index of the step just done.
        """
        done = inner_step + 1
        launch = self._launch_at(done)
        if self.delay_mode == "streaming":
            landing = self._launch_at(done - self.overlap_delay)
            landed = [] if landing is None else [self._event(EventKind.APPLY, landing)]
            return landed if launch is None else [*landed, *self._launch_events(launch)]
        return [] if launch is None else self._launch_events(launch)

    def in_flight(self, inner_step: int) -> Event | None:
        """The START that has no APPLY yet after this inner step and its events; never more than one."""
        done = inner_step + 1
        launch = self._launches_until(done) - 1
        if launch < 0 or self.delay_mode == "blocking":
            return None
        if self.delay_mode == "streaming" and self._launch_time(launch) + self.overlap_delay <= done:
            return None
        return self._event(EventKind.START, launch)

    def drain(self, inner_step: int) -> list[Event]:
        """What must still be applied when the run ends after this inner step and its events."""
        start = self.in_flight(inner_step)
        if start is None:
            return []
        late = 1 if self.delay_mode == "eager" else 0
        return [Event(EventKind.APPLY, start.fragment, start.round + late)]

    def outer_step(self, inner_step: int) -> int:
        """Outer steps completed (every fragment applied) after this inner step and its events."""
        applied = self._launches_until(inner_step + 1)
        if self.delay_mode != "eager" and self.in_flight(inner_step) is not None:
            applied -= 1
        return applied // self.num_fragments

    def sync_interval(self, inner_step: int) -> int:
        """H of the round that the next inner step belongs to."""
        return self._phase_at(inner_step + 2).sync_interval

    def fitting_interval(self, wanted: float) -> int:
        """The multiple of P next to `wanted` that is long enough for the delay."""
        least = self.overlap_delay + 1 if self.delay_mode == "streaming" else 1
        return max(round(wanted / self.num_fragments), least) * self.num_fragments

    def with_interval(self, sync_interval: int, inner_step: int) -> Schedule:
        """This schedule with another interval from the next round on (at once where one ends with this step).

        Nothing before that changes, and what is in flight then still lands: after `overlap_delay` steps
        with streaming, at the next launch in the one-round delay modes.
        """
        done = inner_step + 1
        phase = self._phase_at(done)
        rounds = -(-(done - phase.begin) // phase.sync_interval)
        following = Phase(
            begin=phase.begin + rounds * phase.sync_interval,
            first_launch=phase.first_launch + rounds * self.num_fragments,
            sync_interval=sync_interval,
        )
        kept = tuple(old for old in self.phases if old.begin < following.begin)
        return Schedule(self.num_fragments, self.overlap_delay, self.delay_mode, (*kept, following))

    def _launch_events(self, launch: int) -> list[Event]:
        measure, start = self._event(EventKind.MEASURE, launch), self._event(EventKind.START, launch)
        match self.delay_mode:
            case "blocking":
                return [measure, start, self._event(EventKind.APPLY, launch)]
            case "streaming":
                return [measure, start]
            case "eager":
                return [measure, self._event(EventKind.APPLY, launch), start]
            case "delayed_keep" | "delayed_reset":
                previous = [self._event(EventKind.APPLY, launch - 1)] if launch else []
                return [measure, *previous, start]

    def _event(self, kind: EventKind, launch: int) -> Event:
        return Event(kind, fragment=launch % self.num_fragments, round=launch // self.num_fragments)

    def _phase_at(self, done: int) -> Phase:
        """The phase in which the launch after `done` inner steps would fall."""
        return next((phase for phase in reversed(self.phases) if phase.begin < done), self.phases[0])

    def _launches_until(self, done: int) -> int:
        phase = self._phase_at(done)
        return phase.first_launch + max(done - phase.begin, 0) * self.num_fragments // phase.sync_interval

    def _launch_at(self, done: int) -> int | None:
        """Number of the launch after exactly `done` inner steps."""
        phase = self._phase_at(done)
        offset = done - phase.begin
        if offset <= 0 or offset * self.num_fragments % phase.sync_interval:
            return None
        return phase.first_launch + offset * self.num_fragments // phase.sync_interval - 1

    def _launch_time(self, launch: int) -> int:
        """Inner steps done at a launch."""
        phase = next((p for p in reversed(self.phases) if p.first_launch <= launch), self.phases[0])
        slot = phase.sync_interval // self.num_fragments
        return phase.begin + (launch - phase.first_launch + 1) * slot
