"""How `preprocess` reports: a bar on a terminal, else a line every `--log-interval` documents."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dilocox.data.preprocess.documents import Problem
from dilocox.data.preprocess.encode import EncodedChunk

_MAX_SHOWN = 20
"""Problems printed one by one; the rest is only counted."""


class PreprocessProgress:
    """Counts documents and problems and shows them on stderr while the context is open."""

    def __init__(self, total_bytes: int, *, log_interval: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("tokenizing", total=total_bytes)
        self._log_interval = log_interval
        self._started_s = time.monotonic()
        self._num_bytes = 0
        self.num_documents = 0
        self.problems: Counter[str] = Counter()

    def __enter__(self) -> PreprocessProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, chunk: EncodedChunk) -> None:
        """Counts a chunk; prints its problems and, without a bar, a line where an interval is full."""
        intervals_before = self.num_documents // self._log_interval
        self.num_documents += chunk.num_documents
        self._num_bytes += chunk.num_bytes
        for problem in chunk.problems:
            self._show(problem)
        if self._bar is not None:
            self._bar.advance(self._task, chunk.num_bytes)
        elif self.num_documents // self._log_interval > intervals_before:
            seconds = max(time.monotonic() - self._started_s, 1e-6)
            self._print(
                f"Processed {self.num_documents} documents ({self.num_documents / seconds:.0f} docs/s, "
                f"{self._num_bytes / seconds / 1e6:.2f} MB/s)."
            )

    def problem_summary(self) -> str:
        """Returns for example `3 bad lines (2 broken JSON, 1 blank line)`."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.problems.most_common())
        total = self.problems.total()
        return f"{total} bad {'line' if total == 1 else 'lines'} ({kinds})"

    def _show(self, problem: Problem) -> None:
        if self.problems.total() < _MAX_SHOWN:
            self._print(str(problem))
        elif self.problems.total() == _MAX_SHOWN:
            self._print("further bad lines are only counted")
        self.problems[problem.kind] += 1

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)
