"""Small collectives among the ranks of one island, for level 2. Level 2.

Every rank averages its own part over the WAN, but some decisions belong to the whole island: is the
pseudo-gradient finite, what is its norm, did every rank get its quorum. They are made over a group of their
own, so that the sync thread never touches the groups that the training thread is using.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class ControlGroup(Protocol):
    """The ranks of this island.

    Attributes:
        rank: this rank in the island's world.
        num_ranks: size of that world.
    """

    rank: int
    num_ranks: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums each value over the ranks of this island, in fp64; equal on all of them."""

    def share(self, value: str) -> str:
        """Returns rank 0's text on every rank."""

    def gather(self, value: str) -> list[str]:
        """Returns the texts of all ranks, in rank order, on every rank."""


class GlooControlGroup:
    """`ControlGroup` over a gloo group.

    Collective: all methods, by all ranks of the island, in the same order, from one thread.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group = group

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(value) for value in total]

    def share(self, value: str) -> str:
        box = [value]
        dist.broadcast_object_list(
            box, src=dist.get_global_rank(self._group, 0), group=self._group, device=torch.device("cpu")
        )
        return box[0]

    def gather(self, value: str) -> list[str]:
        texts = [""] * self.num_ranks
        dist.all_gather_object(texts, value, group=self._group)
        return texts


class SingleRankControl:
    """`ControlGroup` of one rank, without a process group."""

    rank = 0
    num_ranks = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def share(self, value: str) -> str:
        return value

    def gather(self, value: str) -> list[str]:
        return [value]
