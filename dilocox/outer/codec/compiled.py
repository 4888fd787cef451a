"""The twin fused by torch.compile: for CUDA and formats without a kernel of their own. Level 2.

Compiled once for all numbers of blocks (the number is a symbol), at the first tensor that is large enough.
Without a working compiler the eager twin is used, with one warning, and each such call is counted.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from dilocox.outer.codec.formats import Format
from dilocox.outer.codec.kernels import TwinKernels, decode_rows, encode_rows
from dilocox.outer.codec.noise import Noise

WORTH_COMPILING = 1 << 22
"""Values of a tensor from which compiling pays; smaller tensors use the eager twin."""

P = ParamSpec("P")
R = TypeVar("R")


class Fused(Generic[P, R]):
    """A function under torch.compile, or the eager one if that fails.

    Attributes:
        num_fallbacks: calls that ran eagerly because compiling had failed.
    """

    def __init__(self, eager: Callable[P, R]) -> None:
        self._eager = eager
        # dynamic=True: the number of blocks is a symbol, so fragments of every size share one kernel.
        self._compiled: Callable[P, R] | None = torch.compile(eager, dynamic=True, fullgraph=True)
        self._lock = threading.Lock()
        self.num_fallbacks = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            if self._compiled is not None:
                try:
                    return self._compiled(*args, **kwargs)
                # Errors of dynamo, inductor and the C++ compiler derive from it.
                except RuntimeError as error:
                    self._compiled = None
                    first_line = (str(error).splitlines() or [type(error).__name__])[0]
                    warnings.warn(
                        f"codec: torch.compile failed, continuing uncompiled: {first_line}", stacklevel=2
                    )
            self.num_fallbacks += 1
        return self._eager(*args, **kwargs)


class CompiledKernels:
    """torch.compile of the twin.

    Args:
        form: format of the codes.
        threshold: values from which the compiled function is used.

    Attributes:
        num_fallbacks: calls above the threshold that ran eagerly because compiling had failed.
    """

    def __init__(self, form: Format, threshold: int = WORTH_COMPILING) -> None:
        self._twin = TwinKernels(form)
        self._threshold = threshold

        def encode(rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
            return encode_rows(rows, noise, form)

        def decode(scales: Tensor, payload: Tensor) -> Tensor:
            return decode_rows(scales, payload.view(-1), form)

        self._encode = Fused(encode)
        self._decode = Fused(decode)

    @property
    def num_fallbacks(self) -> int:
        """See the class."""
        return self._encode.num_fallbacks + self._decode.num_fallbacks

    def encode(self, rows: Tensor, scales: Tensor, payload: Tensor, noise: Noise | None) -> None:
        """See `Kernels.encode`."""
        if rows.shape[0] == 1 or rows.numel() < self._threshold:
            self._twin.encode(rows, scales, payload, noise)
            return
        drawn = noise.draw(rows.numel()).view(rows.shape).to(rows.device) if noise else None
        made_scales, made_payload = self._encode(_one_width(rows), drawn)
        scales.copy_(made_scales)
        payload.copy_(made_payload)

    def decode(self, scales: Tensor, payload: Tensor, rows: Tensor) -> None:
        """See `Kernels.decode`."""
        if rows.shape[0] == 1 or rows.numel() < self._threshold:
            self._twin.decode(scales, payload, rows)
            return
        rows.copy_(self._decode(scales, _one_width(payload.view(len(scales), -1))))


def _one_width(rows: Tensor) -> Tensor:
    """Tells the compiler that only the number of rows changes between calls."""
    torch._dynamo.mark_static(rows, 1)
    return rows
