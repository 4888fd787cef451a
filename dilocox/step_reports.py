"""Losses of inner steps and the vote to stop: both in one small collective every few steps."""

from __future__ import annotations

from collections.abc import Callable

from dilocox.config.schema import Config
from dilocox.inner.step import Inner, InnerReport
from dilocox.metrics.recorder import Recorder
from dilocox.stop import StopRequest

MAX_WAIT_S = 1.0
"""Longest delay of a request to stop, if steps take as long as the previous ones."""


class StepReports:
    """Inner steps that are done and whose losses are not known yet.

    Losses stay on the device, and the ranks do not communicate, until a collective is due: at a line of the
    log, before a validation, a checkpoint or the end, at a step of `run.exit_interval`, and after as many
    steps as fit into `MAX_WAIT_S`. When it is due follows from values that are equal on all ranks of the
    island: the step numbers, and a step time that the ranks agreed on in the previous collective.

    Attributes:
        stop_requested: some rank of the island had a reason to stop at the last collective.

    Args:
        clock: seconds of training done.
    """

    def __init__(
        self,
        config: Config,
        *,
        inner: Inner,
        recorder: Recorder,
        stop: StopRequest,
        clock: Callable[[], float],
    ) -> None:
        self.stop_requested = False
        self._log_interval = config.logging.log_interval
        self._exit_interval = config.run.exit_interval
        self._train_iters = config.inner.train_iters
        self._inner = inner
        self._recorder = recorder
        self._stop = stop
        self._clock = clock
        self._since_s = clock()
        # The step time is not known yet.
        self._max_steps = 1
        self._pending: list[InnerReport] = []

    def add(self, report: InnerReport) -> None:
        """Adds a step whose record is queued in the recorder."""
        self._pending.append(report)

    def is_due(self, inner_step: int) -> bool:
        """Whether the ranks must meet after this many inner steps; equal on all ranks of the island."""
        if inner_step >= self._train_iters or inner_step % self._log_interval == 0:
            return True
        if self._exit_interval is not None and inner_step % self._exit_interval == 0:
            return True
        return len(self._pending) >= self._max_steps

    def flush(self, inner_step: int) -> None:
        """Sums the pending losses and the votes to stop over the ranks, and records the losses.

        Collective: all ranks of the island, with the same steps pending; no-op without any.
        """
        if not self._pending:
            return
        reports, self._pending = self._pending, []
        now_s = self._clock()
        # Signals reach the ranks at different times; the vote makes all of them stop after the same step.
        vote = float(self._stop.check(inner_step))
        losses, (votes, seconds) = self._inner.mean_losses(reports, vote, now_s - self._since_s)
        self._since_s = now_s
        # Losses must be settled in the order in which their steps were queued.
        self._recorder.settle(losses)
        # From the mean over the ranks: own clocks differ, and `is_due` must be equal on all ranks.
        num_ranks = self._inner.island.topology.ranks_per_island
        self._max_steps = steps_within(MAX_WAIT_S, step_s=seconds / num_ranks / len(reports))
        if votes > 0:
            self._stop.note("another rank of the island was told to stop")
            self.stop_requested = True


def steps_within(wait_s: float, *, step_s: float) -> int:
    """Returns how many steps of `step_s` seconds fit into `wait_s` seconds; at least one."""
    return max(1, int(wait_s / max(step_s, 1e-6)))
