"""Fast kernels against the plain twin: equal bits on every input."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.codec import blocked
from dilocox.outer.codec.block_codec import BlockCodec
from dilocox.outer.codec.blocked import BlockedKernels
from dilocox.outer.codec.compiled import CompiledKernels, Fused
from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.kernels import TwinKernels, pack_nibbles, unpack_nibbles
from dilocox.outer.codec.noise import Noise
from tests.outer.codec.conftest import hard_inputs

FORMATS = ["int4", "int8", "nf4", "e3m0"]


def bits(tensor):
    return tensor.view(torch.int32)


def assert_same_bits(fast, twin, x):
    message = fast.encode([x])
    assert torch.equal(message, twin.encode([x]))
    ours, theirs = fast.decode(message, [x.numel()])[0], twin.decode(message, [x.numel()])[0]
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("block_size", [8, 64, 128])
def test_blocked_equals_twin(name, stochastic, block_size, hard_input, monkeypatch):
    monkeypatch.setattr(blocked, "_CHUNK_VALUES", 1000)  # several chunks, the last one short
    form = build_format(name)

    def noise():
        return Noise(3) if stochastic else None

    fast = BlockCodec(form, block_size, noise(), BlockedKernels(form))
    assert_same_bits(fast, BlockCodec(form, block_size, noise(), TwinKernels(form)), hard_input)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_values_may_start_anywhere(name, offset):
    codec = BlockCodec(build_format(name), 64)
    x = torch.randn(1000)
    message = codec.encode([x])
    inside = torch.zeros(1010)
    codec.decode_into(message, [inside[offset : offset + 1000]])
    assert torch.equal(inside[offset : offset + 1000], codec.decode(message, [1000])[0])
    assert torch.equal(codec.encode([torch.cat((torch.zeros(offset), x))[offset:]]), message)


@pytest.mark.parametrize("name", ["int4", "nf4", "e3m0"])
def test_compiled_equals_twin_with_one_kernel_each_way_for_all_sizes(name):
    if not has_compiler():
        pytest.skip("no C++ compiler for torch.compile")
    form = build_format(name)
    kernels = CompiledKernels(form, threshold=0)
    fast, twin = BlockCodec(form, 64, None, kernels), BlockCodec(form, 64, None, TwinKernels(form))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for x in hard_inputs().values():
        assert_same_bits(fast, twin, x)
    assert kernels.num_fallbacks == 0
    assert graphs["unique_graphs"] - before == 2


def test_a_failing_compiler_is_told_once_and_counted(monkeypatch):
    def broken(*args, **kwargs):
        def call(*args, **kwargs):
            raise RuntimeError("no compiler\ndetails")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = Fused(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="torch.compile failed, going on uncompiled: no compiler"):
        assert double(4) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(5) == 10
    assert double.num_fallbacks == 2


@given(codes=st.lists(st.integers(0, 15), max_size=70))
@settings(max_examples=50)
def test_nibbles_come_back_low_nibble_first(codes):
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack_nibbles(tensor)
    assert packed.numel() == -(-len(codes) // 2)
    assert torch.equal(unpack_nibbles(packed, len(codes)), tensor)
    if len(codes) > 1:
        assert int(packed[0]) == codes[0] | codes[1] << 4


def has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True
