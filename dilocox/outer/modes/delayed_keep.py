"""`delayed_keep`: a delay of one interval; an island keeps its own progress (after 2506.21263). Level 2.

A second point beside the anchor, the *reference*, is where the next pseudo-gradient is measured from. It
moves to the local weights at each MEASURE, so no progress is measured twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dilocox.outer import pseudo_gradient
from dilocox.outer.modes.base import DelayMode, EventKind, FragmentTensors

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult


class DelayedKeep(DelayMode):
    """MEASURE, then APPLY of the launch before, then START; local = new anchor - own unmerged progress."""

    name = "delayed_keep"
    landing = "at the next launch"

    def __init__(self, fragment: FragmentTensors, *, alpha: float) -> None:
        super().__init__(fragment, alpha=alpha)
        self.reference = [anchor.clone() for anchor in fragment.anchor]

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        # MEASURE comes first: it must not see the anchor that the same step's APPLY makes.
        previous = [(EventKind.APPLY, launch - 1)] if launch else []
        return [(EventKind.MEASURE, launch), *previous, (EventKind.START, launch)]

    def measure(self) -> list[Tensor]:
        """Progress since the last measurement. In place: reference."""
        deltas = pseudo_gradient.measure(self.reference, self.fragment.local)
        pseudo_gradient.advance_reference(self.reference, self.fragment.local)
        return deltas

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        fragment = self.fragment
        fragment.outer_step(result.mean)
        pending = [] if fresh is None else [fresh]
        pseudo_gradient.keep_private(fragment.local, self.reference, fragment.anchor, pending=pending)

    def discarded(self, deltas: Sequence[Tensor], fresh: list[Tensor] | None, *, share: float) -> None:
        pseudo_gradient.restore_unsent(self.reference, deltas)

    def reset(self) -> None:
        super().reset()
        pseudo_gradient.reset(self.reference, self.fragment.anchor)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"reference": self.reference}

    def load(self, tensors: Mapping[str, list[Tensor]], plain: Mapping[str, Any]) -> None:
        pseudo_gradient.reset(self.reference, tensors["reference"])
