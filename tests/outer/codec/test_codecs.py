"""Every codec: error bounds, cuts, replicas, lengths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import MessageError
from tests.outer.codec.bounds import error_bound
from tests.outer.codec.building import BLOCK_FORMATS, WIRE_CODECS, build_codec, grids_of, rows
from tests.outer.codec.conftest import hard_inputs

SIZES = [1, 2, 3, 5, 63, 64, 65, 4095, 4097]


@pytest.mark.parametrize("name", WIRE_CODECS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-8, 1e30])
def test_round_trip_is_within_the_bound(name, size, magnitude):
    torch.manual_seed(size)
    x = torch.randn(size) * magnitude
    codec = build_codec(name, 64)
    (decoded,) = codec.decode(codec.encode([x], rows(size)), rows(size))
    assert ((decoded.double() - x.double()).abs() <= error_bound(name, 64, x)).all()


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_hard_inputs_are_within_the_bound(name, hard_input):
    codec = build_codec(name, 64)
    grids = grids_of([hard_input])
    (decoded,) = codec.decode(codec.encode([hard_input], grids), grids)
    assert ((decoded.double() - hard_input.double()).abs() <= error_bound(name, 64, hard_input)).all()


@pytest.mark.parametrize("name", WIRE_CODECS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_cutting_at_blocks_changes_nothing(name, rounding):
    @given(data=st.data())
    @settings(max_examples=25, deadline=None)
    def check(data):
        numel = data.draw(st.integers(1, 700))
        cuts = sorted(data.draw(st.sets(st.integers(0, numel // 16), max_size=4)))
        bounds = [0, *(16 * cut for cut in cuts), numel]
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-4
        parts = [x[start:stop] for start, stop in pairwise(bounds)]
        codec = build_codec(name, 16, rounding, seed=5)
        (whole,) = codec.decode(codec.encode([x], rows(numel)), rows(numel))
        codec.reseed(5)
        shards = codec.decode(codec.encode(parts, grids_of(parts)), grids_of(parts))
        assert torch.equal(torch.cat(shards), whole)

    check()


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_equal_tensors_decode_equally_wherever_they_stand(name):
    replica = torch.randn(77)
    codec = build_codec(name, 64)
    first = codec.decode(codec.encode([replica, torch.randn(200)], rows(77, 200)), rows(77, 200))[0]
    tensors = [torch.randn(33) * 100, torch.randn(1), replica]
    second = codec.decode(codec.encode(tensors, rows(33, 1, 77)), rows(33, 1, 77))[2]
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_shapes_and_strides_do_not_matter(name):
    matrix = torch.randn(24, 40).T
    codec = build_codec(name, 64)
    grids = grids_of([matrix])
    assert torch.equal(codec.encode([matrix], grids), codec.encode([matrix.contiguous().view(-1)], grids))


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_no_tensors_make_an_empty_message(name):
    codec = build_codec(name, 64)
    assert codec.encode([], []).numel() == 0
    assert codec.decode(torch.empty(0, dtype=torch.uint8), []) == []


@pytest.mark.parametrize("name", WIRE_CODECS)
def test_wrong_length_names_both(name):
    codec = build_codec(name, 64)
    message = codec.encode([torch.randn(100)], rows(100))
    with pytest.raises(
        MessageError, match=rf"{message.numel()} bytes, expected {codec.num_bytes(rows(164))}"
    ):
        codec.decode(message, rows(164))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_stays_visible_in_its_block_alone(name, bad):
    x = torch.randn(192)
    x[70] = bad
    codec = build_codec(name, 64)
    (decoded,) = codec.decode(codec.encode([x], rows(192)), rows(192))
    assert not decoded[70].isfinite()
    assert decoded[:64].isfinite().all()
    assert decoded[128:].isfinite().all()


def test_int4_codes_stay_within_7():
    for x in hard_inputs().values():
        for rounding in ("nearest", "stochastic"):
            codec = build_codec("int4", 64, rounding)
            message = codec.encode([x], grids_of([x]))
            payload = message[2 * -(-x.numel() // 64) :]
            whole = payload[: x.numel() // 2]
            assert not ((whole & 15) == 0).any()
            assert not ((whole >> 4) == 0).any()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_stochastic_rounding_is_unbiased_and_repeatable(name):
    torch.manual_seed(0)
    x = torch.randn(640) * 1e-5
    codec = build_codec(name, 64, "stochastic", seed=1)
    grids = rows(640)
    first = codec.encode([x], grids)
    decoded = torch.stack([codec.decode(codec.encode([x], grids), grids)[0] for _ in range(2000)]).double()
    standard_error = decoded.std(dim=0) / 2000**0.5
    assert ((decoded.mean(dim=0) - x).abs() <= 6 * standard_error + 1e-4 * x.abs().max()).all()
    codec.reseed(1)
    assert torch.equal(codec.encode([x], grids), first)


def test_block_size_must_be_whole_bytes():
    with pytest.raises(ValueError, match="multiple of 8"):
        build_codec("int4", 12)
