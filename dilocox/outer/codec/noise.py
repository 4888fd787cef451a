"""Random numbers for stochastic rounding. Level 2."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LANES = 4
"""16-bit numbers in one draw of 64 bits: a quarter of the draws, and 2^-16 is far below a rounding step."""

_ODD = np.uint64(0x0001_0001_0001_0001)
"""The lowest bit of each lane."""


class Noise:
    """Uniform numbers in (-1/2, 1/2), the same on every device and for every partition of a tensor.

    They are drawn on the CPU, one after another, so equal tensors on two ranks of an island get equal
    noise if both ranks use the same seed and encode tensors of equal sizes in equal order.

    Args:
        seed: different on each island, equal on the ranks of an island.
    """

    def __init__(self, seed: int) -> None:
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Restarts the sequence with this seed."""
        self._bits = np.random.SFC64(seed)  # half the time of torch's Mersenne twister

    def draw(self, numel: int) -> Tensor:
        """Returns: fp32 [numel] on the CPU. Draws in multiples of 4 continue each other exactly."""
        lanes = self._bits.random_raw(-(-numel // _LANES))
        lanes |= _ODD  # odd numbers between -2^15 and 2^15 have mean 0
        return torch.from_numpy(lanes.view(np.int16))[:numel].to(torch.float32).mul_(2.0**-16)
