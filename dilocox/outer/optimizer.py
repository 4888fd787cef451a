"""Outer optimizers: `torch.optim` on the anchors of one fragment, with the mean pseudo-gradient as gradient.

DiLoCo's outer step (2311.08105, algorithm 1) is SGD with Nesterov momentum: b = mu * b + d and
theta = theta - lr * (d + mu * b); docs/algorithms.md#outer-step. Level 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig

Builder = Callable[[list[Tensor], float, float], torch.optim.Optimizer]


def _nesterov(anchors: list[Tensor], lr: float, momentum: float) -> torch.optim.Optimizer:
    # torch refuses Nesterov without momentum, where it is plain SGD
    return torch.optim.SGD(anchors, lr=lr, momentum=momentum, nesterov=momentum > 0, foreach=False)


def _sgd(anchors: list[Tensor], lr: float, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=lr, momentum=momentum, foreach=False)


OPTIMIZERS: Mapping[str, Builder] = {"nesterov": _nesterov, "sgd": _sgd}
"""By name in the configuration. `foreach=False`: one kernel per tensor rounds alike on every device."""


class OuterOptimizer:
    """The outer optimizer of one fragment.

    Args:
        anchors: fp32, one per shard; stepped in place.
    """

    def __init__(self, config: OuterConfig, anchors: Sequence[Tensor]) -> None:
        assert config.outer_lr is not None and config.outer_momentum is not None
        self._anchors = list(anchors)
        # torch makes the state of a tensor at its first step; a fragment may own nothing on this rank
        build = OPTIMIZERS[config.outer_optimizer]
        self._torch = build(self._anchors, config.outer_lr, config.outer_momentum) if self._anchors else None

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor]) -> None:
        """Takes one outer step. In place: anchors; the gradient does not change.

        Args:
            gradient: mean pseudo-gradient, fp32, one per shard.
        """
        if self._torch is None:
            return
        for anchor, delta in zip(self._anchors, gradient, strict=True):
            anchor.grad = delta
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Returns state by torch's names (`momentum_buffer`), one tensor per shard; empty before a step."""
        found: dict[str, list[Tensor]] = {}
        for anchor in self._anchors:
            for key, value in self._state_of(anchor).items():
                if isinstance(value, Tensor) and value.shape == anchor.shape:
                    found.setdefault(key, []).append(value)
        return found

    def plain(self) -> dict[str, float]:
        """Returns scalar state, such as the number of steps; equal for all tensors of a fragment."""
        if not self._anchors:
            return {}
        first = self._state_of(self._anchors[0])
        return {
            key: float(value)
            for key, value in first.items()
            if value is not None and not (isinstance(value, Tensor) and value.shape == self._anchors[0].shape)
        }

    def load(self, tensors: Mapping[str, Sequence[Tensor]], plain: Mapping[str, float]) -> None:
        """Continues from copies of `tensors` and `plain`."""
        if self._torch is None:
            return
        self._torch.state.clear()
        for index, anchor in enumerate(self._anchors):
            state: dict[str, Any] = {
                key: values[index].to(anchor.device, torch.float32, copy=True)
                for key, values in tensors.items()
            }
            state.update({key: torch.tensor(value) for key, value in plain.items()})
            if state:
                self._torch.state[anchor] = state

    def _state_of(self, anchor: Tensor) -> Mapping[str, Any]:
        return {} if self._torch is None else self._torch.state.get(anchor, {})
