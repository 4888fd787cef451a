"""Formats of codes: int4 and int8 (uniform), nf4 and e3m0 (16 levels). Level 2.

A format sees values that are already divided by their block's scale, so they lie in [-limit, limit].
`codes` and `values` are the definition; `codes_into` and `values_into` give the same bits on preallocated
buffers, for the cache-blocked CPU path (`blocked.py`).

Stochastic rounding adds `noise`, uniform in (-1/2, 1/2), in units of the distance between levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

_ROUNDER = 1.5 * 2.0**23
"""Adding it to a small fp32 leaves the nearest integer (ties to even) in the low mantissa bits."""

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, arXiv 2305.14314)."""

NF4_GRID = 2048
"""nf4 thresholds are rounded to 1 / NF4_GRID: nearest level by one table look-up."""

_E3M0_EXPONENT = 120
"""Exponent field of 2^-7: code c in 1..7 stands for 2^(c - 7)."""


class Format(ABC):
    """Codes of `bits` bits for values in [-limit, limit].

    Attributes:
        table: the 16 levels by code, or None where a code is an offset integer.
        worst_error: largest error of nearest rounding, in units of the scale as stored.
    """

    name: str
    bits: int
    limit: float
    table: Tensor | None
    worst_error: float

    @abstractmethod
    def codes(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Returns: uint8 codes of the shape of scaled (fp32)."""

    @abstractmethod
    def codes_into(self, scaled: Tensor, noise: Tensor | None, codes: Tensor, spare: Tensor) -> None:
        """Writes `codes` without allocation where rounding is to nearest.

        In place: `scaled` is destroyed, and `spare`, int32 of its size, is for intermediate values.
        """

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """Returns: fp32 levels of the codes, to be multiplied by the scale."""


class Uniform(Format):
    """Integers -limit..limit, sent with an offset of 2^(bits-1)."""

    table = None
    worst_error = 0.5

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        self.bits = bits
        self.limit = float(2 ** (bits - 1) - 1)
        self._offset = float(2 ** (bits - 1))

    def codes(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the nearest integers, ties to even."""
        if noise is not None:
            scaled = scaled + noise
        integers = torch.round(torch.clamp(scaled, -self.limit, self.limit))
        return (integers + self._offset).to(torch.uint8)

    def codes_into(self, scaled: Tensor, noise: Tensor | None, codes: Tensor, spare: Tensor) -> None:
        """Rounds with one addition; the low byte of the sum is the code."""
        if noise is not None:
            scaled.add_(noise).clamp_(-self.limit, self.limit)
        # Without noise |scaled| <= limit + 1e-6, because scales are rounded up.
        codes.copy_(scaled.add_(_ROUNDER + self._offset).view(torch.int32))

    def values(self, codes: Tensor) -> Tensor:
        """Returns the integers."""
        return codes.to(torch.float32) - self._offset

    def values_into(self, codes: Tensor, values: Tensor) -> None:
        """Writes `values` without allocation."""
        # As signed bytes where they fit: that conversion is vectorised on every CPU.
        values.copy_(codes.view(torch.int8) if self.bits == 4 else codes)
        values.sub_(self._offset)


class NormalFloat4(Format):
    """nf4: 16 quantiles of a normal distribution."""

    name = "nf4"
    bits = 4
    limit = 1.0
    worst_error = (1.0 - 0.6961928009986877) / 2 + 0.5 / NF4_GRID

    def __init__(self) -> None:
        self.table: Tensor = torch.tensor(NF4_LEVELS)
        thresholds = (self.table[1:] + self.table[:-1]) / 2
        grid = torch.arange(-NF4_GRID, NF4_GRID + 1) / NF4_GRID
        # Indexed by the low bits of a rounded float: the table covers all of them, so NaN stays inside.
        self._nearest = torch.zeros(4 * NF4_GRID, dtype=torch.uint8)
        self._nearest[: len(grid)] = torch.bucketize(grid, thresholds).to(torch.uint8)

    def codes(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the nearest levels, up to the grid of thresholds; with noise one of two neighbours."""
        if noise is not None:
            return self._stochastic(scaled, noise)
        grid = (scaled * NF4_GRID + (_ROUNDER + NF4_GRID)).view(torch.int32) & (4 * NF4_GRID - 1)
        return self._nearest.to(scaled.device)[grid]

    def codes_into(self, scaled: Tensor, noise: Tensor | None, codes: Tensor, spare: Tensor) -> None:
        """Looks levels up on a preallocated buffer."""
        if noise is not None:
            codes.copy_(self._stochastic(scaled, noise))
            return
        scaled.mul_(NF4_GRID).add_(_ROUNDER + NF4_GRID)
        grid = scaled.view(torch.int32).bitwise_and_(4 * NF4_GRID - 1)
        torch.index_select(self._nearest, 0, grid, out=codes)

    def values(self, codes: Tensor) -> Tensor:
        """Returns levels by table."""
        return self.table.to(codes.device)[codes.to(torch.int32)]

    def _stochastic(self, scaled: Tensor, noise: Tensor) -> Tensor:
        table = self.table.to(scaled.device)
        below = torch.bucketize(scaled, table, right=True, out_int32=True).sub_(1).clamp_(0, 14)
        lower, upper = table[below], table[below + 1]
        up = (scaled - lower) > (upper - lower) * (noise + 0.5)
        return (below + up).to(torch.uint8)


class E3M0(Format):
    """FP4 of Streaming DiLoCo (arXiv 2501.18512): sign and 3 exponent bits; 0 and +-2^-6 ... +-1.

    The paper publishes neither scale nor rounding; docs/algorithms.md#e3m0 has those chosen here.
    """

    name = "e3m0"
    bits = 4
    limit = 1.0
    worst_error = 0.25

    def __init__(self) -> None:
        levels = [0.0] + [2.0 ** (code - 7) for code in range(1, 8)]
        self.table: Tensor = torch.tensor(levels + [-level if level else 0.0 for level in levels])

    def codes(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the nearest levels: adding half a mantissa rounds the exponent at 1.5 * 2^k."""
        bits = scaled.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        if noise is None:
            exponent = ((magnitude + (1 << 22)) >> 23) - _E3M0_EXPONENT
            nonzero = magnitude > (_E3M0_EXPONENT << 23)  # above 2^-7, halfway to the smallest level
            code = torch.maximum(exponent.clamp(0, 7), nonzero.to(torch.int32))
        else:
            code = self._stochastic(magnitude, noise)
        return (code | ((bits >> 28) & 8)).to(torch.uint8)

    def codes_into(self, scaled: Tensor, noise: Tensor | None, codes: Tensor, spare: Tensor) -> None:
        """Uses bit operations on the buffer of `scaled`."""
        if noise is not None:
            codes.copy_(self.codes(scaled, noise))
            return
        bits = scaled.view(torch.int32)
        codes.copy_(torch.bitwise_right_shift(bits, 28, out=spare).bitwise_and_(8))
        bits.bitwise_and_(0x7FFFFFFF)
        # 1 above 2^-7 and 0 elsewhere: the sign bit of a difference.
        torch.mul(bits, -1, out=spare).add_(_E3M0_EXPONENT << 23).bitwise_right_shift_(31).neg_()
        bits.add_(1 << 22).bitwise_right_shift_(23).sub_(_E3M0_EXPONENT).clamp_(0, 7)
        torch.maximum(bits, spare, out=bits)
        codes.copy_(bits.bitwise_or_(spare.copy_(codes)))

    def values(self, codes: Tensor) -> Tensor:
        """Returns levels by table."""
        return self.table.to(codes.device)[codes.to(torch.int32)]

    def _stochastic(self, magnitude: Tensor, noise: Tensor) -> Tensor:
        """Adds random bits below the exponent: the carry happens with the probability of the mantissa."""
        uniform = noise + 0.5
        carried = (magnitude + (uniform * 2.0**23).to(torch.int32)) >> 23
        exponent = (carried - _E3M0_EXPONENT).clamp(1, 7)
        below = magnitude < ((_E3M0_EXPONENT + 1) << 23)  # under the smallest level, 2^-6
        up = magnitude.view(torch.float32) * 64.0 > uniform
        return torch.where(below, up.to(torch.int32), exponent)


def build_format(name: str) -> Format:
    """Returns the format of a codec that sends scales."""
    match name:
        case "int4":
            return Uniform("int4", 4)
        case "int8":
            return Uniform("int8", 8)
        case "nf4":
            return NormalFloat4()
        case "e3m0":
            return E3M0()
        case _:
            raise ValueError(f"no block format is called {name!r}")
