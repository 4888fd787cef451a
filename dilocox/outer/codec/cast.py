"""`none` and `bf16`: values as they are, or cast. Level 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.outer.codec.base import Codec


class CastCodec(Codec):
    """Sends each value in a floating-point type; no scales.

    Args:
        name: `none` (fp32, exact) or `bf16` (8 bits of mantissa, rounded to nearest).
        block_size: only where shards are cut.
    """

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.block_size = block_size
        self._dtype = {"none": torch.float32, "bf16": torch.bfloat16}[name]

    def encode_into(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """See `Codec.encode_into`."""
        self._check_length(message, [tensor.numel() for tensor in tensors])
        values = message.view(self._dtype)
        first = 0
        for tensor in tensors:
            values[first : first + tensor.numel()].copy_(tensor.reshape(-1))
            first += tensor.numel()

    def decode_into(self, message: Tensor, outputs: Sequence[Tensor]) -> None:
        """See `Codec.decode_into`."""
        self._check_length(message, [tensor.numel() for tensor in outputs])
        values = message.view(self._dtype)
        first = 0
        for tensor in outputs:
            tensor.view(-1).copy_(values[first : first + tensor.numel()])
            first += tensor.numel()
