"""The codecs with one scale a block: int8, int4, nf4, e3m0. Level 2.

Message: the scales of all blocks (bf16), then the codes of all tensors, each tensor starting at a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.blocked import BlockedKernels
from dilocox.outer.codec.compiled import CompiledKernels
from dilocox.outer.codec.formats import Format
from dilocox.outer.codec.kernels import Kernels
from dilocox.outer.codec.noise import Noise
from dilocox.outer.codec.sizes import SCALE_BYTES, num_blocks


class BlockCodec(Codec):
    """Absmax blocks with a format's codes.

    A tensor's last block may be short and is sent short. Encoding depends on nothing but the values and
    the block grid, so replicas of a weight stay bit-identical wherever their blocks are encoded.

    Args:
        form: what the codes mean.
        block_size: values that share one scale; a multiple of 8.
        noise: stochastic rounding; None = nearest.
        kernels: for tests and benchmarks; default: the fastest that the tensors' device has.
    """

    def __init__(
        self, form: Format, block_size: int, noise: Noise | None = None, kernels: Kernels | None = None
    ) -> None:
        if block_size % 8:
            raise ValueError(f"block_size must be a multiple of 8, got {block_size}")
        self.name = form.name
        self.block_size = block_size
        self.form = form
        self._noise = noise
        self._fixed = kernels
        self._by_device: dict[str, Kernels] = {}

    def encode_into(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """See `Codec.encode_into`."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        self._check_length(message, [tensor.numel() for tensor in flat])
        for rows, scales, payload in self._regions(message, flat):
            self._kernels(rows).encode(rows, scales, payload, self._noise)

    def decode_into(self, message: Tensor, outputs: Sequence[Tensor]) -> None:
        """See `Codec.decode_into`."""
        flat = [tensor.view(-1) for tensor in outputs]
        self._check_length(message, [tensor.numel() for tensor in flat])
        for rows, scales, payload in self._regions(message, flat):
            self._kernels(rows).decode(scales, payload, rows)

    def reseed(self, seed: int) -> None:
        """See `Codec.reseed`."""
        if self._noise is not None:
            self._noise.reseed(seed)

    def _regions(self, message: Tensor, flat: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows, their scales, their payload): the whole blocks of each tensor, then its short last block."""
        size = self.block_size
        total = sum(num_blocks(tensor.numel(), size) for tensor in flat)
        scales = message[: SCALE_BYTES * total].view(torch.bfloat16)
        payload = message[SCALE_BYTES * total :]
        block = byte = 0
        for tensor in flat:
            whole = tensor.numel() // size * size
            for part, width in ((tensor[:whole], size), (tensor[whole:], tensor.numel() - whole)):
                if part.numel():
                    rows = part.view(-1, width)
                    num_bytes = -(-part.numel() * self.form.bits // 8)
                    yield rows, scales[block : block + len(rows)], payload[byte : byte + num_bytes]
                    block += len(rows)
                    byte += num_bytes

    def _kernels(self, rows: Tensor) -> Kernels:
        if self._fixed is not None:
            return self._fixed
        kind = rows.device.type
        if kind not in self._by_device:
            self._by_device[kind] = _build_kernels(self.form, kind)
        return self._by_device[kind]


def _build_kernels(form: Format, device_type: str) -> Kernels:
    """The fastest kernels on a kind of device."""
    if device_type == "cpu":
        return BlockedKernels(form)
    if device_type == "cuda" and form.name == "int4":
        from dilocox.outer.codec.triton_int4 import TritonInt4Kernels  # only CUDA hosts need triton

        return TritonInt4Kernels()
    return CompiledKernels(form)
