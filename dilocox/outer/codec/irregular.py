"""Blocks of unequal length: rows that are not a multiple of the block, or a start inside a block. Level 2.

Each block is padded to the full length and encoded by the same kernels as all others; the codes of the
padding are removed, so no padding crosses the wire. Slower than the regular path by a few copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.kernels import Kernels, pack_nibbles, unpack_nibbles
from dilocox.outer.codec.noise import Noise


class PaddedKernels:
    """Kernels for one tensor of an irregular grid.

    Memory: about three fp32 copies of the tensor.

    Args:
        kernels: for blocks of equal length.
        grid: of the tensor.
        block_size: length of a whole block.
        bits: of one code, 4 or 8.
    """

    def __init__(self, kernels: Kernels, grid: BlockGrid, block_size: int, bits: int) -> None:
        self._kernels = kernels
        self._grid = grid
        self._block_size = block_size
        self._bits = bits

    def encode(self, values: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """Fills scales and payload from fp32 [numel]; the zeros of the padding change no scale."""
        rows = to_blocks(values, self._grid, self._block_size)
        codes = torch.empty(rows.numel() * self._bits // 8, dtype=torch.uint8, device=rows.device)
        self._kernels.encode(rows, scales, codes, noise)
        if self._bits == 4:
            codes = unpack_nibbles(codes, rows.numel())
        codes = from_blocks(codes.view(rows.shape), self._grid)
        payload.copy_(pack_nibbles(codes) if self._bits == 4 else codes)

    def decode(self, scales: Tensor, payload: Tensor, values: Tensor) -> None:
        """Fills fp32 [numel]."""
        codes = unpack_nibbles(payload, self._grid.numel) if self._bits == 4 else payload
        blocks = to_blocks(codes, self._grid, self._block_size)
        rows = torch.empty(blocks.shape, dtype=torch.float32, device=values.device)
        packed = pack_nibbles(blocks.view(-1)) if self._bits == 4 else blocks.view(-1)
        self._kernels.decode(scales, packed, rows)
        values.copy_(from_blocks(rows, self._grid))


def to_blocks(values: Tensor, grid: BlockGrid, block_size: int) -> Tensor:
    """Puts each block on a row of its own, padded with zeros.

    Args:
        values: [numel].

    Returns: [num_blocks, block_size], contiguous.
    """
    num_rows = -(-(grid.lead + grid.numel) // grid.row)
    whole = pad(values, (grid.lead, num_rows * grid.row - grid.lead - grid.numel))
    blocks = pad(whole.view(num_rows, grid.row), (0, -grid.row % block_size)).view(-1, block_size)
    first = grid.lead // block_size
    return blocks[first : first + grid.num_blocks(block_size)]


def from_blocks(blocks: Tensor, grid: BlockGrid) -> Tensor:
    """Inverse of `to_blocks`. Returns: [numel]."""
    block_size = blocks.shape[1]
    padded_row = grid.row + -grid.row % block_size
    first = grid.lead // block_size
    num_rows = -(-(grid.lead + grid.numel) // grid.row)
    after = num_rows * padded_row // block_size - first - len(blocks)
    whole = pad(blocks, (0, 0, first, after)).view(num_rows, padded_row)[:, : grid.row].reshape(-1)
    return whole[grid.lead : grid.lead + grid.numel]
