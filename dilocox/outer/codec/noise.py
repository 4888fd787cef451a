"""Random numbers for stochastic rounding, from a generator of their own. Level 2."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 4
"""16-bit numbers in one draw of 64 bits: four times fewer draws, and 2^-17 is far below a rounding step."""


class Noise:
    """Uniform numbers in (-1/2, 1/2), the same on every device and however a tensor is cut.

    They are drawn on the CPU, one after another, so equal tensors on two ranks of an island get equal
    noise if both ranks use the same seed and encode tensors of equal sizes in equal order.

    Args:
        seed: different on each island, equal on the ranks of an island.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, numel: int) -> Tensor:
        """Returns: fp32 [numel] on the CPU. Draws in multiples of 4 continue each other exactly."""
        lanes = torch.empty(-(-numel // _LANES), dtype=torch.int64)
        lanes.random_(-(2**63), None, generator=self.generator)
        # k in -2^15 .. 2^15 - 1: (k + 1/2) / 2^16 has mean 0.
        return lanes.view(torch.int16)[:numel].to(torch.float32).add_(0.5).mul_(2.0**-16)
