"""Losses and the vote to stop share a collective, and all ranks know without asking when it is due."""

from types import SimpleNamespace

import pytest

from dilocox.config.schema import Config
from dilocox.step_reports import StepReports, steps_within


class Inner:
    """Two ranks that do the same; the other one may have a reason to stop."""

    def __init__(self):
        self.island = SimpleNamespace(topology=SimpleNamespace(ranks_per_island=2))
        self.others_vote = 0.0
        self.collectives = []

    def mean_losses(self, reports, vote, seconds):
        self.collectives.append(len(reports))
        return [float(report) for report in reports], [vote + self.others_vote, 2 * seconds]


class Stop:
    def __init__(self):
        self.reason = None
        self.checked = []

    def check(self, inner_step):
        self.checked.append(inner_step)
        return self.reason is not None

    def note(self, reason):
        self.reason = self.reason or reason


class Run:
    """Steps of `step_s` seconds each."""

    def __init__(self, step_s, *, log_interval=100, exit_interval=None, train_iters=1000):
        config = Config.model_validate(
            {
                "run": {"exit_interval": exit_interval},
                "inner": {"train_iters": train_iters},
                "logging": {"log_interval": log_interval},
            }
        )
        self.step_s, self.now_s, self.inner_step, self.settled = step_s, 0.0, 0, []
        self.inner, self.stop = Inner(), Stop()
        recorder = SimpleNamespace(settle=self.settled.extend)
        self.reports = StepReports(
            config, inner=self.inner, recorder=recorder, stop=self.stop, clock=lambda: self.now_s
        )

    def steps(self, number):
        for _ in range(number):
            self.inner_step += 1
            self.now_s += self.step_s
            self.reports.add(self.inner_step)
            if self.reports.is_due(self.inner_step):
                self.reports.flush(self.inner_step)


@pytest.mark.parametrize(
    ("step_s", "collectives"),
    [(2.0, [1] * 20), (0.25, [1, 4, 4, 4, 4]), (1e-5, [1])],
    ids=["slow steps", "four steps per second", "fast steps"],
)
def test_ranks_meet_once_per_second(step_s, collectives):
    run = Run(step_s)
    run.steps(20)
    assert run.inner.collectives == collectives
    assert run.settled == list(range(1, sum(collectives) + 1)), "each loss once and in order"


def test_ranks_meet_where_something_is_logged_and_at_the_end():
    run = Run(1e-5, log_interval=8, train_iters=20)
    run.steps(20)
    assert run.stop.checked == [1, 8, 16, 20]


def test_ranks_meet_at_every_step_of_exit_interval():
    run = Run(1e-5, exit_interval=7)
    run.steps(20)
    assert run.stop.checked == [1, 7, 14]


def test_what_is_pending_can_be_asked_for_at_any_time_and_once():
    run = Run(1e-5)
    run.steps(5)
    run.reports.flush(5)
    run.reports.flush(5)
    assert run.inner.collectives == [1, 4] and run.settled == [1, 2, 3, 4, 5]


def test_a_reason_of_another_rank_stops_this_one_within_a_second():
    run = Run(0.25)
    run.steps(6)
    run.inner.others_vote = 1.0
    run.steps(3)
    assert run.reports.stop_requested
    assert run.stop.reason == "another rank of the island was told to stop"


def test_steps_within():
    assert [steps_within(1.0, step_s=s) for s in (3.0, 1.0, 0.3, 0.0)] == [1, 1, 3, 1_000_000]
