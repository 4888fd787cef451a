"""Where blocks lie: closed forms against counting one by one; parts hold every element once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.outer.codec.grid import BlockGrid, part_grids, partition
from dilocox.outer.codec.irregular import from_blocks, to_blocks


@st.composite
def grids(draw):
    """Whole tensors, row blocks and flat shards that start anywhere."""
    row = draw(st.one_of(st.sampled_from([1, 7, 8, 9, 16, 24, 64]), st.integers(1, 50)))
    lead = draw(st.sampled_from([0, 0, draw(st.integers(0, row - 1))]))
    return BlockGrid(draw(st.integers(0, 150)), row, lead)


def starts(grid, block_size):
    """First element of every block, found one by one."""
    found, seen = [], set()
    for element in range(grid.numel):
        line, column = divmod(grid.lead + element, grid.row)
        if (line, column // block_size) not in seen:
            seen.add((line, column // block_size))
            found.append(element)
    return found


@given(grid=grids(), block_size=st.sampled_from([8, 16]))
def test_blocks_are_where_counting_finds_them(grid, block_size):
    expected = starts(grid, block_size)
    assert grid.num_blocks(block_size) == len(expected)
    assert [grid.offset(block, block_size) for block in range(len(expected) + 1)] == [*expected, grid.numel]


@given(grid=grids(), block_size=st.sampled_from([8, 16]))
def test_regular_means_whole_blocks_from_the_first_element_on(grid, block_size):
    assert grid.is_regular(block_size) == (starts(grid, block_size) == [*range(0, grid.numel, block_size)])


@given(grid=grids(), data=st.data())
def test_a_part_cut_at_blocks_has_the_blocks_of_the_whole(grid, data):
    count = grid.num_blocks(8)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    start, stop = grid.offset(first, 8), grid.offset(last, 8)
    part = grid.part(start, stop)
    assert [start + block for block in starts(part, 8)] == [b for b in starts(grid, 8) if start <= b < stop]


@given(grid=grids(), block_size=st.sampled_from([8, 16]))
def test_padded_blocks_come_back(grid, block_size):
    values = torch.arange(1, grid.numel + 1, dtype=torch.float32)
    blocks = to_blocks(values, grid, block_size)
    assert blocks.shape == (grid.num_blocks(block_size), block_size)
    assert blocks.is_contiguous()
    assert torch.equal(from_blocks(blocks, grid), values)
    edges = [*starts(grid, block_size), grid.numel]
    for line, (start, stop) in zip(blocks, pairwise(edges), strict=True):
        assert sorted(line[line > 0].tolist()) == list(range(start + 1, stop + 1))


@given(laid=st.lists(grids(), max_size=6), block_size=st.sampled_from([8, 64]), num_parts=st.integers(1, 7))
def test_parts_hold_every_element_once_and_are_cut_at_blocks(laid, block_size, num_parts):
    parts = partition(laid, block_size, num_parts)
    seen = [(s.tensor, i) for part in parts for s in part for i in range(s.start, s.stop)]
    assert seen == [(tensor, i) for tensor, grid in enumerate(laid) for i in range(grid.numel)]
    edges = [{*starts(grid, block_size), grid.numel} for grid in laid]
    assert all({s.start, s.stop} <= edges[s.tensor] for part in parts for s in part)
    blocks = [sum(grid.num_blocks(block_size) for grid in part_grids(laid, part)) for part in parts]
    assert max(blocks) - min(blocks) <= 1
    assert sum(blocks) == sum(grid.num_blocks(block_size) for grid in laid)


def test_a_grid_that_cannot_be_is_refused():
    for numel, row, lead in ((-1, 8, 0), (8, 0, 0), (8, 8, 8), (8, 8, -1)):
        with pytest.raises(ValueError, match="no such grid"):
            BlockGrid(numel, row, lead)


def test_shapes_without_axes_or_values_have_a_grid():
    assert BlockGrid.of_shape(()) == BlockGrid(1, 1)
    assert BlockGrid.of_shape((3, 0)) == BlockGrid(0, 1)
    assert BlockGrid.of_shape((2, 4, 6), numel=9, start=20) == BlockGrid(9, 6, 2)
