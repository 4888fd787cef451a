"""Error feedback of the gather half: what requantising an averaged shard lost. Level 2.

The owner of a shard adds it to the same shard of the next round (algorithms.md section 12.2, stage 2). It
belongs to one cut of the fragment: when the members change, the owner passes it on through its own
message instead, scaled so that the mean gains exactly what the residual held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.outer.codec.sizes import Slice


@dataclass(frozen=True)
class _Part:
    """Residual of one slice, as left by a round of `num_islands` in which this island was at `index`."""

    num_islands: int
    index: int
    place: Slice
    values: Tensor


class GatherErrorFeedback:
    """Gather-half residuals of one fragment on this rank; they change in `commit` alone."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._staged: list[_Part] | None = None

    def add_to_shard(self, num_islands: int, index: int, shard: Sequence[Tensor]) -> None:
        """Adds the residual of this very cut, if there is one. In place: shard."""
        current = [part for part in self._parts if self._fits(part, num_islands, index)]
        for values, part in zip(shard, current, strict=False):
            values.add_(part.values)

    def foreign(self, num_islands: int, index: int) -> list[tuple[Slice, Tensor]]:
        """Residuals of another cut: to be passed on through this island's own message."""
        return [(p.place, p.values) for p in self._parts if not self._fits(p, num_islands, index)]

    def stage(
        self, num_islands: int, index: int, *, lost: Sequence[tuple[Slice, Tensor]], forwarded: bool
    ) -> None:
        """Remembers what a round lost, until the vote is known.

        Args:
            num_islands: members of the round.
            index: position of this island among them.
            lost: for each slice of the owned shard, what requantising it lost.
            forwarded: whether the foreign residuals went into this island's message.
        """
        kept = [] if forwarded else [p for p in self._parts if not self._fits(p, num_islands, index)]
        self._staged = kept + [_Part(num_islands, index, place, values) for place, values in lost]

    def commit(self) -> None:
        """The sync was committed: what it lost is the residual now."""
        if self._staged is not None:
            self._parts, self._staged = self._staged, None

    def discard(self) -> None:
        """The sync failed: the residual is what it was."""
        self._staged = None

    def values(self) -> list[tuple[Slice, Tensor]]:
        """All residuals, in units of the mean."""
        return [(part.place, part.values) for part in self._parts]

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals by `num_islands.index.tensor.start.stop`."""
        return {
            f"{p.num_islands}.{p.index}.{p.place.tensor}.{p.place.start}.{p.place.stop}": p.values
            for p in self._parts
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the residuals of a checkpoint; the tensors are kept, not copied."""
        self._staged = None
        self._parts = []
        for key, values in state.items():
            num_islands, index, tensor, start, stop = map(int, key.split("."))
            self._parts.append(_Part(num_islands, index, Slice(tensor, start, stop), values))

    @staticmethod
    def _fits(part: _Part, num_islands: int, index: int) -> bool:
        return (part.num_islands, part.index) == (num_islands, index)


def scaled(parts: Sequence[tuple[Slice, Tensor]], factor: float) -> list[tuple[Slice, Tensor]]:
    """The same slices, values times factor."""
    return [(place, torch.mul(values, factor)) for place, values in parts]
