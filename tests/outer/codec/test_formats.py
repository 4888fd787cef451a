"""Codes against definitions written down independently."""

from __future__ import annotations

import pytest
import torch

from dilocox.outer.codec.formats import NF4_GRID, build_format

FORMATS = ["int4", "int8", "nf4", "e3m0"]


def scaled_values(form):
    return (
        torch.cat((torch.linspace(-1, 1, 20_001), torch.tensor([0.0, 2.0**-7, -(2.0**-7), 1e-30])))
        * form.limit
    )


def levels(form):
    if form.table is not None:
        return form.table
    return torch.arange(-form.limit, form.limit + 1)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_stand_for_the_nearest_level(name):
    form = build_format(name)
    scaled = scaled_values(form)
    error = (form.values(form.codes(scaled, None)) - scaled).abs()
    best = (levels(form).unsqueeze(0) - scaled.unsqueeze(1)).abs().amin(dim=1)
    slack = 1.0 / NF4_GRID if name == "nf4" else 1e-6
    assert (error <= best + slack).all()


@pytest.mark.parametrize("name", FORMATS)
def test_no_error_is_worse_than_stated_and_the_bound_is_tight(name):
    form = build_format(name)
    scaled = scaled_values(form)
    worst = (form.values(form.codes(scaled, None)) - scaled).abs().max()
    assert 0.99 * form.worst_error <= worst <= form.worst_error * (1 + 1e-6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_levels_are_fixed_points(name, stochastic):
    form = build_format(name)
    exact = levels(form).repeat_interleave(50)
    noise = torch.rand(exact.shape).clamp(1e-3, 1 - 1e-3) - 0.5 if stochastic else None
    assert torch.equal(form.values(form.codes(exact, noise)).abs(), exact.abs())


@pytest.mark.parametrize("name", FORMATS)
def test_in_place_codes_equal_the_definition(name):
    form = build_format(name)
    scaled = scaled_values(form)
    for noise in (None, torch.rand(scaled.shape) - 0.5):
        codes = torch.empty(scaled.shape, dtype=torch.uint8)
        expected = form.codes(scaled.clone(), noise)
        form.codes_into(scaled.clone(), noise, codes, torch.empty(scaled.shape, dtype=torch.int32))
        assert torch.equal(codes, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_is_unbiased(name):
    form = build_format(name)
    torch.manual_seed(1)
    for value in (0.004, 0.3, -0.55, 0.9):
        scaled = torch.full((200_000,), value * form.limit)
        decoded = form.values(form.codes(scaled, torch.rand(scaled.shape) - 0.5))
        standard_error = decoded.double().std() / scaled.numel() ** 0.5
        assert (decoded.double().mean() - scaled[0]).abs() <= 5 * standard_error + 1e-7


def test_e3m0_levels_are_powers_of_two():
    table = build_format("e3m0").table
    assert table is not None
    assert table.tolist()[:8] == [0.0, 2**-6, 2**-5, 2**-4, 2**-3, 2**-2, 2**-1, 1.0]


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match="int5"):
        build_format("int5")
