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
    """MEASURE, then APPLY of the fresh measurement with the others' previous one, then START."""

    name = "eager"
    landing = "at the next launch"
    anchors_are_shared = False
    single_fragment = True

    def __init__(self, fragment: FragmentTensors, *, alpha: float) -> None:
        super().__init__(fragment, alpha=alpha)
        # Own payload in flight; None if this island has none in the sync that is applied next.
        self._payload: list[Tensor] | None = None
        # Weight with which the own part of it was applied at once.
        self._share = 1.0
        # Payload of a discarded sync: the others have not seen it, so it is sent again.
        self._carry: list[Tensor] | None = None

    @classmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        # APPLY carries the number of the fresh measurement; the sync applied with it was launched one before.
        return [(EventKind.MEASURE, launch), (EventKind.APPLY, launch), (EventKind.START, launch)]

    @classmethod
    def after_drain(cls, launch: int) -> int:
        # One more APPLY, with nothing fresh.
        return launch + 1

    def payload(self, deltas: list[Tensor]) -> list[Tensor]:
        """Adds what a discarded sync left: its own share has been used, but the others have not seen it."""
        if self._carry is not None:
            deltas = [delta + left for delta, left in zip(deltas, self._carry, strict=True)]
        self._payload = deltas
        return deltas

    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        self._carry = None  # it was in this payload
        if not contributed:
            self._payload = None
        self._step(fresh, result.mean, share)

    def discarded(self, deltas: Sequence[Tensor], fresh: list[Tensor] | None, *, share: float) -> None:
        self._carry = self._payload
        self.nothing_in_flight(fresh, share=share)

    def nothing_in_flight(self, fresh: list[Tensor] | None, *, share: float) -> None:
        if fresh is not None:
            self._step(fresh, None, share)

    def reset(self) -> None:
        super().reset()
        self._payload = self._carry = None

    def tensors(self) -> dict[str, list[Tensor]]:
        held = {"eager_payload": self._payload, "eager_carry": self._carry}
        return {kind: values for kind, values in held.items() if values is not None}

    def plain(self) -> dict[str, Any]:
        return {"eager_share": self._share}

    def load(self, tensors: Mapping[str, list[Tensor]], plain: Mapping[str, Any]) -> None:
        device = self.fragment.anchor[0].device if self.fragment.anchor else None
        held = {kind: [value.to(device) for value in values] for kind, values in tensors.items()}
        self._payload, self._carry = held.get("eager_payload"), held.get("eager_carry")
        self._share = float(plain["eager_share"])

    def _step(self, fresh: list[Tensor] | None, mean: Sequence[Tensor] | None, share: float) -> None:
        # An island that is not in the mean has no part to take out: it abstained, observed or was healed.
        own = self._payload
        if mean is not None and own is None:
            own = [other.new_zeros(other.shape) for other in mean]
        gradient = pseudo_gradient.eager_share(
            fresh,
            mean,
            own if mean is not None else None,
            fresh_share=share,
            previous_share=self._share,
        )
        self._share = share
        self.fragment.outer_step(gradient)
        pseudo_gradient.reset(self.fragment.local, self.fragment.anchor)
