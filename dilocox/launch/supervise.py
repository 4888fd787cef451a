"""Watches the jobs of a run from their start to their end, however that comes."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType

from dilocox.errors import DilocoxError
from dilocox.launch.log_merge import IslandLog
from dilocox.launch.processes import JobSpec, Line, LocalJob

_POLL_S = 0.1
_TICK_S = 0.5
_EXIT_S = 5.0
"""Seconds between the end of a job's output and its exit; after that it is killed."""
_BAD_INPUT = 2
"""Exit code of a rank that found its settings or data bad."""
_EXPLAIN_SIGNALS = {9: "SIGKILL; out of memory?", 15: "SIGTERM", 6: "SIGABRT", 11: "SIGSEGV", 7: "SIGBUS"}


class StartError(DilocoxError):
    """A service that the islands need did not come up."""


@dataclass(frozen=True)
class Ending:
    """How the jobs ended.

    Attributes:
        exit_codes: one per island, in island order.
        signal_number: the signal that asked for the stop; None if all ended by themselves.
        killed: a second signal, or the deadline after the first, ended them by force.
        refused: an island found its input bad before it had met the others.
    """

    exit_codes: tuple[int, ...]
    signal_number: int | None
    killed: bool
    refused: bool = False

    @property
    def failed_islands(self) -> list[int]:
        return [island_id for island_id, code in enumerate(self.exit_codes) if code != 0]


