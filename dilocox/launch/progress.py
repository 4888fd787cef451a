"""What is shown during a run: its log, and on a terminal one bar below it."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dilocox.config.schema import Config
from dilocox.metrics.jsonl import JsonlTail, read_records
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord
from dilocox.run_folder import METRICS, island_dir, launch_log

_WINDOW_S = 20.0
"""Span over which the shown tokens per second are averaged."""


class RunState:
    """Where all islands of a run are, read from their `metrics.jsonl` as these grow."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        num_islands = config.parallel.num_islands
        self._tails = [JsonlTail(island_dir(run_dir, i) / METRICS) for i in range(num_islands)]
        self.inner_steps = [0] * num_islands
        self._losses: list[float | None] = [None] * num_islands
        self.val_loss: float | None = None
        self.num_syncs = 0
        self.payload_bytes_sent = 0
        self._tokens = 0
        self._history: deque[tuple[float, int]] = deque()

    def update(self, now_s: float) -> None:
        """Reads what is new; `now_s` is any steady clock."""
        for island_id, tail in enumerate(self._tails):
            for record in tail.read_new():
                if isinstance(record, InnerRecord):
                    self.inner_steps[island_id] = record.inner_step
                    self._losses[island_id] = record.lm_loss
                    self._tokens += record.tokens
                elif isinstance(record, SyncRecord):
                    self.num_syncs += record.committed and island_id == 0
                    self.payload_bytes_sent += record.payload_bytes_sent
                elif isinstance(record, EvalRecord):
                    self.val_loss = record.val_loss
        self._history.append((now_s, self._tokens))
        while now_s - self._history[0][0] > _WINDOW_S:
            self._history.popleft()

    @property
    def tokens_per_s(self) -> float:
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def describe(self) -> str:
        losses = [loss for loss in self._losses if loss is not None]
        parts = [f"loss {sum(losses) / len(losses):.3f}"] if losses else ["starting"]
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}")
        parts += [f"{self.tokens_per_s:,.0f} tok/s", f"{self.num_syncs} syncs"]
        parts.append(f"{self.payload_bytes_sent / 1e6:,.1f} MB sent")
        return " · ".join(parts)


class Meetings:
    """Whether islands have met the others since this was made, by their `metrics.jsonl`."""

    def __init__(self, run_dir: Path, num_islands: int) -> None:
        self._paths = [island_dir(run_dir, i) / METRICS for i in range(num_islands)]
        self._before = [self._num_starts(path) for path in self._paths]

    def __call__(self, island_id: int) -> bool:
        return self._num_starts(self._paths[island_id]) > self._before[island_id]

    @staticmethod
    def _num_starts(path: Path) -> int:
        # Each start of an island writes this event once it has met the others; resuming drops no event.
        return sum(isinstance(r, EventRecord) and r.event == "start" for r in read_records(path))


class Display:
    """Prints lines to stdout and to `launch.log`, and keeps the bar below them."""

    def __init__(self, config: Config, run_dir: Path, *, show_bar: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._file: TextIO = launch_log(run_dir).open("a", buffering=1)
        self._state = RunState(config, run_dir)
        self._bar = Progress(
            TextColumn("inner steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (show_bar and self._console.is_terminal),
            transient=True,
        )
        total = config.inner.train_iters * config.parallel.num_islands
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._file.write(text + "\n")

    def tick(self) -> None:
        """Moves the bar; call it about twice per second."""
        if self._bar.disable:
            return
        self._state.update(time.monotonic())
        done = sum(self._state.inner_steps)
        self._bar.update(self._task, completed=done, description=self._state.describe())

    def stop_bar(self) -> None:
        self._bar.stop()

    def close(self) -> None:
        self._bar.stop()
        self._file.close()
