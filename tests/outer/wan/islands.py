"""Islands as threads on a loopback WAN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dilocox.outer.wan.base import Member

T = TypeVar("T")


def hello(island: int, *, weight: float = 1.0, outer_step: int = 0) -> Member:
    """What an island says when nothing but its id and weight matter."""
    return Member(
        island=island,
        kind="sync",
        run_id="run",
        fingerprint="f",
        outer_step=outer_step,
        fragment=0,
        inner_step=outer_step,
        weight=weight,
        anchor_hash="",
    )


def run_islands(work: Callable[[int], T], islands: Sequence[int]) -> list[T]:
    """Runs work(island) in a thread each; raises the first failure."""
    with ThreadPoolExecutor(len(islands)) as pool:
        return list(pool.map(work, islands))
