"""Codecs and grids as tests want them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CODECS

WIRE_CODECS = CODECS.wire_names()
BLOCK_FORMATS = [name for name in WIRE_CODECS if CODECS.get(name).has_blocks]


def build_codec(name: str, block_size: int, rounding: str = "nearest", seed: int = 0) -> Codec:
    """A codec of the registry, with the noise of a seed."""
    codec = CODECS.get(name).build_codec(block_size, rounding)
    codec.reseed(seed)
    return codec


def rows(*numels: int) -> list[BlockGrid]:
    """Grids of tensors that are one row each."""
    return [BlockGrid.of_shape((numel,)) for numel in numels]


def grids_of(tensors: Sequence[Tensor]) -> list[BlockGrid]:
    """Grids of whole tensors."""
    return [BlockGrid.of_shape(tuple(tensor.shape)) for tensor in tensors]


def flat_grids(tensors: Sequence[Tensor]) -> list[BlockGrid]:
    """Grids of tensors of any shape as one row each."""
    return rows(*(tensor.numel() for tensor in tensors))
