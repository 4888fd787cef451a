"""No process outlives the one that started it, not even after `kill -9`.

As a program (`python -m dilocox.pdeathsig --parent PID --env K=V -- COMMAND`) it ties itself to its
parent and then becomes COMMAND; the tie survives that. Linux only: elsewhere the launcher's own clean-up
has to do, which a `kill -9` of the launcher skips.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def set_pdeathsig(number: signal.Signals, *, parent: int | None = None) -> None:
    """Asks the kernel for a signal to this process when its parent dies.

    Args:
        parent: process id the caller expects as parent; if it has already died, the signal comes now.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def gpu_slice(visible: str | None, start: int, stop: int) -> str:
    """The entries start..stop of CUDA_VISIBLE_DEVICES, where unset means 0, 1, 2 ..."""
    if visible is None:
        return ",".join(str(index) for index in range(start, stop))
    return ",".join(visible.split(",")[start:stop])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dilocox.pdeathsig")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--env", action="append", default=[], metavar="K=V")
    parser.add_argument("--gpus", metavar="START:STOP")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    set_pdeathsig(signal.SIGKILL, parent=args.parent)
    environment = dict(os.environ)
    environment.update(entry.split("=", 1) for entry in args.env)
    if args.gpus:
        start, stop = (int(bound) for bound in args.gpus.split(":"))
        environment["CUDA_VISIBLE_DEVICES"] = gpu_slice(environment.get("CUDA_VISIBLE_DEVICES"), start, stop)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise SystemExit(f"cannot start {command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
