"""Rules that combine the islands' values: `outer.aggregation`. Level 2.

A rule is a file or a function of its own and one entry in `AGGREGATORS` (and its name in the configuration).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor


class Aggregator(Protocol):
    """Combines the islands' values in island order, so that all islands compute equal bits.

    It must treat each element apart: it is called with parts of tensors, on several islands.
    """

    def __call__(self, contributions: Iterable[tuple[float, list[Tensor]]]) -> list[Tensor]:
        """Combines the values of at least one island.

        Args:
            contributions: (weight above 0, decoded fp32 tensors) in island order; each is decoded when the
                iterator reaches it, and may be written to.

        Returns: one fp32 tensor for each, of its shape.
        """


def mean(contributions: Iterable[tuple[float, list[Tensor]]]) -> list[Tensor]:
    """Returns the weighted mean in fp32.

    Memory: two islands' values at a time.
    """
    total: list[Tensor] = []
    sum_of_weights = 0.0
    for weight, values in contributions:
        # Multiplications and additions one by one: a fused multiply-add would round differently elsewhere.
        if weight != 1:
            values = [value.mul_(weight) for value in values]
        total = [t.add_(v) for t, v in zip(total, values, strict=True)] if sum_of_weights else values
        sum_of_weights += weight
    return [value.mul_(1.0 / sum_of_weights) for value in total]


AGGREGATORS: Mapping[str, Aggregator] = MappingProxyType({"mean": mean})
"""Rules by their name in `outer.aggregation`."""
