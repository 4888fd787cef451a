"""Outer optimizers: one step on the anchors of a fragment, given the mean pseudo-gradient. Level 2.

They are `torch.optim.SGD` to the bit. Each fragment has buffers of its own, created at its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dilocox.config.schema import OuterConfig


class OuterOptimizer(Protocol):
    """What `sync` asks of an outer optimizer."""

    def step(self, fragment: int, anchor: Sequence[Tensor], gradient: Sequence[Tensor]) -> None:
        """One outer step. In place: anchor (fp32). The gradient is left as it is."""

    def momentum_of(self, fragment: int) -> list[Tensor] | None:
        """The buffers of a fragment, in the order of its shards; None before its first step."""

    def state_dict(self) -> dict[int, list[Tensor]]:
        """Buffers by fragment; not copies."""

    def load_state_dict(self, state: Mapping[int, Sequence[Tensor]]) -> None:
        """Takes over copies of the buffers."""


class Sgd:
    """SGD with momentum, plain or Nesterov: DiLoCo's outer step (2311.08105, algorithm 1).

    b = mu * b + d (the first time b = d), then theta -= lr * (d + mu * b), or lr * b without Nesterov.
    The learning rate is outside the buffer, so changing it later means what it says.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._buffers: dict[int, list[Tensor]] = {}

    def step(self, fragment: int, anchor: Sequence[Tensor], gradient: Sequence[Tensor]) -> None:
        direction = gradient if self.momentum == 0 else self._with_momentum(fragment, gradient)
        for theta, update in zip(anchor, direction, strict=True):
            theta.add_(update, alpha=-self.lr)

    def momentum_of(self, fragment: int) -> list[Tensor] | None:
        return self._buffers.get(fragment)

    def state_dict(self) -> dict[int, list[Tensor]]:
        return dict(self._buffers)

    def load_state_dict(self, state: Mapping[int, Sequence[Tensor]]) -> None:
        self._buffers = {
            fragment: [tensor.clone() for tensor in buffers] for fragment, buffers in state.items()
        }

    def _with_momentum(self, fragment: int, gradient: Sequence[Tensor]) -> list[Tensor]:
        buffers = self._buffers.get(fragment)
        if buffers is None:
            buffers = self._buffers[fragment] = [delta.clone() for delta in gradient]
        else:
            for buffer, delta in zip(buffers, gradient, strict=True):
                buffer.mul_(self.momentum).add_(delta)
        if not self.nesterov:
            return buffers
        return [
            delta.add(buffer, alpha=self.momentum) for delta, buffer in zip(gradient, buffers, strict=True)
        ]


def build_outer_optimizer(outer: OuterConfig) -> OuterOptimizer:
    """The optimizer of a resolved configuration."""
    assert outer.outer_lr is not None and outer.outer_momentum is not None
    return Sgd(
        lr=outer.outer_lr,
        momentum=outer.outer_momentum,
        nesterov=outer.outer_optimizer == "nesterov",
    )
