"""Where the blocks of a tensor lie, and the partition of tensors at blocks. Level 2, integers only.

A block is `block_size` neighbours of one row of the whole parameter. Blocks start at every row and never
cross one, so two layouts cut the same blocks wherever a shard begins and ends at a multiple of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of tensor number `tensor`, flattened."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class BlockGrid:
    """Position of a flattened tensor in the rows that its blocks are cut from.

    Rows are those of the tensor parallel rank's own block, not of the whole parameter. Where the edge between
    two ranks is a multiple of the block size, this makes no difference. Where it is not, counting from the
    own edge gives all ranks equally many blocks: the partition and the noise of stochastic rounding are then
    equal on all of them, which replicated weights need.

    Attributes:
        numel: values of the tensor.
        row: values of a whole row.
        lead: values of the first row that come before the tensor (a flat shard may start inside a row).
    """

    numel: int
    row: int
    lead: int = 0

    def __post_init__(self) -> None:
        if self.numel < 0 or self.row < 1 or not 0 <= self.lead < self.row:
            raise ValueError(f"no such grid: {self.numel} values from {self.lead} in rows of {self.row}")

    @classmethod
    def of_shape(cls, shape: Sequence[int], *, numel: int | None = None, start: int = 0) -> BlockGrid:
        """Returns the grid of `numel` values (default: all) from element `start` of such a tensor."""
        row = max(shape[-1], 1) if shape else 1
        return cls(prod(shape) if numel is None else numel, row, start % row)

    def num_blocks(self, block_size: int) -> int:
        """Returns how many blocks hold a value of the tensor."""
        if self.numel == 0:
            return 0
        return self._block_of(self.numel - 1, block_size) - self._block_of(0, block_size) + 1

    def offset(self, block: int, block_size: int) -> int:
        """Returns the first value of a block, and `numel` where `block` is the number of blocks."""
        if block <= 0:
            return 0
        line, column = divmod(self.lead // block_size + block, -(-self.row // block_size))
        return min(line * self.row + column * block_size - self.lead, self.numel)

    def part(self, start: int, stop: int) -> BlockGrid:
        """Returns the grid of the values [start, stop)."""
        return BlockGrid(stop - start, self.row, (self.lead + start) % self.row)

    def is_regular(self, block_size: int) -> bool:
        """Whether all blocks have `block_size` values, the last one perhaps fewer."""
        if self.num_blocks(block_size) <= 1:
            return True
        one_row = self.lead + self.numel <= self.row
        return self.lead % block_size == 0 and (one_row or self.row % block_size == 0)

    def _block_of(self, element: int, block_size: int) -> int:
        """Returns the block of an element, counted from the start of the first row."""
        line, column = divmod(self.lead + element, self.row)
        return line * -(-self.row // block_size) + column // block_size


def partition(grids: Sequence[BlockGrid], block_size: int, num_parts: int) -> list[list[Slice]]:
    """Splits the concatenation of tensors into parts at block boundaries, every element exactly once.

    Without padding: parts differ by at most one block and may be empty.
    """
    counts = [grid.num_blocks(block_size) for grid in grids]
    bounds = [sum(counts) * part // num_parts for part in range(num_parts + 1)]
    parts: list[list[Slice]] = [[] for _ in range(num_parts)]
    first_block = 0
    for tensor, (grid, count) in enumerate(zip(grids, counts, strict=True)):
        for part in range(num_parts):
            first = max(bounds[part] - first_block, 0)
            last = min(bounds[part + 1] - first_block, count)
            if first < last:
                start, stop = grid.offset(first, block_size), grid.offset(last, block_size)
                parts[part].append(Slice(tensor, start, stop))
        first_block += count
    return parts


def part_grids(grids: Sequence[BlockGrid], slices: Sequence[Slice]) -> list[BlockGrid]:
    """Returns the grids of the slices of one part."""
    return [grids[span.tensor].part(span.start, span.stop) for span in slices]
