"""Fast kernels against the plain twin: equal bits on every input."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.codec import blocked
from dilocox.outer.codec.block_codec import BlockCodec, serve_kernels
from dilocox.outer.codec.blocked import BlockedKernels
from dilocox.outer.codec.compiled import CompiledKernels, Fused
from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.kernels import TwinKernels, pack_nibbles, unpack_nibbles
from dilocox.outer.codec.noise import Noise
from dilocox.outer.codec.registry import CODECS
from tests.outer.codec.building import BLOCK_FORMATS
from tests.outer.codec.conftest import hard_inputs

FORMATS = BLOCK_FORMATS
COMPILED = ["int8", "nf4", "e3m0"]
"""Formats that CUDA serves with torch.compile; int4 has kernels of its own, see `test_triton_int4.py`."""


def bits(tensor):
    return tensor.view(torch.int32)


def block_codec(name, kernels=None, *, block_size=64, noise=None):
    return BlockCodec(
        CODECS.get(name), build_format(name), block_size=block_size, noise=noise, kernels=kernels
    )


def assert_same_bits(fast, twin, x, grid=None):
    grids = [grid or BlockGrid.of_shape(tuple(x.shape))]
    message = fast.encode([x], grids)
    assert torch.equal(message, twin.encode([x], grids))
    ours, theirs = fast.decode(message, grids)[0], twin.decode(message, grids)[0]
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("block_size", [8, 64, 128])
def test_blocked_equals_twin(name, stochastic, block_size, hard_input, monkeypatch):
    monkeypatch.setattr(blocked, "_CHUNK_VALUES", 1000)  # several chunks, the last one short
    form = build_format(name)

    def noise():
        return Noise(3) if stochastic else None

    for grid in (None, BlockGrid(hard_input.numel(), 100, 3)):
        fast = block_codec(name, BlockedKernels(form), block_size=block_size, noise=noise())
        twin = block_codec(name, TwinKernels(form), block_size=block_size, noise=noise())
        assert_same_bits(fast, twin, hard_input, grid)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_values_may_start_anywhere(name, offset):
    codec = block_codec(name)
    x = torch.randn(1000)
    for grid in (BlockGrid(1000, 1000), BlockGrid(1000, 100)):
        message = codec.encode([x], [grid])
        inside = torch.zeros(1010)
        codec.decode_into(message, [grid], [inside[offset : offset + 1000]])
        assert torch.equal(inside[offset : offset + 1000], codec.decode(message, [grid])[0])
        assert torch.equal(codec.encode([torch.cat((torch.zeros(offset), x))[offset:]], [grid]), message)


def test_what_is_served_is_what_is_compared_with_the_twin():
    """The comparisons of this file and of `test_triton_int4.py` cover every kernel that a device gets."""
    assert {type(serve_kernels(build_format(name), "cpu")) for name in FORMATS} == {BlockedKernels}
    on_cuda = {name: serve_kernels(build_format(name), "cuda") for name in COMPILED}
    assert {type(kernels) for kernels in on_cuda.values()} == {CompiledKernels}
    assert {*COMPILED, "int4"} == {*FORMATS}
    if find_spec("triton") is not None:
        from dilocox.outer.codec.triton_int4 import TritonInt4Kernels

        assert type(serve_kernels(build_format("int4"), "cuda")) is TritonInt4Kernels


@pytest.mark.heavy  # minutes of a C++ compiler on a busy machine
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_twin_with_one_kernel_each_way_for_all_sizes(name):
    if not has_compiler():
        pytest.skip("no C++ compiler for torch.compile; the eager function is compared below")
    form = build_format(name)
    kernels = CompiledKernels(form, threshold=0)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for x in hard_inputs().values():
        assert_same_bits(block_codec(name, kernels), block_codec(name, TwinKernels(form)), x)
    assert kernels.num_fallbacks == 0
    assert graphs["unique_graphs"] - before == 2


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_the_eager_function_of_a_missing_compiler_equals_twin_and_is_counted(name, stochastic, monkeypatch):
    monkeypatch.setattr(torch, "compile", broken_compiler)
    form = build_format(name)
    fast = block_codec(name, CompiledKernels(form, threshold=0), noise=Noise(3) if stochastic else None)
    twin = block_codec(name, TwinKernels(form), noise=Noise(3) if stochastic else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in hard_inputs().values():
            assert_same_bits(fast, twin, x)
    assert len(caught) == 2  # one for each way, then silence
    assert fast.num_fallbacks > 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_what_cuda_serves_equals_twin(name):
    served = serve_kernels(build_format(name), "cuda")
    if isinstance(served, CompiledKernels):
        served = CompiledKernels(build_format(name), threshold=0)
    fast, twin = block_codec(name, served), block_codec(name, TwinKernels(build_format(name)))
    for x in hard_inputs().values():
        for grid in (BlockGrid.of_shape(tuple(x.shape)), BlockGrid(x.numel(), 100, 3)):
            message = fast.encode([x.cuda()], [grid])
            assert torch.equal(message.cpu(), twin.encode([x], [grid]))
            ours, theirs = fast.decode(message, [grid])[0].cpu(), twin.decode(message.cpu(), [grid])[0]
            assert torch.equal(bits(ours), bits(theirs))
    assert fast.num_fallbacks == 0


def test_a_failing_compiler_is_told_once_and_counted(monkeypatch):
    monkeypatch.setattr(torch, "compile", broken_compiler)
    double = Fused(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="torch.compile failed, continuing uncompiled: no compiler"):
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


def broken_compiler(*args, **kwargs):
    def call(*args, **kwargs):
        raise RuntimeError("no compiler\ndetails")

    return call


def has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True
