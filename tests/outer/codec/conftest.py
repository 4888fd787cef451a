"""Inputs that codecs find hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def hard_inputs() -> dict[str, Tensor]:
    """Name -> fp32 tensor; sizes around block borders, values around the borders of fp32."""
    torch.manual_seed(0)
    spread = torch.randn(4097) * torch.rand(4097).pow(20)
    return {
        "gaussian": torch.randn(4097),
        "tiny": torch.randn(4095) * 1e-8,
        "subnormal": torch.randn(129) * 1e-40,
        "mixed subnormal": torch.cat((torch.full((64,), 2.0**-126 * 7), torch.full((64,), 2.0**-127))),
        "huge": torch.randn(130) * 1e37,
        "heavy tails": spread,
        "zeros": torch.zeros(200),
        "one outlier": torch.cat((torch.full((63,), 1e-6), torch.tensor([1.0]))),
        "one": torch.tensor([-3.0]),
        "two": torch.tensor([1e-30, -1e-30]),
        "empty": torch.empty(0),
        "ties": torch.arange(-14, 15).repeat(9) / 2,
        "powers": torch.tensor([2.0**-k for k in range(10)] + [1.5 * 2.0**-k for k in range(10)]),
        "large": torch.randn(300_001) * 1e-3,
    }


@pytest.fixture(params=sorted(hard_inputs()))
def hard_input(request: pytest.FixtureRequest) -> Tensor:
    return hard_inputs()[request.param]
