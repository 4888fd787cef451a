"""Payload bytes of one averaging pass, by collective strategy. Level 2, integers only, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dilocox.outer.codec.grid import BlockGrid, part_grids, partition
from dilocox.outer.codec.registry import CodecEntry
from dilocox.outer.codec.sizes import HEADER_BYTES


@dataclass(frozen=True)
class WireCodecs:
    """The codecs of one averaging pass.

    Attributes:
        codec: of the scatter half, and of the swap at two islands.
        gather: of the gather half.
        block_size: values that share one scale.
    """

    codec: CodecEntry
    gather: CodecEntry
    block_size: int


def allreduce_bytes(
    codecs: WireCodecs, grids: Sequence[BlockGrid], *, num_islands: int, index: int = 0
) -> int:
    """Returns the payload bytes, headers included, that the island at `index` sends in one averaging pass.

    Args:
        codecs: how the values are encoded.
        grids: of the tensors averaged.
        num_islands: members of the sync, all with a weight above 0.
        index: position of the island; parts differ by a block at most.
    """
    if num_islands == 1:
        return 0
    return _STRATEGIES[codecs.codec.collective](codecs, grids, num_islands, index)


def _dense(codecs: WireCodecs, grids: Sequence[BlockGrid], num_islands: int, index: int) -> int:
    """Bytes of whole messages for two islands, of two shots for more."""
    block_size = codecs.block_size
    if num_islands == 2:
        return HEADER_BYTES + codecs.codec.num_bytes(grids, block_size)
    parts = [part_grids(grids, slices) for slices in partition(grids, block_size, num_islands)]
    scatter = sum(
        HEADER_BYTES + codecs.codec.num_bytes(part, block_size)
        for owner, part in enumerate(parts)
        if owner != index
    )
    gather = HEADER_BYTES + codecs.gather.num_bytes(parts[index], block_size)
    return scatter + (num_islands - 1) * gather


_STRATEGIES: Mapping[str, Callable[[WireCodecs, Sequence[BlockGrid], int, int], int]] = MappingProxyType(
    {"dense": _dense}
)
