"""Properties of the schedule over all small (H, P, tau), and its events written out for a few."""

import pytest

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, OuterConfig
from dilocox.outer.modes.base import EventKind
from dilocox.outer.schedule import Event, Schedule

MEASURE, START, APPLY = EventKind.MEASURE, EventKind.START, EventKind.APPLY


def all_small_schedules():
    """Every (schedule, interval) with P up to 4, H/P up to 5 and each delay mode that fits."""
    for fragments in range(1, 5):
        for fragment_interval in range(1, 6):
            interval = fragments * fragment_interval
            modes = [
                ("blocking", 0),
                ("delayed_keep", fragment_interval),
                ("delayed_reset", fragment_interval),
            ]
            modes += [("streaming", delay) for delay in range(1, fragment_interval)]
            modes += [("eager", fragment_interval)] if fragments == 1 else []
            for mode, delay in modes:
                schedule = Schedule.build(
                    sync_interval=interval, num_fragments=fragments, overlap_delay=delay, delay_mode=mode
                )
                yield pytest.param(
                    schedule, fragment_interval, id=f"H{interval}-P{fragments}-tau{delay}-{mode}"
                )


def timeline(schedule, steps):
    """All (steps done, event) of a run, without the drain."""
    return [(done, event) for done in range(1, steps + 1) for event in schedule.after(done)]


def steps_of(schedule, fragment_interval):
    """A run of a little over three sync intervals."""
    return 3 * fragment_interval * schedule.num_fragments + fragment_interval // 2


@pytest.mark.parametrize(("schedule", "fragment_interval"), list(all_small_schedules()))
def test_each_fragment_is_launched_every_interval(schedule, fragment_interval):
    events = timeline(schedule, steps_of(schedule, fragment_interval))
    for kind in (MEASURE, START):
        for fragment in range(schedule.num_fragments):
            done = [at for at, event in events if event.kind is kind and event.fragment == fragment]
            first = (fragment + 1) * fragment_interval
            assert done == [first + r * fragment_interval * schedule.num_fragments for r in range(3)]


@pytest.mark.parametrize(("schedule", "fragment_interval"), list(all_small_schedules()))
def test_apply_comes_tau_after_start_and_one_is_in_flight(schedule, fragment_interval):
    steps = steps_of(schedule, fragment_interval)
    flying = None
    for done in range(1, steps + 1):
        for event in schedule.after(done):
            if event.kind is START:
                assert flying is None
                flying = (event, done)
            elif event.kind is APPLY and flying is not None:
                start, started = flying
                late = 1 if schedule.delay_mode == "eager" else 0
                assert (event.fragment, event.outer_step) == (start.fragment, start.outer_step + late)
                assert done - started == schedule.overlap_delay
                flying = None
            elif event.kind is APPLY:  # eager applies its own first pseudo-gradient with nothing in flight
                assert schedule.delay_mode == "eager" and event.outer_step == 1
        assert schedule.in_flight(done) == (flying[0] if flying else None)


@pytest.mark.parametrize(("schedule", "fragment_interval"), list(all_small_schedules()))
def test_measure_comes_first_at_a_launch(schedule, fragment_interval):
    for done in range(1, steps_of(schedule, fragment_interval) + 1):
        kinds = [event.kind for event in schedule.after(done)]
        if schedule.delay_mode == "blocking":
            assert kinds in ([], [MEASURE, START, APPLY])
        elif schedule.delay_mode == "streaming":
            assert kinds in ([], [MEASURE, START], [APPLY])
        else:
            assert kinds in ([], [MEASURE, START], [MEASURE, APPLY, START])


@pytest.mark.parametrize(("schedule", "fragment_interval"), list(all_small_schedules()))
def test_drained_at_any_step_every_start_is_applied_once(schedule, fragment_interval):
    late = 1 if schedule.delay_mode == "eager" else 0
    for steps in range(1, steps_of(schedule, fragment_interval)):
        events = [event for _, event in timeline(schedule, steps)] + schedule.drain(steps)
        started = [(event.fragment, event.outer_step + late) for event in events if event.kind is START]
        applied = [(event.fragment, event.outer_step) for event in events if event.kind is APPLY]
        if late and applied:
            assert applied.pop(0) == (0, 1)
        assert applied == started


@pytest.mark.parametrize(("schedule", "fragment_interval"), list(all_small_schedules()))
def test_outer_step_counts_fully_applied_intervals(schedule, fragment_interval):
    applied = 0
    for done in range(1, steps_of(schedule, fragment_interval) + 1):
        applied += sum(event.kind is APPLY for event in schedule.after(done))
        assert schedule.outer_step(done) == applied // schedule.num_fragments


