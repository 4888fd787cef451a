"""Islands as threads on a loopback WAN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dilocox.outer.shared_state import SharedState
from dilocox.outer.wan.base import Member

T = TypeVar("T")


def member_of(island: int, *, weight: float = 1.0, outer_step: int = 0) -> Member:
    """A member info of which only id and weight matter."""
    return Member(island, "sync", "run", "f", outer_step=outer_step, inner_step=outer_step, weight=weight)


class FakeFragments:
    """A `StateSource` without fragments.

    Attributes:
        num_contributions: how far this island is.
    """

    num_syncs = 0

    def __init__(self, num_contributions: int, state: dict | None = None):
        self.num_contributions = num_contributions
        self.state = state or {}

    def shared_state(self):
        return self.state


def state_of(num_contributions: int, state: dict | None = None) -> SharedState:
    """The owner of a state with this many contributions."""
    return SharedState(FakeFragments(num_contributions, state))


def run_islands(work: Callable[[int], T], islands: Sequence[int]) -> list[T]:
    """Runs work(island) in a thread each; raises the first failure."""
    with ThreadPoolExecutor(len(islands)) as pool:
        return list(pool.map(work, islands))
