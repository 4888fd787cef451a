"""Block scales: bf16, rounded up, safe at both ends of fp32."""

from __future__ import annotations

import torch

from dilocox.outer.codec.scales import SMALLEST, block_scales


def test_scales_are_rounded_up_by_at_most_one_part_in_128():
    absmax = torch.logspace(-36, 36, 10_001)
    scales, inverse = block_scales(absmax, 7.0)
    wanted = absmax.double() / 7
    ratio = scales.double() / wanted
    assert (ratio >= 1 - 1e-7).all()
    assert (ratio <= 1 + 2.0**-7).all()
    assert torch.equal(inverse, 1 / scales.float())


def test_pseudo_gradients_of_1e_8_have_a_scale():
    scales, _ = block_scales(torch.tensor([1e-8, 1e-20, 1e-37]), 7.0)
    assert (scales > 0).all()


def test_zero_and_what_has_no_reciprocal_become_zero():
    scales, inverse = block_scales(torch.tensor([0.0, 1e-45, 7 * SMALLEST * 0.99]), 7.0)
    assert scales.tolist() == [0, 0, 0]
    assert inverse.tolist() == [0, 0, 0]


def test_non_finite_blocks_stay_visible():
    scales, _ = block_scales(torch.tensor([float("nan"), float("inf")]), 7.0)
    assert scales[0].isnan()
    assert scales[1].isinf()