def test_streaming_example_of_the_paper():
    """H=100, P=2: one fragment syncs at 100, 200 ..., the other half way between (2501.18512)."""
    schedule = Schedule.build(sync_interval=100, num_fragments=2, overlap_delay=5, delay_mode="streaming")
    starts = [(at, event.fragment) for at, event in timeline(schedule, 210) if event.kind is START]
    assert starts == [(50, 0), (100, 1), (150, 0), (200, 1)]
    assert schedule.after(105) == [Event(APPLY, 1, 1)]


def test_a_delay_of_one_interval_written_out():
    schedule = Schedule.build(sync_interval=4, num_fragments=2, overlap_delay=2, delay_mode="delayed_keep")
    assert timeline(schedule, 6) == [
        (2, Event(MEASURE, 0, 1)),
        (2, Event(START, 0, 1)),
        (4, Event(MEASURE, 1, 1)),
        (4, Event(APPLY, 0, 1)),
        (4, Event(START, 1, 1)),
        (6, Event(MEASURE, 0, 2)),
        (6, Event(APPLY, 1, 1)),
        (6, Event(START, 0, 2)),
    ]
    assert schedule.drain(6) == [Event(APPLY, 0, 2)]


def adaptive(schedule, fragment_interval, changes):
    """Events when `changes` maps inner steps done to the H/P that is asked for then."""
    events, fragment_intervals = [], [fragment_interval]
    for done in range(1, 41):
        events += [(done, event) for event in schedule.after(done)]
        if done in changes:
            wanted = changes[done] * schedule.num_fragments
            schedule = schedule.with_interval(schedule.fitting_interval(wanted), done)
            fragment_intervals.append(schedule.phases[-1].sync_interval // schedule.num_fragments)
    return schedule, events


@pytest.mark.parametrize("done", range(1, 21))
@pytest.mark.parametrize("wanted", [1, 2, 5])
@pytest.mark.parametrize(("mode", "delay"), [("blocking", 0), ("streaming", 2), ("delayed_keep", 4)])
def test_a_changed_interval_keeps_the_properties(mode, delay, wanted, done):
    before = Schedule.build(sync_interval=12, num_fragments=3, overlap_delay=delay, delay_mode=mode)
    after, events = adaptive(before, 4, {done: wanted, done + 9: 4})
    assert events == timeline(after, 40), "a resumed run must see the events that the live run saw"
    unchanged = -(-done // 12) * 12
    assert [e for e in events if e[0] < unchanged] == [e for e in timeline(before, 40) if e[0] < unchanged]
    flying = []
    launches = [event.fragment for _, event in events if event.kind is START]
    assert launches == [launch % 3 for launch in range(len(launches))]
    for _, event in events:
        if event.kind is START:
            flying.append((event.fragment, event.outer_step))
        if event.kind is APPLY:
            assert flying.pop() == (event.fragment, event.outer_step)
        assert len(flying) <= 1


def test_an_interval_changes_when_the_present_one_ends():
    schedule = Schedule.build(sync_interval=4, num_fragments=2, delay_mode="blocking").with_interval(6, 5)
    starts = [(at, event.fragment) for at, event in timeline(schedule, 16) if event.kind is START]
    assert starts == [(2, 0), (4, 1), (6, 0), (8, 1), (11, 0), (14, 1)]
    assert [schedule.sync_interval(step) for step in (7, 8)] == [4, 6]


def test_the_last_word_before_a_boundary_counts():
    schedule = Schedule.build(sync_interval=4, delay_mode="blocking")
    twice = schedule.with_interval(6, 2).with_interval(5, 3)
    assert twice == schedule.with_interval(5, 3)
    assert [at for at, event in timeline(twice, 14) if event.kind is START] == [4, 9, 14]


def test_fitting_interval_leaves_room_for_the_delay():
    streaming = Schedule.build(sync_interval=12, num_fragments=3, overlap_delay=2, delay_mode="streaming")
    blocking = Schedule.build(sync_interval=12, num_fragments=3, delay_mode="blocking")
    assert [streaming.fitting_interval(wanted) for wanted in (1, 9, 13.6)] == [9, 9, 15]
    assert [blocking.fitting_interval(wanted) for wanted in (1, 9, 13.6)] == [3, 9, 15]


@pytest.mark.parametrize(
    ("interval", "fragments", "delay", "mode"),
    [
        (10, 3, 0, "blocking"),
        (2, 3, 0, "blocking"),
        (8, 2, 4, "streaming"),
        (8, 2, 0, "streaming"),
        (8, 2, 4, "eager"),
    ],
)
def test_impossible_schedules_are_refused(interval, fragments, delay, mode):
    with pytest.raises(ValueError, match=r"interval|overlap_delay|eager"):
        Schedule.build(sync_interval=interval, num_fragments=fragments, overlap_delay=delay, delay_mode=mode)


def test_from_config():
    outer = resolve(Config(outer=OuterConfig(sync_interval=8, num_fragments=2, overlap_delay=4))).outer
    schedule = Schedule.from_config(outer)
    assert (schedule.delay_mode, schedule.num_fragments, schedule.sync_interval(0)) == ("delayed_keep", 2, 8)
