"""One bf16 scale per block, rounded up. Level 2.

Why not fp16: late in training pseudo-gradients of 1e-8 are real, and fp16 ends at 6e-8. bf16 has the range
of fp32, and its eight bits are enough because codes are made with the scale *as stored*: rounding it
costs at most 2^-7 of resolution and no bias. Rounding up keeps every code within the format's limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-126
"""Smallest normal fp32. Blocks whose scale is below it are sent as zeros: 1 / scale would overflow."""


def block_scales(absmax: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns scales with which the largest value of a block maps to `limit`.

    Only operations that every device rounds alike, so that all islands make equal codes.

    Args:
        absmax: fp32 [num_blocks], largest magnitude of each block.
        limit: largest magnitude that a code stands for.

    Returns: scales bf16 [num_blocks], and their reciprocals fp32 [num_blocks] (0 for scale 0).
    """
    wanted = absmax * (1.0 / limit)
    wanted = torch.where(wanted < SMALLEST, 0.0, wanted)  # NaN stays NaN
    bits = (wanted.view(torch.int32) + 0xFFFF) >> 16
    scales = (bits << 16).view(torch.float32)
    inverse = torch.where(scales == 0, 0.0, scales.reciprocal())
    return bits.to(torch.int16).view(torch.bfloat16), inverse
