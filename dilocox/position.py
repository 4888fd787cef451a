"""Where an island is in the run. Level 2 owns the position; level 1, data and metrics follow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Where an island is in the run.

    Attributes:
        inner_step: inner steps done.
        num_syncs: committed syncs, over all fragments.
    """

    inner_step: int
    num_syncs: int
