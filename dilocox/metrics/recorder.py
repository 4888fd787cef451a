"""One island's record of a run: `metrics.jsonl`, log lines, and curves for the optional viewers."""

from __future__ import annotations

import logging
from pathlib import Path

from dilocox.config.schema import Config
from dilocox.metrics import log
from dilocox.metrics.jsonl import JsonlWriter, truncate_after
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, Record, Scalar, SyncRecord
from dilocox.metrics.sinks import Sink, open_sinks, scalars_of
from dilocox.metrics.totals import FAILURE_EVENTS, Totals
from dilocox.run_folder import METRICS, SUMMARY, island_dir


class Recorder:
    """Every rank of an island has one and calls it alike; only rank 0 writes `metrics.jsonl`.

    All ranks log to their own `island_I/rank_R.log`. With `resumed_step` the file is cut back to what
    happened up to that inner step, so that no step is there twice; without it, it starts empty.
    """

    def __init__(
        self, run_dir: Path, *, island_id: int, rank: int, config: Config, resumed_step: int | None = None
    ) -> None:
        folder = island_dir(run_dir, island_id)
        self.logger = log.configure(folder, island_id=island_id, rank=rank)
        self.totals = Totals()
        self._config = config
        self._step_times_s: list[float] = []
        self._writer: JsonlWriter | None = None
        self._sinks: list[Sink] = []
        if rank == 0:
            (folder / SUMMARY).unlink(missing_ok=True)  # an earlier part's verdict on a run that goes on
            self._open(folder / METRICS, resumed_step)
            self._sinks = open_sinks(config, run_dir=run_dir, island_id=island_id)

    def _open(self, path: Path, resumed_step: int | None) -> None:
        if resumed_step is None:
            path.unlink(missing_ok=True)
        else:
            for record in truncate_after(path, resumed_step):
                self.totals.add(record)
        self._writer = JsonlWriter(path)

    def inner(self, record: InnerRecord) -> None:
        """After each inner step; a log line every `logging.log_interval` steps and at the last one."""
        self._keep(record)
        self._step_times_s.append(record.step_time_s)
        if self._is_logged(record.inner_step):
            mean = sum(self._step_times_s) / len(self._step_times_s)
            self._step_times_s.clear()
            samples = self._config.inner.global_batch_size
            train_iters = self._config.inner.train_iters
            line = log.inner_line(
                record, train_iters=train_iters, global_batch_size=samples, mean_step_time_s=mean
            )
            self.logger.info(line)

    def sync(self, record: SyncRecord) -> None:
        """After a fragment was applied, or its sync discarded."""
        self._keep(record)
        if not record.committed:
            self.logger.warning(log.sync_line(record))
        elif self._config.outer.method != "data_parallel" or self._is_logged(record.inner_step):
            self.logger.info(log.sync_line(record))

    def eval(self, record: EvalRecord) -> None:
        """After a validation on the anchor."""
        self._keep(record)
        self.logger.info(log.eval_line(record))

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Anything else worth a line: join, leave, heal, abstain, discard, checkpoint, resume ..."""
        record = EventRecord(inner_step, event, details)
        self._keep(record)
        level = logging.WARNING if event in FAILURE_EVENTS else logging.INFO
        self.logger.log(level, log.event_line(record))

    def close(self) -> None:
        """Flushes and releases everything; may be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        while self._sinks:
            self._sinks.pop().close()
        log.release(self.logger)

    def _is_logged(self, inner_step: int) -> bool:
        interval, last = self._config.logging.log_interval, self._config.inner.train_iters
        return inner_step % interval == 0 or inner_step == last

    def _keep(self, record: Record) -> None:
        self.totals.add(record)
        if self._writer is not None:
            self._writer.write(record)
        values = scalars_of(record)
        for sink in self._sinks:
            sink.scalars(record.inner_step, values)
