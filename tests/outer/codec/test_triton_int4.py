"""The Triton kernels against the twin: on a GPU, and without one in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dilocox.outer.codec.block_codec import BlockCodec
from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.kernels import TwinKernels
from dilocox.outer.codec.registry import CODECS
from tests.outer.codec.conftest import hard_inputs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def compare_with_twin(device: str) -> None:
    """Fails unless both make the same messages and the same values of every hard input."""
    from dilocox.outer.codec.triton_int4 import TritonInt4Kernels

    form = build_format("int4")
    for block_size in (8, 24, 64):
        entry = CODECS.get("int4")
        fast = BlockCodec(entry, form, block_size=block_size, kernels=TritonInt4Kernels())
        twin = BlockCodec(entry, form, block_size=block_size, kernels=TwinKernels(form))
        for name, x in hard_inputs().items():
            x = x[:5000].to(device)
            for grid in (BlockGrid.of_shape(tuple(x.shape)), BlockGrid(x.numel(), 84, 6)):
                message = fast.encode([x], [grid])
                assert torch.equal(message.cpu(), twin.encode([x.cpu()], [grid])), (name, block_size)
                decoded = [codec.decode(message, [grid])[0].cpu() for codec in (fast, twin)]
                assert torch.equal(*(values.view(torch.int32) for values in decoded)), (name, block_size)


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equals_twin_on_the_gpu():
    compare_with_twin("cuda")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is tested")
def test_equals_twin_in_the_interpreter():
    # The interpreter is chosen when triton is imported, hence a process of its own.
    code = "from tests.outer.codec.test_triton_int4 import compare_with_twin; compare_with_twin('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
