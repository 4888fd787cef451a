"""`blocking`: DiLoCo as published (2311.08105, algorithm 1). Training waits for the mean. Level 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilocox.outer.modes.base import DelayMode, EventKind

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult


class Blocking(DelayMode):
    """MEASURE, START and APPLY at the launch; all islands continue from the new anchor."""

    name = "blocking"
    landing = "at once"

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        return [(EventKind.MEASURE, launch), (EventKind.START, launch), (EventKind.APPLY, launch)]

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        self.fragment.outer_step(result.mean)
        self.reset()
