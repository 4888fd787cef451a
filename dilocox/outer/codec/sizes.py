"""Byte counts of messages. Level 2, integers only, no torch.

`dilocox plan` predicts payloads with these functions and the codecs lay out their messages by them, so that
predicted and counted payload bytes are exactly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.outer.codec.grid import BlockGrid

HEADER_BYTES = 64
"""Length of the header in front of every message, see `wan/header.py`."""

SCALE_BYTES = 2
"""One bf16 scale per block, see `codec/scales.py`."""


@dataclass(frozen=True)
class CastSizes:
    """Every value in `num_bytes` bytes and nothing else."""

    num_bytes: int

    def __call__(self, grids: Sequence[BlockGrid], block_size: int) -> int:
        """Returns the payload bytes of one message, without its header."""
        return self.num_bytes * sum(grid.numel for grid in grids)


@dataclass(frozen=True)
class ScaledSizes:
    """Codes of `bits` bits, rounded up to a byte per tensor, and a scale per block."""

    bits: int

    def __call__(self, grids: Sequence[BlockGrid], block_size: int) -> int:
        """Returns the payload bytes of one message, without its header."""
        codes = sum(self.code_bytes(grid.numel) for grid in grids)
        return codes + SCALE_BYTES * sum(grid.num_blocks(block_size) for grid in grids)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of one tensor."""
        return -(-numel * self.bits // 8)


def dense_passes(
    shapes: Sequence[Sequence[int]], grids: Sequence[BlockGrid], rank: int
) -> list[list[BlockGrid]]:
    """Returns the grids of the tensors themselves, for one pass."""
    return [list(grids)]


def low_rank_passes(
    shapes: Sequence[Sequence[int]], grids: Sequence[BlockGrid], rank: int
) -> list[list[BlockGrid]]:
    """Returns the grids of the passes of `low_rank`: [P factors and dense tensors], [Q factors].

    Args:
        shapes: of the tensors; a matrix that must be dense is given as a vector.
        grids: of the tensors, used for dense ones. Factors have blocks of their own shape.
        rank: rows of a factor.
    """
    first: list[BlockGrid] = []
    second: list[BlockGrid] = []
    for shape, grid in zip(shapes, grids, strict=True):
        if is_low_rank(shape, rank):
            first.append(BlockGrid.of_shape((rank, shape[0])))
            second.append(BlockGrid.of_shape((rank, shape[1])))
        else:
            first.append(grid)
    return [first, second] if second else [first]


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether `low_rank` sends two factors for a tensor of this shape; else it is sent dense."""
    return len(shape) == 2 and rank * sum(shape) < shape[0] * shape[1]
