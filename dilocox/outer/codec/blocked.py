"""The CPU's fast path: the twin in chunks that stay in the cache, on preallocated buffers. Level 2.

Every step is one vectorised torch operation over a chunk, so memory is read and written once. Nothing is
compiled: the first sync is as fast as the last. On the machines in `benchmarks/results/` it is faster than
the twin under torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.outer.codec.formats import Format, Uniform
from dilocox.outer.codec.kernels import Kernels, TwinKernels
from dilocox.outer.codec.noise import Noise
from dilocox.outer.codec.scales import block_scales

_CHUNK_VALUES = 1 << 19
"""Values per chunk and thread: few enough for the cache, enough to make waking the threads cheap."""


class BlockedKernels:
    """Cache-blocked kernels for the CPU; the same bits as the twin."""

    num_fallbacks = 0

    def __init__(self, form: Format) -> None:
        self._form = form
        self._twin: Kernels = TwinKernels(form)
        self._pairs = _pair_table(form.table) if form.table is not None else None

    def encode(self, rows: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """See `Kernels.encode`.

        Memory: nine bytes per value of one chunk.
        """
        if rows.shape[1] % 2:
            self._twin.encode(rows, scales, payload, noise)
            return
        for first, last, scratch in _chunks(rows):
            chunk = rows[first:last]
            torch.abs(chunk, out=scratch.floats)
            made, inverse = block_scales(scratch.floats.amax(dim=1), self._form.limit)
            scales[first:last].copy_(made)
            torch.mul(chunk, inverse.unsqueeze(1), out=scratch.floats)
            drawn = noise.draw(chunk.numel()) if noise else None
            self._encode_codes(scratch, drawn, self._part(payload, rows, first, last))

    def decode(self, scales: Tensor, payload: Tensor, rows: Tensor) -> None:
        """See `Kernels.decode`."""
        if rows.shape[1] % 2:
            self._twin.decode(scales, payload, rows)
            return
        for first, last, scratch in _chunks(rows):
            chunk = rows[first:last]
            self._decode_codes(self._part(payload, rows, first, last), chunk.view(-1), scratch)
            chunk.mul_(scales[first:last].to(torch.float32).unsqueeze(1))

    def _part(self, payload: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        """Returns the bytes of rows [first, last)."""
        row_bytes = rows.shape[1] * self._form.bits // 8
        return payload[first * row_bytes : last * row_bytes]

    def _encode_codes(self, scratch: _Scratch, noise: Tensor | None, payload: Tensor) -> None:
        codes = payload if self._form.bits == 8 else scratch.codes
        self._form.codes_into(scratch.floats.view(-1), noise, codes, scratch.spare)
        if self._form.bits == 4:
            # Two codes as one little-endian word 0x0H0L; its byte HL is the low byte of w | w >> 4.
            words = codes.view(torch.int16)
            shifted = torch.bitwise_right_shift(
                words, 4, out=scratch.spare.view(torch.int16)[: words.numel()]
            )
            payload.copy_(words.bitwise_or_(shifted))

    def _decode_codes(self, payload: Tensor, values: Tensor, scratch: _Scratch) -> None:
        if self._pairs is not None:
            index = scratch.spare[: payload.numel()].copy_(payload)
            if values.storage_offset() % 2 == 0:
                torch.index_select(self._pairs, 0, index, out=values.view(torch.int64))
            else:
                # A view that starts between two pairs: an int64 view of it would not be aligned.
                values.copy_(torch.index_select(self._pairs, 0, index).view(torch.float32))
            return
        assert isinstance(self._form, Uniform)
        if self._form.bits == 4:
            words = scratch.codes.view(torch.int16).copy_(payload)
            shifted = scratch.spare.view(torch.int16)[: words.numel()]
            torch.bitwise_left_shift(words, 4, out=shifted)
            words.bitwise_or_(shifted).bitwise_and_(0x0F0F)
            payload = scratch.codes
        self._form.values_into(payload, values)


@dataclass(frozen=True)
class _Scratch:
    """Buffers of one chunk, allocated once: new memory costs more than the arithmetic.

    Attributes:
        floats: fp32 [rows, values of a block].
        spare: int32 [values].
        codes: uint8 [values].
    """

    floats: Tensor
    spare: Tensor
    codes: Tensor

    def of(self, num_rows: int) -> _Scratch:
        """Returns views of the first rows."""
        values = num_rows * self.floats.shape[1]
        return _Scratch(self.floats[:num_rows], self.spare[:values], self.codes[:values])


def _chunks(rows: Tensor) -> Iterator[tuple[int, int, _Scratch]]:
    """Yields row ranges of about one chunk, each with views of the same buffers."""
    num_rows, width = rows.shape
    step = min(max(1, _CHUNK_VALUES * torch.get_num_threads() // width), num_rows)
    scratch = _Scratch(
        torch.empty(step, width),
        torch.empty(step * width, dtype=torch.int32),
        torch.empty(step * width, dtype=torch.uint8),
    )
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        yield first, last, scratch.of(last - first)


def _pair_table(table: Tensor) -> Tensor:
    """Returns two fp32 levels for each byte, as one 8-byte entry: int64 [256]."""
    codes = torch.arange(256)
    return torch.stack((table[codes & 15], table[codes >> 4]), dim=1).view(torch.int64).view(-1)
