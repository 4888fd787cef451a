"""`none` and `bf16`: values as they are, or cast. Level 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CodecEntry


class CastCodec(Codec):
    """Sends each value in a floating-point type; no scales.

    Args:
        entry: of `none` (fp32, exact) or `bf16` (8 bits of mantissa, rounded to nearest).
        block_size: has no effect on the codes; parts are split at multiples of it.
        dtype: of a value in the message.
    """

    def __init__(self, entry: CodecEntry, block_size: int, dtype: torch.dtype) -> None:
        super().__init__(entry, block_size)
        self._dtype = dtype

    def encode_into(self, tensors: Sequence[Tensor], grids: Sequence[BlockGrid], message: Tensor) -> None:
        """See `Codec.encode_into`."""
        self.check_length(message, grids)
        values = message.view(self._dtype)
        first = 0
        for tensor, grid in zip(tensors, grids, strict=True):
            values[first : first + grid.numel].copy_(tensor.reshape(-1))
            first += grid.numel

    def decode_into(self, message: Tensor, grids: Sequence[BlockGrid], outputs: Sequence[Tensor]) -> None:
        """See `Codec.decode_into`."""
        self.check_length(message, grids)
        values = message.view(self._dtype)
        first = 0
        for tensor, grid in zip(outputs, grids, strict=True):
            tensor.view(-1).copy_(values[first : first + grid.numel])
            first += grid.numel


def build(entry: CodecEntry, block_size: int, rounding: str) -> CastCodec:
    """See `CodecEntry.build`; `none` is exact and `bf16` always rounds to nearest."""
    dtype = {"none": torch.float32, "bf16": torch.bfloat16}[entry.name]
    return CastCodec(entry, block_size, dtype)
