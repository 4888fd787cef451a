"""`eager`: the own pseudo-gradient is applied at once, the others' one interval later (2502.12996). Level 2.

Every island has an anchor of its own between two syncs; the drain ends with the mean of the anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dilocox.outer import pseudo_gradient
from dilocox.outer.modes.base import DelayMode, EventKind, FragmentTensors

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult


class Eager(DelayMode):
    """MEASURE, then APPLY of the fresh measurement with the others' last one, then START."""

    name = "eager"
    landing = "at the next launch"
    anchors_are_shared = False
    single_fragment = True

    def __init__(self, fragment: FragmentTensors, *, alpha: float) -> None:
        super().__init__(fragment, alpha=alpha)
        self._sent: list[Tensor] | None = None  # own part of the payload in flight
        self._share = 1.0  # with which it was used
        self._carry: list[Tensor] | None = None  # what a discarded sync left to be sent again

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        # APPLY carries the number of the fresh measurement; what lands in it was launched one before.
        return [(EventKind.MEASURE, launch), (EventKind.APPLY, launch), (EventKind.START, launch)]

    @classmethod
    def after_drain(cls, launch: int) -> int:
        return launch + 1  # one more APPLY, with nothing fresh

    def payload(self, deltas: list[Tensor]) -> list[Tensor]:
        """With what a discarded sync left: its own share has been used, the others have not seen it."""
        if self._carry is not None:
            deltas = [delta + left for delta, left in zip(deltas, self._carry, strict=True)]
        self._sent = deltas
        return deltas

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        self._carry = None
        if not contributed:
            self._sent = None
        self._step(fresh, result.mean, share)

    def discarded(self, deltas: Sequence[Tensor], fresh: list[Tensor] | None, *, share: float) -> None:
        self._carry = self._sent
        self.nothing_in_flight(fresh, share=share)

    def nothing_in_flight(self, fresh: list[Tensor] | None, *, share: float) -> None:
        if fresh is not None:
            self._step(fresh, None, share)

    def reset(self) -> None:
        super().reset()
        self._sent = self._carry = None

    def tensors(self) -> dict[str, list[Tensor]]:
        held = {"eager_sent": self._sent, "eager_carry": self._carry}
        return {kind: values for kind, values in held.items() if values is not None}

    def plain(self) -> dict[str, Any]:
        return {"eager_share": self._share}

    def load(self, tensors: Mapping[str, list[Tensor]], plain: Mapping[str, Any]) -> None:
        self._sent, self._carry = tensors.get("eager_sent"), tensors.get("eager_carry")
        self._share = float(plain["eager_share"])

    def _step(self, fresh: list[Tensor] | None, mean: Sequence[Tensor] | None, share: float) -> None:
        # An island that is not in the mean has sent nothing: it abstained, observed or was healed.
        sent = self._sent
        if mean is not None and sent is None:
            sent = [other.new_zeros(other.shape) for other in mean]
        gradient = pseudo_gradient.eager_share(
            fresh,
            mean,
            sent if mean is not None else None,
            fresh_share=share,
            previous_share=self._share,
        )
        self._share = share
        self.fragment.outer_step(gradient)
        pseudo_gradient.reset(self.fragment.local, self.fragment.anchor)
