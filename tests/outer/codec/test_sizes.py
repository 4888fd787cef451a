"""Byte counts: formulas against messages, shards cover everything once, no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.outer.codec import sizes
from dilocox.outer.codec.build import build_codec

CODECS = sorted(sizes.CODE_BITS)
NUMELS = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 4097]


@pytest.mark.parametrize("name", CODECS)
def test_message_has_the_predicted_length(name):
    message = build_codec(name, 64).encode([torch.randn(numel) for numel in NUMELS])
    assert message.numel() == sizes.message_bytes(name, 64, NUMELS)


def test_int4_in_blocks_of_64_takes_4_25_bits():
    assert sizes.bits_per_value("int4", 64) == 4.25
    assert 8 * sizes.message_bytes("int4", 64, [1 << 20]) / (1 << 20) == 4.25


def test_a_small_model_stays_under_4_5_bits_with_its_headers():
    layer = [256, 256 * 768, 256 * 256, 256, 256 * 1408, 704 * 256]
    numels = [4096 * 256, *layer, *layer, 256]
    fragments = [numels[p::4] for p in range(4)]
    total = sum(
        sizes.allreduce_bytes("int4", block_size=64, numels=fragment, num_islands=2) for fragment in fragments
    )
    assert 8 * total / sum(numels) <= 4.5


@pytest.mark.parametrize("num_islands", [3, 4, 5, 8])
def test_islands_together_send_twice_k_minus_1_messages(num_islands):
    numels = [1 << 18, 100, 77]
    total = sum(
        sizes.allreduce_bytes("int4", block_size=64, numels=numels, num_islands=num_islands, index=index)
        for index in range(num_islands)
    )
    headers = 2 * num_islands * (num_islands - 1) * sizes.HEADER_BYTES
    assert total == 2 * (num_islands - 1) * sizes.message_bytes("int4", 64, numels) + headers


@given(
    numels=st.lists(st.integers(0, 500), max_size=8),
    block_size=st.sampled_from([8, 64]),
    num_shards=st.integers(1, 7),
)
def test_shards_hold_every_element_once_and_are_cut_at_blocks(numels, block_size, num_shards):
    shards = sizes.cut_shards(numels, block_size, num_shards)
    seen = [(s.tensor, i) for shard in shards for s in shard for i in range(s.start, s.stop)]
    assert seen == [(tensor, i) for tensor, numel in enumerate(numels) for i in range(numel)]
    assert all(s.start % block_size == 0 for shard in shards for s in shard)
    assert all(s.stop % block_size == 0 or s.stop == numels[s.tensor] for shard in shards for s in shard)
    blocks = [sum(sizes.num_blocks(s.numel, block_size) for s in shard) for shard in shards]
    assert max(blocks) - min(blocks) <= 1


def test_low_rank_goes_dense_where_factors_are_not_smaller():
    assert sizes.is_low_rank((100, 100), 49)
    assert not sizes.is_low_rank((100, 100), 50)
    assert not sizes.is_low_rank((10_000,), 1)
    assert sizes.low_rank_numels([(100, 50), (50,), (4, 4)], 8) == [[800, 50, 16], [400]]
    assert sizes.low_rank_numels([(50,)], 8) == [[50]]


def test_sizes_need_no_torch():
    code = "import sys, dilocox.outer.codec.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
