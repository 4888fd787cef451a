"""One island's record of a run: `metrics.jsonl`, log lines, and curves for the optional viewers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dilocox.config.schema import Config
from dilocox.metrics import log
from dilocox.metrics.jsonl import JsonlWriter, truncate_after
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, Record, Scalar, SyncRecord
from dilocox.metrics.sinks import Sink, open_sinks, scalars_of
from dilocox.metrics.totals import FAILURE_EVENTS, Totals
from dilocox.run_folder import METRICS, SUMMARY, island_dir


@dataclass
class _Entry:
    """A record that waits behind an inner step whose loss is not known yet."""

    record: Record
    time_s: float
    needs_loss: bool


class Recorder:
    """Records and logs one rank; all ranks make the same calls, only rank 0 writes `metrics.jsonl`.

    All ranks log to their own `island_I/rank_R.log`. With `resumed_step` the file is shortened to what
    happened up to that inner step, so that no step is there twice; without it, it starts empty.

    The loss of an inner step is a sum over the island's ranks, which costs a collective. `queue_inner` takes
    a step without its loss, `settle` fills in the losses of all queued steps. What is recorded in between
    waits behind them, so the file and the log keep the order in which things happened. A process that is
    killed loses what was recorded since the last `settle`.
    """

    def __init__(
        self, run_dir: Path, *, island_id: int, rank: int, config: Config, resumed_step: int | None = None
    ) -> None:
        folder = island_dir(run_dir, island_id)
        self.logger = log.configure(folder, island_id=island_id, rank=rank)
        self.totals = Totals()
        self._config = config
        self._queue: list[_Entry] = []
        self._step_times_s: list[float] = []
        self._writer: JsonlWriter | None = None
        self._sinks: list[Sink] = []
        if rank == 0:
            (folder / SUMMARY).unlink(missing_ok=True)  # status of an earlier part of this run
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
        """Records an inner step; a log line every `logging.log_interval` steps and at the last one."""
        self._put(record)

    def queue_inner(self, record: InnerRecord) -> None:
        """Queues an inner step whose `lm_loss` is not known yet; `settle` replaces it."""
        self._queue.append(_Entry(record, time.time(), needs_loss=True))

    def settle(self, losses: Sequence[float]) -> None:
        """Writes everything that is queued.

        Args:
            losses: mean loss per token in nats of every queued inner step, oldest first.
        """
        remaining = iter(losses)
        queue, self._queue = self._queue, []
        if sum(entry.needs_loss for entry in queue) != len(losses):
            raise ValueError(f"{len(losses)} losses do not fit the queued inner steps")
        for entry in queue:
            record = entry.record
            if entry.needs_loss:
                assert isinstance(record, InnerRecord)
                record = replace(record, lm_loss=next(remaining))
            self._write(record, entry.time_s)

    def sync(self, record: SyncRecord) -> None:
        """Records a sync that was applied or discarded."""
        self._put(record)

    def eval(self, record: EvalRecord) -> None:
        """Records a validation on the anchor."""
        self._put(record)

    def event(self, event: str, inner_step: int, **details: Scalar) -> None:
        """Records anything else: join, leave, heal, abstain, discard, checkpoint, resume ..."""
        self._put(EventRecord(inner_step, event, details))

    def close(self) -> None:
        """Writes what is queued and known, and releases everything; may be called twice."""
        queue, self._queue = self._queue, []
        for entry in queue:
            if not entry.needs_loss:
                self._write(entry.record, entry.time_s)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        while self._sinks:
            self._sinks.pop().close()
        log.release(self.logger)

    def _put(self, record: Record) -> None:
        if self._queue:
            self._queue.append(_Entry(record, time.time(), needs_loss=False))
        else:
            self._write(record, time.time())

    def _write(self, record: Record, time_s: float) -> None:
        self.totals.add(record)
        if self._writer is not None:
            self._writer.write(record, time_s=time_s)
        values = scalars_of(record)
        for sink in self._sinks:
            sink.scalars(record.inner_step, values)
        match record:
            case InnerRecord():
                self._log_inner(record)
            case SyncRecord():
                self._log_sync(record)
            case EvalRecord():
                self.logger.info(log.eval_line(record))
            case EventRecord():
                level = logging.WARNING if record.event in FAILURE_EVENTS else logging.INFO
                self.logger.log(level, log.event_line(record))

    def _log_inner(self, record: InnerRecord) -> None:
        self._step_times_s.append(record.step_time_s)
        if not self._is_logged(record.inner_step):
            return
        mean = sum(self._step_times_s) / len(self._step_times_s)
        self._step_times_s.clear()
        line = log.inner_line(
            record,
            train_iters=self._config.inner.train_iters,
            global_batch_size=self._config.inner.global_batch_size,
            mean_step_time_s=mean,
        )
        self.logger.info(line)

    def _log_sync(self, record: SyncRecord) -> None:
        if not record.committed:
            self.logger.warning(log.sync_line(record))
        elif self._config.outer.method != "data_parallel" or self._is_logged(record.inner_step):
            self.logger.info(log.sync_line(record))

    def _is_logged(self, inner_step: int) -> bool:
        interval, last = self._config.logging.log_interval, self._config.inner.train_iters
        return inner_step % interval == 0 or inner_step == last
