"""Which sync interval H comes next: fixed, or following the rank of the mean. Level 2, no torch.

A controller is asked after each outer step, that is when the last fragment was applied. Its answer must be
equal on all islands, so it may depend only on what all of them have: the result of the sync.
"""

from __future__ import annotations

from typing import Protocol

from dilocox.config.schema import OuterConfig


class SyncedValues(Protocol):
    """The part of a `SyncResult` that controllers read."""

    @property
    def interval_scale(self) -> float | None: ...


class IntervalController(Protocol):
    """Decides H."""

    def wanted(self, result: SyncedValues) -> float | None:
        """Returns the inner steps that the next sync interval should have, or None to keep H."""


class FixedInterval:
    """H stays as it is."""

    def wanted(self, result: SyncedValues) -> float | None:
        """Always None."""
        return None


class RankInterval:
    """H follows the adaptive rank: H_t = r_t / r_1 * H_1 (DiLoCoX, 2506.21263).

    Args:
        initial: H_1.
    """

    def __init__(self, initial: int) -> None:
        self._initial = initial

    def wanted(self, result: SyncedValues) -> float | None:
        """Returns the initial interval times the scale that all islands and ranks agree on."""
        return None if result.interval_scale is None else self._initial * result.interval_scale


def build_interval(outer: OuterConfig) -> IntervalController:
    """Builds the controller of a resolved configuration."""
    return RankInterval(outer.sync_interval) if outer.adaptive_interval else FixedInterval()
