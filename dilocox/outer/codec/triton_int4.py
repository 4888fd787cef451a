"""int4 on CUDA: one Triton kernel each way, nearest rounding. Level 2; imported on CUDA hosts only.

Gives the same bits as the twin in `kernels.py`; `tests/outer/codec/test_triton_int4.py` compares them, and is
skipped without a GPU. Three things keep the bits equal: the reciprocal is a correctly rounded division,
fused multiply-add is switched off at launch, and rounding is to nearest even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilocox.outer.codec.formats import Uniform
from dilocox.outer.codec.kernels import TwinKernels
from dilocox.outer.codec.noise import Noise

_ROWS = 32
"""Blocks that one program handles."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no annotations
def _encode_kernel(  # type: ignore[no-untyped-def]
    rows,  # noqa: ANN001
    scales,  # noqa: ANN001
    payload,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program: ROWS blocks; HALF bytes per block, in LANES (a power of 2) lanes."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (block < num_blocks)[:, None] & (lane < HALF)[None, :]
    byte = block[:, None] * HALF + lane[None, :]
    even = tl.load(rows + 2 * byte, mask=inside, other=0.0)
    odd = tl.load(rows + 2 * byte + 1, mask=inside, other=0.0)
    # scales.block_scales: bf16 rounded up; below the smallest normal number the block is zero.
    wanted = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1) * 0.14285714285714285
    wanted = tl.where(wanted < 1.1754943508222875e-38, 0.0, wanted)
    bits = (wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = (bits << 16).to(tl.float32, bitcast=True)
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale == 0.0, 0.0, tl.math.div_rn(one, tl.where(scale == 0.0, one, scale)))
    tl.store(scales + block, bits.to(tl.int16), mask=block < num_blocks)
    # formats.Uniform.codes_into: the sum's low byte is the code with its offset of 8.
    low = (even * inverse[:, None] + 12582920.0).to(tl.int32, bitcast=True) & 15
    high = (odd * inverse[:, None] + 12582920.0).to(tl.int32, bitcast=True) & 15
    tl.store(payload + byte, (low | (high << 4)).to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    scales,  # noqa: ANN001
    payload,  # noqa: ANN001
    rows,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (block < num_blocks)[:, None] & (lane < HALF)[None, :]
    byte = block[:, None] * HALF + lane[None, :]
    codes = tl.load(payload + byte, mask=inside, other=0).to(tl.int32)
    bits = tl.load(scales + block, mask=block < num_blocks, other=0).to(tl.int32) << 16
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(rows + 2 * byte, ((codes & 15) - 8).to(tl.float32) * scale, mask=inside)
    tl.store(rows + 2 * byte + 1, ((codes >> 4) - 8).to(tl.float32) * scale, mask=inside)


class TritonInt4Kernels:
    """int4 kernels on CUDA. Blocks of odd length and stochastic rounding use the twin."""

    num_fallbacks = 0

    def __init__(self) -> None:
        self._twin = TwinKernels(Uniform("int4", 4))

    def encode(self, rows: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """See `Kernels.encode`."""
        if noise is not None or rows.shape[1] % 2:
            self._twin.encode(rows, scales, payload, noise)
            return
        half, lanes, grid = _launch(rows)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _encode_kernel[grid](
                rows,
                scales.view(torch.int16),
                payload,
                rows.shape[0],
                HALF=half,
                LANES=lanes,
                ROWS=_ROWS,
                enable_fp_fusion=False,
            )

    def decode(self, scales: Tensor, payload: Tensor, rows: Tensor) -> None:
        """See `Kernels.decode`."""
        if rows.shape[1] % 2:
            self._twin.decode(scales, payload, rows)
            return
        half, lanes, grid = _launch(rows)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _decode_kernel[grid](
                scales.view(torch.int16), payload, rows, rows.shape[0], HALF=half, LANES=lanes, ROWS=_ROWS
            )


def _launch(rows: Tensor) -> tuple[int, int, tuple[int]]:
    """Bytes of a block, the next power of two, and the number of programs."""
    half = rows.shape[1] // 2
    return half, triton.next_power_of_2(half), (triton.cdiv(rows.shape[0], _ROWS),)
