"""Several islands in one thread: drives their compressors pass by pass, no transport."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilocox.outer.codec.base import Codec, Compressor, MeanResult
from tests.outer.codec.building import grids_of


def average_in_lockstep(
    compressors: Sequence[Compressor], inputs: Sequence[list[Tensor]], codec: Codec
) -> list[MeanResult]:
    """One sync; every island's message is decoded and the mean taken in fp32."""
    generators = [c.passes(tensors) for c, tensors in zip(compressors, inputs, strict=True)]
    yielded = [next(generator) for generator in generators]
    while True:
        shapes = [tensor.shape for tensor in yielded[0]]
        grids = grids_of(yielded[0])
        decoded = [codec.decode(codec.encode(tensors, grids), grids) for tensors in yielded]
        own = [[t.view(s) for t, s in zip(tensors, shapes, strict=True)] for tensors in decoded]
        mean = [sum(parts[1:], parts[0].clone()) / len(own) for parts in zip(*own, strict=True)]
        finished: list[MeanResult] = []
        for k, generator in enumerate(generators):
            try:
                yielded[k] = generator.send(MeanResult(list(mean), own[k]))
            except StopIteration as done:
                finished.append(done.value)
        if finished:
            return finished
