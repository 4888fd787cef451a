"""The codecs with one scale per block: int8, int4, nf4, e3m0. Level 2.

Message: the scales of all blocks (bf16), then the codes of all tensors, each tensor starting at a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.blocked import BlockedKernels
from dilocox.outer.codec.compiled import CompiledKernels
from dilocox.outer.codec.formats import Format, build_format
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.irregular import PaddedKernels
from dilocox.outer.codec.kernels import Kernels
from dilocox.outer.codec.noise import Noise
from dilocox.outer.codec.registry import CodecEntry
from dilocox.outer.codec.sizes import SCALE_BYTES, ScaledSizes


class BlockCodec(Codec):
    """Absmax blocks with a format's codes.

    A short block is sent without padding. Codes depend only on the values and the blocks, so replicas of a
    weight stay bit-identical wherever their blocks are encoded.

    Args:
        entry: name, wire id and sizes; its sizes must be those of the format.
        form: format of the codes.
        block_size: values that share one scale; a multiple of 8.
        noise: stochastic rounding; None = nearest.
        kernels: for tests and benchmarks; default: the fastest for the device of the tensors.
    """

    def __init__(
        self,
        entry: CodecEntry,
        form: Format,
        *,
        block_size: int,
        noise: Noise | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        if block_size % 8:
            raise ValueError(f"block_size must be a multiple of 8, got {block_size}")
        super().__init__(entry, block_size)
        self.form = form
        self._sizes = ScaledSizes(form.bits)
        self._noise = noise
        self._fixed = kernels
        self._by_device: dict[str, Kernels] = {}

    @property
    def num_fallbacks(self) -> int:
        """See `Codec.num_fallbacks`."""
        served = list(self._by_device.values()) if self._fixed is None else [self._fixed]
        return sum(kernels.num_fallbacks for kernels in served)

    def encode_into(self, tensors: Sequence[Tensor], grids: Sequence[BlockGrid], message: Tensor) -> None:
        """See `Codec.encode_into`."""
        self.check_length(message, grids)
        for tensor, grid, scales, payload in self._parts(message, tensors, grids):
            values = tensor.reshape(-1)
            kernels = self._kernels(values.device.type)
            if not grid.is_regular(self.block_size):
                padded = PaddedKernels(kernels, grid, self.block_size, self.form.bits)
                padded.encode(values, scales, payload, self._noise)
                continue
            for rows, row_scales, row_payload in self._regions(values, scales, payload):
                kernels.encode(rows, row_scales, row_payload, self._noise)

    def decode_into(self, message: Tensor, grids: Sequence[BlockGrid], outputs: Sequence[Tensor]) -> None:
        """See `Codec.decode_into`."""
        self.check_length(message, grids)
        for tensor, grid, scales, payload in self._parts(message, outputs, grids):
            values = tensor.view(-1)
            kernels = self._kernels(values.device.type)
            if not grid.is_regular(self.block_size):
                PaddedKernels(kernels, grid, self.block_size, self.form.bits).decode(scales, payload, values)
                continue
            for rows, row_scales, row_payload in self._regions(values, scales, payload):
                kernels.decode(row_scales, row_payload, rows)

    def reseed(self, seed: int) -> None:
        """See `Codec.reseed`."""
        if self._noise is not None:
            self._noise.reseed(seed)

    def _parts(
        self, message: Tensor, tensors: Sequence[Tensor], grids: Sequence[BlockGrid]
    ) -> Iterator[tuple[Tensor, BlockGrid, Tensor, Tensor]]:
        """Yields (tensor, grid, its scales, its payload) of every tensor that has values."""
        num_blocks = [grid.num_blocks(self.block_size) for grid in grids]
        split = SCALE_BYTES * sum(num_blocks)
        scales, payload = message[:split].view(torch.bfloat16), message[split:]
        block = byte = 0
        for tensor, grid, count in zip(tensors, grids, num_blocks, strict=True):
            num_bytes = self._sizes.code_bytes(grid.numel)
            if grid.numel:
                yield tensor, grid, scales[block : block + count], payload[byte : byte + num_bytes]
            block += count
            byte += num_bytes

    def _regions(
        self, values: Tensor, scales: Tensor, payload: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (rows, their scales, their payload): whole blocks first, then the short last block."""
        num_whole, short = divmod(values.numel(), self.block_size)
        whole = values.numel() - short
        split = self._sizes.code_bytes(whole)
        if whole:
            yield values[:whole].view(-1, self.block_size), scales[:num_whole], payload[:split]
        if short:
            yield values[whole:].view(1, short), scales[num_whole:], payload[split:]

    def _kernels(self, device_type: str) -> Kernels:
        if self._fixed is not None:
            return self._fixed
        if device_type not in self._by_device:
            self._by_device[device_type] = serve_kernels(self.form, device_type)
        return self._by_device[device_type]


def build(entry: CodecEntry, block_size: int, rounding: str) -> BlockCodec:
    """See `CodecEntry.build`."""
    noise = Noise(0) if rounding == "stochastic" else None
    return BlockCodec(entry, build_format(entry.name), block_size=block_size, noise=noise)


def serve_kernels(form: Format, device_type: str) -> Kernels:
    """Returns the fastest kernels for a type of device."""
    if device_type == "cpu":
        return BlockedKernels(form)
    if device_type == "cuda" and form.name == "int4":
        # Here and not above: only CUDA hosts have triton.
        from dilocox.outer.codec.triton_int4 import TritonInt4Kernels

        return TritonInt4Kernels()
    return CompiledKernels(form)
