"""Byte counts of messages and exchanges, and the cut into shards. Level 2, integers only, no torch.

`dilocox plan` predicts the wire with these functions; the codecs and the collective lay out their
messages by them, so that predicted and counted payload bytes are equal, not close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

HEADER_BYTES = 64
"""Length of the header in front of every message, see `wan/header.py`."""

SCALE_BYTES = 2
"""One bf16 scale a block, see `codec/scales.py`."""

CODE_BITS = {"none": 32, "bf16": 16, "int8": 8, "int4": 4, "nf4": 4, "e3m0": 4}
"""Bits of one value's code, by codec name."""

SCALED = frozenset({"int8", "int4", "nf4", "e3m0"})
"""Codecs that send a scale with every block."""


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


def num_blocks(numel: int, block_size: int) -> int:
    """Blocks of a tensor; the last one may be short."""
    return -(-numel // block_size)


def message_bytes(codec: str, block_size: int, numels: Sequence[int]) -> int:
    """Payload of one message, without its header: codes of each tensor rounded up to a byte, and scales."""
    code_bits = CODE_BITS[codec]
    codes = sum(-(-numel * code_bits // 8) for numel in numels)
    if codec not in SCALED:
        return codes
    return codes + SCALE_BYTES * sum(num_blocks(numel, block_size) for numel in numels)


def bits_per_value(codec: str, block_size: int) -> float:
    """Bits of one value in a large tensor, its share of the scale included."""
    scale_bits = 8 * SCALE_BYTES / block_size if codec in SCALED else 0.0
    return CODE_BITS[codec] + scale_bits


def cut_shards(numels: Sequence[int], block_size: int, num_shards: int) -> list[list[Slice]]:
    """Cuts the concatenation of tensors into shards at block boundaries, every element exactly once.

    No padding: shards differ by one block at most and may be empty.
    """
    total = sum(num_blocks(numel, block_size) for numel in numels)
    bounds = [total * shard // num_shards for shard in range(num_shards + 1)]
    shards: list[list[Slice]] = [[] for _ in range(num_shards)]
    first_block = 0
    for tensor, numel in enumerate(numels):
        blocks = num_blocks(numel, block_size)
        for shard in range(num_shards):
            start = max(bounds[shard] - first_block, 0) * block_size
            stop = min((bounds[shard + 1] - first_block) * block_size, numel)
            if start < stop:
                shards[shard].append(Slice(tensor, start, stop))
        first_block += blocks
    return shards


def allreduce_bytes(
    codec: str,
    *,
    gather_codec: str | None = None,
    block_size: int,
    numels: Sequence[int],
    num_islands: int,
    index: int = 0,
) -> int:
    """Payload bytes, headers included, that the island at `index` hands over in one averaging.

    Args:
        codec: codec of the scatter half, and of the swap at two islands.
        gather_codec: codec of the gather half; None = same as `codec`.
        block_size: values that share one scale.
        numels: sizes of the tensors averaged.
        num_islands: members of the round, all with a weight above 0.
        index: position of the island; shards differ by a block at most.
    """
    if num_islands == 1:
        return 0
    if num_islands == 2:
        return HEADER_BYTES + message_bytes(codec, block_size, numels)
    shards = [[shard.numel for shard in shard] for shard in cut_shards(numels, block_size, num_islands)]
    scatter = sum(
        HEADER_BYTES + message_bytes(codec, block_size, shard)
        for owner, shard in enumerate(shards)
        if owner != index
    )
    gather = HEADER_BYTES + message_bytes(gather_codec or codec, block_size, shards[index])
    return scatter + (num_islands - 1) * gather


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether `low_rank` sends two factors for a tensor of this shape; else the tensor goes dense."""
    return len(shape) == 2 and rank * sum(shape) < shape[0] * shape[1]


def low_rank_numels(shapes: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    """Sizes of the tensors that `low_rank` averages in its rounds: [P factors and dense], [Q factors]."""
    first: list[int] = []
    second: list[int] = []
    for shape in shapes:
        if is_low_rank(shape, rank):
            first.append(rank * shape[0])
            second.append(rank * shape[1])
        else:
            first.append(prod(shape))
    return [first, second] if second else [first]
