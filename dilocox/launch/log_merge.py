"""From the output of many ranks to one log that a person can read.

Rank 0 of each island is shown in full, the others only with warnings, errors, and the tracebacks of the
first of them that has one. Known noise is left out. Nothing is lost: torchrun keeps every rank's stdout and
stderr below `island_I/torchrun/`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass

_RANK_LINE = re.compile(r"^\[rank(\d+)\]:(.*)$")
_OWN_PREFIX = re.compile(r"^\[island \d+( rank \d+)?\] ")
_ALARM = re.compile(r"\b(WARNING|ERROR|CRITICAL):")
_ROOT_CAUSE_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank")
_ROOT_CAUSE_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?")  # torch marks the lines of an uncaught exception once more
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)")
_BETWEEN_TRACEBACKS = re.compile(r"^(During handling of the above|The above exception was)")
_NOISE = re.compile(
    r"^\[[WI]\d{3,4} |"  # C++ warnings of torch, for example about host names
    r"^[WI]\d{4} \d\d:|"  # Python side of torch.distributed
    r"^\[Gloo\] Rank |"
    r"^$"
)
_PYTHON_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning: ")
_KEPT_LINES = 60


@dataclass(frozen=True)
class Failure:
    """What torchrun reported as the first failure of an island.

    Attributes:
        was_shown: the rank's traceback is in the merged log.
    """

    rank: int
    exit_code: int
    last_lines: tuple[str, ...]
    was_shown: bool


class IslandLog:
    """Sorts the output of one island, line by line."""

    def __init__(self, island_id: int) -> None:
        self._island_id = island_id
        self._recent: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LINES))
        self._agent: deque[str] = deque(maxlen=_KEPT_LINES)
        self._in_traceback: set[int] = set()
        self._after_warning: set[int] = set()
        self._traceback_of: int | None = None  # the one rank besides 0 whose tracebacks are shown
        self._after_root_cause = False
        self._failed_rank: int | None = None
        self._exit_code: int | None = None

    def feed(self, line: str) -> str | None:
        """Returns: the line to show, prefixed; None if the line is hidden."""
        match = _RANK_LINE.match(line)
        if match is None:
            self._read_agent(line)
            return None
        rank, text = int(match[1]), _RANK_MARK.sub("", match[2])
        self._recent[rank].append(text)
        if not self._is_shown(rank, text):
            return None
        if _OWN_PREFIX.match(text):
            return text
        origin = f"island {self._island_id}" if rank == 0 else f"island {self._island_id} rank {rank}"
        return f"[{origin}] {text}"

    def failure(self) -> Failure | None:
        """The first failure, after the island's output has ended; None if torchrun named none."""
        if self._failed_rank is None or self._exit_code is None:
            return None
        rank, lines = self._failed_rank, tuple(self._recent[self._failed_rank])
        has_traceback = any(_TRACEBACK.match(line) for line in lines)
        return Failure(
            rank, self._exit_code, lines, was_shown=has_traceback and rank in (0, self._traceback_of)
        )

    def agent_lines(self) -> tuple[str, ...]:
        """Last lines of torchrun itself, for a failure before any rank was there."""
        return tuple(self._agent)

    def _is_shown(self, rank: int, text: str) -> bool:
        if self._is_noise(rank, text):
            return False
        if _TRACEBACK.match(text) or _BETWEEN_TRACEBACKS.match(text):
            self._in_traceback.add(rank)
            if rank != 0 and self._traceback_of is None:
                self._traceback_of = rank
        if rank in self._in_traceback:
            if not self._continues_traceback(text):
                self._in_traceback.discard(rank)
            return rank in (0, self._traceback_of)
        return rank == 0 or _ALARM.search(text) is not None

    def _is_noise(self, rank: int, text: str) -> bool:
        """Also the line of source code that Python prints below a warning."""
        if _PYTHON_WARNING.match(text):
            self._after_warning.add(rank)
            return True
        if rank in self._after_warning:
            self._after_warning.discard(rank)
            if text.startswith("  "):
                return True
        return _NOISE.match(text) is not None

    @staticmethod
    def _continues_traceback(text: str) -> bool:
        """False for the line with the exception itself, which ends a traceback."""
        return bool(text.startswith(" ") or _TRACEBACK.match(text) or _BETWEEN_TRACEBACKS.match(text))

    def _read_agent(self, line: str) -> None:
        self._agent.append(line)
        if line.startswith("Root Cause"):
            self._after_root_cause = True
        if not self._after_root_cause:
            return
        if self._failed_rank is None and (match := _ROOT_CAUSE_RANK.match(line)):
            self._failed_rank = int(match[1])
        if self._exit_code is None and (match := _ROOT_CAUSE_CODE.match(line)):
            self._exit_code = int(match[1])
