"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "problem"]
"""note = good to know; warning = works, but slower or less safely; problem = will not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: short name of the check, equal in all its findings.
        message: what was seen.
        advice: what to do; empty for `ok` and `note`.
    """

    check: str
    severity: Severity
    message: str
    advice: str = ""

    def line(self) -> str:
        """The finding as the report and the log print it."""
        return f"{self.severity:<8} {self.check}: {self.message}" + (
            f"; {self.advice}" if self.advice else ""
        )


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def note(check: str, message: str) -> Finding:
    return Finding(check, "note", message)


def warning(check: str, message: str, advice: str) -> Finding:
    return Finding(check, "warning", message, advice)


def problem(check: str, message: str, advice: str) -> Finding:
    return Finding(check, "problem", message, advice)
