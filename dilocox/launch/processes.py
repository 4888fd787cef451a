"""One job of the launcher: a command with everything it starts, findable and killable as a whole."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

MARKER = "DILOCOX_JOB"
"""Environment variable by which a job's processes are found, whatever process has adopted them since."""
_KILL_ROUNDS = 10


@dataclass(frozen=True)
class JobSpec:
    """What to start.

    Attributes:
        name: for messages, for example `island 0`.
        command: argument vector.
        environment: variables added to the launcher's own.
        gpus: (start, stop) in the list of visible GPUs; None: all of them.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, int] | None = None


@dataclass(frozen=True)
class Line:
    """A line of output of a job; text None: its output has ended."""

    job: str
    text: str | None


class LocalJob:
    """A started command in a session of its own, which the kernel ends with the launcher.

    A thread of its own puts its output (stdout and stderr together) line by line into a queue.
    Must be made in the launcher's main thread: the kernel watches the thread that starts the process.
    """

    def __init__(self, spec: JobSpec, lines: queue.Queue[Line]) -> None:
        self.name = spec.name
        self._mark = uuid.uuid4().hex
        environment = {**spec.environment, MARKER: self._mark}
        settings = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        gpus = ["--gpus", "{}:{}".format(*spec.gpus)] if spec.gpus else []
        pdeathsig = [sys.executable, "-m", "dilocox.pdeathsig", "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            [*pdeathsig, *settings, *gpus, "--", *spec.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True, name=spec.name)
        self._reader.start()

    def _read(self, lines: queue.Queue[Line]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in stream:
                lines.put(Line(self.name, raw.decode(errors="replace").rstrip("\r\n")))
        lines.put(Line(self.name, None))

    def poll(self) -> int | None:
        """Exit code of the command, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the command once it has ended; None if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=timeout_s)
        return None

    def processes(self) -> list[psutil.Process]:
        """Every living process of this job, found by its mark."""
        return [
            process for process in psutil.process_iter() if _environment(process).get(MARKER) == self._mark
        ]

    def interrupt_ranks(self) -> int:
        """SIGTERM to the training ranks alone, so that they save and leave; returns how many there are.

        torchrun's agent must not get it: it would kill its ranks before they have saved.
        """
        ranks = {p.pid: p for p in self.processes() if "LOCAL_RANK" in _environment(p)}
        for process in ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() not in ranks:  # helpers of a rank end with it
                    process.send_signal(signal.SIGTERM)
        return len(ranks)

    def kill(self) -> None:
        """Ends everything of this job now; returns when nothing of it is left. May be called twice.

        Looks again each time: a process may have started another one just before it died.
        """
        for _ in range(_KILL_ROUNDS):
            alive = [process for process in self.processes() if _alive(process)]
            if not alive:
                break
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=5)
        self.wait(5)
        self._reader.join(timeout=5)


def _environment(process: psutil.Process) -> dict[str, str]:
    """Environment a process was started with; empty if it is gone or not ours to read."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
