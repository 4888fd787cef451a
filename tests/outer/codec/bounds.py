"""The largest error of one encoding, derived.

Let s be the scale of a block as stored: absmax / limit rounded up to bf16, so at most a factor 1 + 2^-7
larger. Codes are made with s itself, so nearest rounding errs by at most `worst_error` * s:

* int4, int8: half a step, s / 2;
* nf4: half of the widest gap between levels (0.3038 / 2) plus half a cell of the threshold grid;
* e3m0: half of the widest gap, between 1/2 and 1.

x * (1 / s) carries two fp32 roundings, hence a relative 2^-22 on top. Blocks with a scale below 2^-126 are
sent as zeros and lose at most absmax. `none` is exact; `bf16` errs by 2^-9 of each value, or half of its
smallest subnormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.outer.codec.formats import build_format


def error_bound(name: str, block_size: int, x: Tensor) -> Tensor:
    """Bound for each element of a flat tensor that is encoded alone, fp64."""
    if name == "none":
        return torch.zeros(x.numel(), dtype=torch.float64)
    if name == "bf16":
        return x.double().abs() * 2.0**-8 + 2.0**-134
    form = build_format(name)
    padded = torch.nn.functional.pad(x.double().abs(), (0, -x.numel() % block_size))
    absmax = padded.view(-1, block_size).amax(dim=1) if x.numel() else padded.new_zeros(0)
    scale = absmax / form.limit
    bound = form.worst_error * scale * (1 + 2.0**-7) * (1 + 2.0**-20) + absmax * 2.0**-21
    bound = torch.where(scale < 2.0**-126 * (1 + 1e-6), absmax, bound)
    return bound.repeat_interleave(block_size)[: x.numel()]
