"""Byte counts: formulas against messages; no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.codec import sizes
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CODECS
from tests.outer.codec.building import WIRE_CODECS, build_codec, rows
from tests.outer.codec.test_grid import grids

NUMELS = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 4097]


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_message_has_the_predicted_length(name):
    message = build_codec(name, 64).encode([torch.randn(numel) for numel in NUMELS], rows(*NUMELS))
    assert message.numel() == CODECS.get(name).num_bytes(rows(*NUMELS), 64)


@pytest.mark.parametrize("name", WIRE_CODECS)
@given(laid=st.lists(grids(), max_size=4))
@settings(max_examples=30, deadline=None)
def test_message_of_any_blocks_has_the_length_of_its_blocks(name, laid):
    message = build_codec(name, 8).encode([torch.randn(grid.numel) for grid in laid], laid)
    bits = {"none": 32, "bf16": 16, "int8": 8}.get(name, 4)
    scales = 2 * sum(len(block_starts(grid)) for grid in laid) if CODECS.get(name).has_blocks else 0
    assert message.numel() == CODECS.get(name).num_bytes(laid, 8)
    assert message.numel() == scales + sum(-(-grid.numel * bits // 8) for grid in laid)


def block_starts(grid):
    """One by one, in place of the closed form."""
    places = [divmod(grid.lead + element, grid.row) for element in range(grid.numel)]
    return {(line, column // 8) for line, column in places}


def test_int4_in_blocks_of_64_takes_4_25_bits():
    assert 8 * CODECS.get("int4").num_bytes(rows(1 << 20), 64) / (1 << 20) == 4.25


def test_low_rank_goes_dense_where_factors_are_not_smaller():
    assert sizes.is_low_rank((100, 100), 49)
    assert not sizes.is_low_rank((100, 100), 50)
    assert not sizes.is_low_rank((10_000,), 1)
    shapes = [(100, 50), (50,), (4, 4)]
    dense = [BlockGrid.of_shape(shape) for shape in shapes]
    passes = sizes.low_rank_passes(shapes, dense, 8)
    assert passes == [[BlockGrid(800, 100), *dense[1:]], [BlockGrid(400, 50)]]
    assert sizes.low_rank_passes(shapes[1:], dense[1:], 8) == [dense[1:]]


@pytest.mark.parametrize("module", ["codec.sizes", "codec.grid", "codec.registry", "reduce.predicted"])
def test_what_plan_reads_needs_no_torch(module):
    code = f"import sys, dilocox.outer.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