class SignalCounter:
    """Counts SIGINT and SIGTERM instead of dying from them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes the signals inside the block; only in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number


class Supervisor:
    """Starts jobs, shows their output, passes a request to stop on, and leaves no process behind.

    Use it as a context manager: whatever happens inside, the jobs are gone afterwards.

    Args:
        signals: where requests to stop come in.
        show: takes a line for the user.
        tick: called about twice per second.
        stop_timeout_s: between the first signal and the end by force.
        has_met: whether an island, by its number, has met the others.
    """

    def __init__(
        self,
        signals: SignalCounter,
        *,
        show: Callable[[str], None],
        tick: Callable[[], None],
        stop_timeout_s: float,
        has_met: Callable[[int], bool] = lambda island_id: True,
    ) -> None:
        self._signals = signals
        self._has_met = has_met
        self._refused = False
        self._show = show
        self._tick = tick
        self._stop_timeout_s = stop_timeout_s
        self._lines: queue.Queue[Line] = queue.Queue()
        self._jobs: list[LocalJob] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.kill()

    def start_service(self, spec: JobSpec, *, ready_prefix: str, timeout_s: float) -> str:
        """Starts a job and waits for its line `PREFIX VALUE`.

        Returns: VALUE.

        Raises:
            StartError: it ended or stayed silent for too long; the text has its last lines.
            KeyboardInterrupt: a signal came meanwhile.
        """
        self._start(spec)
        deadline = time.monotonic() + timeout_s
        said: list[str] = []
        ended = False
        while time.monotonic() < deadline and not self._signals.count:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if line.text is None:
                ended = True
                break
            if line.text.startswith(ready_prefix + " "):
                return line.text.removeprefix(ready_prefix + " ").strip()
            said.append(line.text)
        if self._signals.count:
            raise KeyboardInterrupt
        state = "ended" if ended else "did not become ready"
        raise StartError(f"{spec.name} {state}: " + " / ".join(said[-5:]))

    def run(self, specs: Sequence[JobSpec]) -> Ending:
        """Runs one job per island until all have ended."""
        islands = [self._start(spec) for spec in specs]
        logs = {job.name: IslandLog(index) for index, job in enumerate(islands)}
        services = [job for job in self._jobs if job not in islands]
        open_names = set(logs)
        stop = _Stop(self._signals, self._stop_timeout_s)
        next_tick = 0.0
        while open_names:
            for line in self._next_lines():
                if line.text is None and line.job in open_names:
                    open_names.discard(line.job)
                    island_id = list(logs).index(line.job)
                    self._close(islands[island_id], logs[line.job], stop)
                    if self._is_refused(island_id, logs[line.job]):
                        self._give_up_waiting([job for job in islands if job.name in open_names], islands)
                elif line.text is not None:
                    self._show_line(line, logs)
            self._advance_stop(stop, [job for job in islands if job.name in open_names])
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK_S
                self._tick()
                services = self._still_running(services)
                _reap_dead_agents(islands, open_names)
        codes = tuple(job.poll() or 0 for job in islands)
        return Ending(codes, self._signals.first, stop.killed, self._refused)

    def _start(self, spec: JobSpec) -> LocalJob:
        job = LocalJob(spec, self._lines)
        self._jobs.append(job)
        return job

    def _next_lines(self) -> Iterator[Line]:
        """What has come in, after waiting a moment for the first one; the bar and signals come between."""
        try:
            yield self._lines.get(timeout=_POLL_S)
            for _ in range(200):
                yield self._lines.get_nowait()
        except queue.Empty:
            return

    def _show_line(self, line: Line, logs: dict[str, IslandLog]) -> None:
        assert line.text is not None
        if line.job not in logs:
            self._show(f"[{line.job}] {line.text}")
        elif (text := logs[line.job].feed(line.text)) is not None:
            self._show(text)

    def _close(self, job: LocalJob, log: IslandLog, stop: _Stop) -> None:
        """Cleans up after an island whose output has ended, and reports a failure."""
        job.wait(_EXIT_S)
        job.kill()
        if job.poll() == 0 or stop.killed or self._refused:
            return
        for text in failure_report(job.name, job.poll(), log):
            self._show(text)

    def _is_refused(self, island_id: int, log: IslandLog) -> bool:
        failure = log.failure()
        bad_input = failure is not None and failure.exit_code == _BAD_INPUT
        return bad_input and not self._refused and not self._has_met(island_id)

    def _give_up_waiting(self, alive: Sequence[LocalJob], islands: Sequence[LocalJob]) -> None:
        """Ends the islands that wait for one that will not come: they have nothing to save."""
        self._refused = True
        waiting = [job for job in alive if not self._has_met(islands.index(job))]
        if waiting:
            names = ", ".join(job.name for job in waiting)
            self._show(f"[launch] stopping {names}: the refused island will not come")
        for job in waiting:
            job.kill()

    def _advance_stop(self, stop: _Stop, alive: Sequence[LocalJob]) -> None:
        if (text := stop.begin(alive)) is not None:
            self._show(text)
        elif stop.must_kill():
            self._show("[launch] stopping by force: what was not saved is lost")
            stop.killed = True
            for job in alive:
                job.kill()

    def _still_running(self, services: Sequence[LocalJob]) -> list[LocalJob]:
        ended = [job for job in services if job.poll() is not None]
        for job in ended:
            self._show(f"[launch] WARNING: {job.name} has ended; islands train on, syncs are discarded")
        return [job for job in services if job not in ended]


class _Stop:
    """From the first signal to the last process."""

    def __init__(self, signals: SignalCounter, timeout_s: float) -> None:
        self._signals = signals
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self.killed = False

    def begin(self, alive: Sequence[LocalJob]) -> str | None:
        """At the first signal asks the ranks to save and stop; returns what to tell the user."""
        if not self._signals.count or self._deadline_s is not None:
            return None
        self._deadline_s = time.monotonic() + self._timeout_s
        ranks = [job.interrupt_ranks() for job in alive]
        # torchrun has not started its ranks yet: there is nothing to save
        if not all(ranks):
            for job, num_ranks in zip(alive, ranks, strict=True):
                if not num_ranks:
                    job.kill()
        return "[launch] stopping: all ranks finish their step and save a checkpoint (again to stop by force)"

    def must_kill(self) -> bool:
        """True once: at the second signal or at the deadline."""
        if self.killed or self._deadline_s is None:
            return False
        return self._signals.count > 1 or time.monotonic() > self._deadline_s


def failure_report(name: str, exit_code: int | None, log: IslandLog) -> list[str]:
    """Why an island failed: the first rank that did, and its last lines."""
    failure = log.failure()
    if failure is None:
        head = f"[launch] ERROR: {name} failed ({_explain(exit_code or 0)}) before torchrun named a rank"
        return [head, *(f"    {line}" for line in log.agent_lines()[-15:])]
    head = f"[launch] ERROR: {name} failed: rank {failure.rank} ({_explain(failure.exit_code)})"
    if failure.was_shown:
        return [f"{head}, see its traceback above"]
    return [f"{head}; its last lines:", *(f"    {line}" for line in failure.last_lines[-15:])]


def _explain(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {_EXPLAIN_SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
    return f"exit code {exit_code}"


def _reap_dead_agents(islands: Sequence[LocalJob], open_names: set[str]) -> None:
    """A process left behind may hold the output of an ended torchrun open: without this, it never ends."""
    for job in islands:
        if job.name in open_names and job.poll() is not None:
            job.kill()
