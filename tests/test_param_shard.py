"""A shard says where it lies."""

from dataclasses import replace

import pytest
import torch

from dilocox.param_shard import ParamShard


def test_a_whole_parameter():
    shard = ParamShard.whole("a.weight", torch.zeros(4, 6), layer=3)
    assert shard.global_shape == shard.block_shape == (4, 6)
    assert shard.offsets == (0, 0) and shard.start == 0
    assert (shard.role, shard.layer, shard.replicated, shard.counted) == ("layer", 3, False, True)
    assert shard.label == shard.name == "a.weight"


@pytest.mark.parametrize(
    ("tensor", "start", "label"),
    [
        (torch.zeros(2, 6), 12, "a.weight[2:4]"),  # rows of a matrix
        (torch.zeros(5), 7, "a.weight[7:12]"),  # a flat shard
        (torch.zeros(24), 0, "a.weight"),  # a flat shard that is all of it
    ],
)
def test_the_label_names_the_part(tensor, start, label):
    shard = ParamShard.whole("a.weight", torch.zeros(4, 6))
    assert replace(shard, tensor=tensor, start=start).label == label


def test_rows_of_a_block_with_three_axes_are_counted_as_the_matrix_has_them():
    shard = ParamShard.whole("fc1", torch.zeros(2, 4, 6))
    assert replace(shard, tensor=torch.zeros(3, 6), start=18).label == "fc1[3:6]"
