"""Codec by name. Level 2."""

from __future__ import annotations

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.block_codec import BlockCodec
from dilocox.outer.codec.cast import CastCodec
from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.noise import Noise


def build_codec(name: str, block_size: int, rounding: str = "nearest", seed: int = 0) -> Codec:
    """Builds the codec that turns tensors into bytes.

    For `low_rank`, which says what is averaged and not how it crosses, build the codec of its factors.

    Args:
        name: none, bf16, int8, int4, nf4 or e3m0.
        block_size: values that share one scale, a multiple of 8.
        rounding: nearest or stochastic; `none` is exact and `bf16` always rounds to nearest.
        seed: of stochastic rounding: equal on the ranks of an island, different between islands.
    """
    if name in ("none", "bf16"):
        return CastCodec(name, block_size)
    noise = Noise(seed) if rounding == "stochastic" else None
    return BlockCodec(build_format(name), block_size, noise)
