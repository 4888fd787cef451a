"""`delayed_reset`: the textbook delay of one interval; unstable at momentum 0.9, hence the warning. Level 2.

The pseudo-gradient of one interval is applied at the next launch, and all islands continue from the anchor.
Their progress since the measurement is in the next pseudo-gradient, which is measured before the reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilocox.outer.modes.base import DelayMode, EventKind

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult


class DelayedReset(DelayMode):
    """MEASURE, then APPLY of the launch before, then START."""

    name = "delayed_reset"
    landing = "at the next launch"

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        # The previous sync is applied before the next one starts: two in flight would share the link.
        previous = [(EventKind.APPLY, launch - 1)] if launch else []
        return [(EventKind.MEASURE, launch), *previous, (EventKind.START, launch)]

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        self.fragment.outer_step(result.mean)
        self.reset()
