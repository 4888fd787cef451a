"""Error feedback of the gather half: what requantising an averaged part lost. Level 2.

The owner of a part adds it to the same part of the next sync. It belongs to one partition of the fragment:
when the members change it is stale, and the owner forwards it through its own message instead, scaled so
that the mean gains exactly what the residual held (docs/algorithms.md#gather-residual).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.errors import CheckpointError
from dilocox.outer.codec.grid import Slice


@dataclass(frozen=True)
class _Lost:
    """Residual of one slice, as left by a sync of `num_islands` in which this island was at `index`."""

    num_islands: int
    index: int
    slice: Slice
    values: Tensor

    def fits(self, num_islands: int, index: int) -> bool:
        """Whether a sync of these members has the same partition and the same owner."""
        return (self.num_islands, self.index) == (num_islands, index)


class GatherErrorFeedback:
    """Gather-half residuals of one fragment on this rank; they change in `commit` alone.

    Attributes:
        in_use: some partition may have a residual. Equal on all ranks of the island, also where a rank's
            own slices are empty, so that all of them write the same kinds into a checkpoint.
    """

    def __init__(self) -> None:
        self.in_use = False
        self._held: list[_Lost] = []
        self._staged: tuple[bool, list[_Lost]] | None = None

    def add_to_part(
        self, num_islands: int, index: int, slices: Sequence[Slice], values: Sequence[Tensor]
    ) -> None:
        """Adds the residual of exactly this partition, if there is one. In place: values.

        Raises:
            ValueError: the residual belongs to other slices.
        """
        current = [lost for lost in self._held if lost.fits(num_islands, index)]
        if not current:
            return
        if [lost.slice for lost in current] != list(slices):
            raise ValueError(
                f"the gather residual is of {[lost.slice for lost in current]}, the part is {list(slices)}"
            )
        for target, lost in zip(values, current, strict=True):
            target.add_(lost.values)

    def stale(self, num_islands: int, index: int) -> list[tuple[Slice, Tensor]]:
        """Returns residuals of other partitions, to be forwarded through this island's own message."""
        return [(lost.slice, lost.values) for lost in self._held if not lost.fits(num_islands, index)]

    def stage(
        self, num_islands: int, index: int, *, lost: Sequence[tuple[Slice, Tensor]], forwarded: bool
    ) -> None:
        """Remembers what a sync lost until it is committed or discarded.

        Args:
            num_islands: members of the sync.
            index: position of this island among them.
            lost: for each slice of the owned part, what requantising it lost.
            forwarded: whether the stale residuals went into this island's message.
        """
        kept = [] if forwarded else [part for part in self._held if not part.fits(num_islands, index)]
        left = [_Lost(num_islands, index, span, values) for span, values in lost]
        # With two islands or one nothing is requantised.
        self._staged = (num_islands > 2 or (self.in_use and not forwarded), kept + left)

    def commit(self) -> None:
        """Makes the staged residuals the current ones."""
        if self._staged is not None:
            (self.in_use, self._held), self._staged = self._staged, None

    def discard(self) -> None:
        """Drops the staged residuals."""
        self._staged = None

    def clear(self) -> None:
        """Drops all residuals."""
        self.in_use, self._held, self._staged = False, [], None

    def values(self) -> list[tuple[Slice, Tensor]]:
        """Returns all residuals, in units of the mean."""
        return [(lost.slice, lost.values) for lost in self._held]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns residuals by `num_islands.index.tensor.start.stop`; only the same layout can read them."""
        return {
            f"{lost.num_islands}.{lost.index}.{lost.slice.tensor}.{lost.slice.start}.{lost.slice.stop}": (
                lost.values
            )
            for lost in self._held
        }

    def load_state_dict(self, state: Mapping[str, Tensor], like: Sequence[Tensor], *, in_use: bool) -> None:
        """Loads the residuals of a checkpoint; the tensors are kept, not copied.

        Args:
            state: a `state_dict`.
            like: the tensors of the fragment.
            in_use: see the class.

        Raises:
            CheckpointError: a residual lies outside the tensors.
        """
        held = []
        for key, values in state.items():
            num_islands, index, tensor, start, stop = map(int, key.split("."))
            inside = tensor < len(like) and 0 <= start <= stop <= like[tensor].numel()
            if not inside or values.shape != (stop - start,):
                raise CheckpointError(f"gather residual {key} of shape {tuple(values.shape)} fits no shard")
            span = Slice(tensor, start, stop)
            held.append(_Lost(num_islands, index, span, values.to(like[tensor].device)))
        self.clear()
        self.in_use, self._held = in_use, held

    def load_stale(self, totals: Sequence[Tensor]) -> None:
        """Loads residuals of another layout: they fit no partition and are forwarded.

        Args:
            totals: for each tensor of the fragment, the sum of the residuals of its elements.
        """
        self.clear()
        self.in_use = True
        for tensor, values in enumerate(totals):
            if values.any():
                flat = values.reshape(-1).clone()
                self._held.append(_Lost(0, 0, Slice(tensor, 0, flat.numel()), flat))

    def totals(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Sums the residuals of each tensor's elements. Returns: fp32, shapes as `like`, new memory."""
        sums = [torch.zeros_like(tensor, dtype=torch.float32).reshape(-1) for tensor in like]
        for lost in self._held:
            sums[lost.slice.tensor][lost.slice.start : lost.slice.stop] += lost.values
        return [total.view(tensor.shape) for total, tensor in zip(sums, like, strict=True)]


def scaled(parts: Sequence[tuple[Slice, Tensor]], factor: float) -> list[tuple[Slice, Tensor]]:
    """Returns the same slices with values times factor."""
    return [(span, torch.mul(values, factor)) for span, values in parts]
