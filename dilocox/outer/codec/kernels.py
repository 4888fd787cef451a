"""Rows of blocks to packed codes and scales: the interface, and the plain torch twin. Level 2.

The twin is the definition. `blocked.py` (CPU), `triton_int4.py` (CUDA) and `compiled.py` (torch.compile)
are faster and give the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dilocox.outer.codec.formats import Format
from dilocox.outer.codec.noise import Noise
from dilocox.outer.codec.scales import block_scales


class Kernels(Protocol):
    """Encodes and decodes rows; one row is one block.

    Attributes:
        num_fallbacks: calls that ran uncompiled because compiling had failed.
    """

    @property
    def num_fallbacks(self) -> int: ...

    def encode(self, rows: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """Fills scales and payload.

        Args:
            rows: fp32 [num_blocks, values of a block], contiguous.
            scales: bf16 [num_blocks], written to.
            payload: uint8 [bytes of the codes, row by row], written to.
            noise: for stochastic rounding; None = nearest.
        """

    def decode(self, scales: Tensor, payload: Tensor, rows: Tensor) -> None:
        """Fills rows from scales and payload."""


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs two 4-bit codes per byte, the low nibble first; an odd last code has a byte of its own.

    Args:
        codes: uint8 [numel], values 0..15.

    Returns: uint8 [ceil(numel / 2)].
    """
    if codes.numel() % 2:
        codes = torch.cat((codes, codes.new_zeros(1)))
    return codes[0::2] | (codes[1::2] << 4)


def unpack_nibbles(payload: Tensor, numel: int) -> Tensor:
    """Inverse of `pack_nibbles`. Returns: uint8 [numel]."""
    return torch.stack((payload & 15, payload >> 4), dim=1).view(-1)[:numel]


def encode_rows(rows: Tensor, noise: Tensor | None, form: Format) -> tuple[Tensor, Tensor]:
    """The twin: computes scales, then codes with the scales as stored.

    Args:
        rows: fp32 [num_blocks, values of a block].
        noise: fp32 of the same shape, or None.
        form: format of the codes.

    Returns: scales bf16 [num_blocks], payload uint8.
    """
    scales, inverse = block_scales(rows.abs().amax(dim=1), form.limit)
    codes = form.codes(rows * inverse.unsqueeze(1), noise).view(-1)
    return scales, pack_nibbles(codes) if form.bits == 4 else codes


def decode_rows(scales: Tensor, payload: Tensor, form: Format) -> Tensor:
    """The twin: computes levels times scale.

    Returns: fp32 [num_blocks, values of a block]; the codes of one odd block end with a padding value.
    """
    codes = unpack_nibbles(payload, 2 * payload.numel()) if form.bits == 4 else payload
    return form.values(codes).view(scales.numel(), -1) * scales.to(torch.float32).unsqueeze(1)


class TwinKernels:
    """The plain torch twin, on any device."""

    num_fallbacks = 0

    def __init__(self, form: Format) -> None:
        self._form = form

    def encode(self, rows: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """See `Kernels.encode`."""
        drawn = noise.draw(rows.numel()).view(rows.shape).to(rows.device) if noise else None
        made_scales, made_payload = encode_rows(rows, drawn, self._form)
        scales.copy_(made_scales)
        payload.copy_(made_payload)

    def decode(self, scales: Tensor, payload: Tensor, rows: Tensor) -> None:
        """See `Kernels.decode`."""
        rows.copy_(decode_rows(scales, payload, self._form)[:, : rows.shape[1]])
