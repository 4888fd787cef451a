"""Where the anchors of one fragment live. Level 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AnchorStore:
    """fp32 anchors on the device of the weights.

    Everything else reads them through `values` and replaces them through `set`; the outer optimizer steps
    them in place. A store in host memory or in another dtype is another class with the same two members.

    Args:
        initial: fp32, one per shard; copied.
    """

    def __init__(self, initial: Sequence[Tensor]) -> None:
        self._values = [tensor.detach().clone() for tensor in initial]

    @property
    def values(self) -> list[Tensor]:
        """fp32, one per shard; not copies."""
        return self._values

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Replaces the anchors. In place: `values`."""
        for mine, new in zip(self._values, values, strict=True):
            mine.copy_(new)
