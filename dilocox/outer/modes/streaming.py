"""`streaming`: Streaming DiLoCo (2501.18512). A fragment crosses while the next tau steps run. Level 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilocox.outer import pseudo_gradient
from dilocox.outer.modes.base import DelayMode, EventKind

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult


class Streaming(DelayMode):
    """APPLY comes tau steps after the launch and mixes: local = alpha * local + (1 - alpha) * anchor."""

    name = "streaming"
    landing = "after the delay"

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        return [(EventKind.MEASURE, launch), (EventKind.START, launch)]

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        self.fragment.outer_step(result.mean)
        pseudo_gradient.mix(self.fragment.local, self.fragment.anchor, alpha=self.alpha)
