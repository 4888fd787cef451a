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

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.irregular import from_blocks, to_blocks


def error_bound(name: str, block_size: int, x: Tensor, grid: BlockGrid | None = None) -> Tensor:
    """Bound for each element of a tensor that is encoded alone, fp64, flat. Default grid: one row."""
    x = x.reshape(-1)
    grid = grid or BlockGrid(x.numel(), max(x.numel(), 1))
    if name == "none":
        return torch.zeros(x.numel(), dtype=torch.float64)
    if name == "bf16":
        return x.double().abs() * 2.0**-8 + 2.0**-134
    form = build_format(name)
    blocks = to_blocks(x.double().abs(), grid, block_size)
    absmax = blocks.amax(dim=1) if x.numel() else blocks.new_zeros(0)
    scale = absmax / form.limit
    bound = form.worst_error * scale * (1 + 2.0**-7) * (1 + 2.0**-20) + absmax * 2.0**-21
    bound = torch.where(scale < 2.0**-126 * (1 + 1e-6), absmax, bound)
    return from_blocks(bound.unsqueeze(1).expand(-1, block_size).contiguous(), grid)


def mean_bound(
    contributions: Sequence[tuple[float, Tensor]],
    *,
    names: tuple[str, str],
    block_size: int,
    grid: BlockGrid,
    carried: Tensor | None = None,
    factor: int = 1,
) -> tuple[Tensor, Tensor]:
    """Exact weighted mean over islands, and the bound of what they average to, both fp64 and flat.

    Each island's encoding errs by its bound, weighted; three islands and more encode the mean again; one
    island encodes nothing.

    Args:
        contributions: (weight, values) of each island.
        names: codecs of the two halves.
        block_size: of both.
        grid: of the values.
        carried: gather residual that the owners add.
        factor: 1 = rounding to nearest, 2 = rounding up or down at random.
    """
    total = sum(weight for weight, _ in contributions)
    mean = sum(weight / total * x.reshape(-1).double() for weight, x in contributions)
    assert isinstance(mean, Tensor)
    bound = torch.zeros_like(mean)
    if len(contributions) > 1:
        for weight, x in contributions:
            bound += factor * weight / total * error_bound(names[0], block_size, x, grid)
    if carried is not None:
        mean = mean + carried.reshape(-1).double()
    if len(contributions) > 2:
        bound += factor * error_bound(names[1], block_size, mean.abs() + bound, grid)
    return mean, bound + 1e-6 * sum(x.reshape(-1).double().abs() for _, x in contributions)
