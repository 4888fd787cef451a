"""When level 2 acts: pure integers, no torch, no state.

A fragment is launched every H/P inner steps, in turn, so each one is synced every H steps. Everything follows
from the number of inner steps done: a run resumed from any step sees the same events. The first window of
fragment p is (p + 1) * H/P steps, shorter than H for all but the last fragment.

`inner_step` is the number of inner steps done, outer steps count from 1. Launches count from 0 over all
fragments; they appear in this file and in `modes/` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.schema import OuterConfig
from dilocox.outer.modes.base import DelayMode, EventKind
from dilocox.outer.modes.registry import MODES


@dataclass(frozen=True)
class Event:
    """One action of level 2.

    Attributes:
        fragment: 0 <= fragment < num_fragments.
        outer_step: which sync of this fragment, from 1. `eager` applies the own pseudo-gradient of this outer
            step with what the others sent in the one before; its drain is one outer step more, with
            nothing fresh.
    """

    kind: EventKind
    fragment: int
    outer_step: int


@dataclass(frozen=True)
class Phase:
    """A stretch of whole sync intervals of one length.

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
        overlap_delay: tau; modes that apply at the next launch do so whatever H/P becomes.
        delay_mode: name of a mode in `modes/`.
        phases: oldest first; more than one only with an adaptive interval.
    """

    num_fragments: int
    overlap_delay: int
    delay_mode: str
    phases: tuple[Phase, ...]

    @classmethod
    def build(
        cls, *, sync_interval: int, num_fragments: int = 1, overlap_delay: int = 0, delay_mode: str
    ) -> Schedule:
        """Builds a schedule with a constant interval."""
        first = Phase(begin=0, first_launch=0, sync_interval=sync_interval)
        return cls(num_fragments, overlap_delay, delay_mode, (first,))

    @classmethod
    def from_config(cls, outer: OuterConfig) -> Schedule:
        """Builds the schedule of a resolved configuration with method diloco."""
        assert outer.delay_mode is not None
        return cls.build(
            sync_interval=outer.sync_interval,
            num_fragments=outer.num_fragments,
            overlap_delay=outer.overlap_delay,
            delay_mode=outer.delay_mode,
        )

    @property
    def mode(self) -> type[DelayMode]:
        """The order of events around a launch."""
        return MODES[self.delay_mode]

    def __post_init__(self) -> None:
        for phase in self.phases:
            interval = phase.sync_interval // self.num_fragments
            if interval < 1 or phase.sync_interval % self.num_fragments:
                raise ValueError(
                    f"interval {phase.sync_interval} is no multiple of {self.num_fragments} fragments"
                )
            if self._lands_after_delay and not 0 < self.overlap_delay < interval:
                raise ValueError(
                    f"{self.delay_mode} needs 0 < overlap_delay < {interval}, not {self.overlap_delay}"
                )
        if self.mode.single_fragment and self.num_fragments != 1:
            raise ValueError(f"{self.delay_mode} works on one fragment")

    def after(self, inner_step: int) -> list[Event]:
        """Returns the events due when `inner_step` inner steps are done, in their order."""
        events = []
        if self._lands_after_delay:
            landing = self._launch_at(inner_step - self.overlap_delay)
            events += [] if landing is None else [self._event(EventKind.APPLY, landing)]
        launch = self._launch_at(inner_step)
        if launch is not None:
            events += [self._event(kind, number) for kind, number in self.mode.at_launch(launch)]
        return events

    def in_flight(self, inner_step: int) -> Event | None:
        """Returns the START that has no APPLY yet after this inner step and its events; at most one."""
        launch = self._last_in_flight(inner_step)
        return None if launch is None else self._event(EventKind.START, launch)

    def drain(self, inner_step: int) -> list[Event]:
        """Returns what must still be applied when the run ends after this inner step and its events."""
        launch = self._last_in_flight(inner_step)
        if launch is None:
            return []
        # The fragment stays; `eager` applies a launch under the number of the next one.
        extra = self.mode.after_drain(launch) - launch
        start = self._event(EventKind.START, launch)
        return [Event(EventKind.APPLY, start.fragment, start.outer_step + extra)]

    def outer_step(self, inner_step: int) -> int:
        """Returns the outer steps completed (every fragment applied) after this inner step and its events."""
        applied = self._launches_until(inner_step)
        if self._last_in_flight(inner_step) is not None and self.mode.anchors_are_shared:
            applied -= 1
        return applied // self.num_fragments

    def sync_interval(self, inner_step: int) -> int:
        """Returns H of the sync interval that the next inner step belongs to."""
        return self._phase_at(inner_step + 1).sync_interval

    def fitting_interval(self, wanted: float) -> int:
        """Returns the multiple of P next to `wanted` that is long enough for the delay."""
        least = self.overlap_delay + 1 if self._lands_after_delay else 1
        return max(round(wanted / self.num_fragments), least) * self.num_fragments

    def with_interval(self, sync_interval: int, inner_step: int) -> Schedule:
        """Returns this schedule with another H from the next sync interval on (at once where one ends here).

        Nothing before that changes, and what is in flight then is still applied: after `overlap_delay` steps
        with streaming, at the next launch in the modes that apply there.
        """
        phase = self._phase_at(inner_step)
        passed = -(-(inner_step - phase.begin) // phase.sync_interval)
        following = Phase(
            begin=phase.begin + passed * phase.sync_interval,
            first_launch=phase.first_launch + passed * self.num_fragments,
            sync_interval=sync_interval,
        )
        kept = tuple(old for old in self.phases if old.begin < following.begin)
        return Schedule(self.num_fragments, self.overlap_delay, self.delay_mode, (*kept, following))

    @property
    def _lands_after_delay(self) -> bool:
        return self.mode.landing == "after the delay"

    def _event(self, kind: EventKind, launch: int) -> Event:
        return Event(kind, fragment=launch % self.num_fragments, outer_step=launch // self.num_fragments + 1)

    def _last_in_flight(self, inner_step: int) -> int | None:
        launch = self._launches_until(inner_step) - 1
        if launch < 0 or self.mode.landing == "at once":
            return None
        if self._lands_after_delay and self._launch_time(launch) + self.overlap_delay <= inner_step:
            return None
        return launch

    def _phase_at(self, done: int) -> Phase:
        """Returns the phase in which the launch after `done` inner steps would fall."""
        return next((phase for phase in reversed(self.phases) if phase.begin < done), self.phases[0])

    def _launches_until(self, done: int) -> int:
        phase = self._phase_at(done)
        return phase.first_launch + max(done - phase.begin, 0) * self.num_fragments // phase.sync_interval

    def _launch_at(self, done: int) -> int | None:
        """Returns the number of the launch after exactly `done` inner steps."""
        phase = self._phase_at(done)
        offset = done - phase.begin
        if offset <= 0 or offset * self.num_fragments % phase.sync_interval:
            return None
        return phase.first_launch + offset * self.num_fragments // phase.sync_interval - 1

    def _launch_time(self, launch: int) -> int:
        """Returns the inner steps done at a launch."""
        phase = next((p for p in reversed(self.phases) if p.first_launch <= launch), self.phases[0])
        interval = phase.sync_interval // self.num_fragments
        return phase.begin + (launch - phase.first_launch + 1) * interval
