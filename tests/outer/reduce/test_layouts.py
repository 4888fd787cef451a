"""One model under several layouts: equal blocks give equal values, bit for bit in global coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dilocox.outer.codec.registry import CODECS
from dilocox.outer.reduce.fragment_reducer import grid_of
from dilocox.param_shard import ParamShard, ShardState
from tests.outer.codec.building import WIRE_CODECS, build_codec
from tests.outer.reduce.reducers import Islands, outer

BLOCK = 16
SHAPES = {
    "fc1": (2, 12, 64),  # SwiGLU: gate and value
    "fc2": (20, 96),
    "qkv": (20, 44),  # rows that are no multiple of the block
    "proj": (24, 32),
    "bias": (36,),
    "norm": (52,),
}
SPLIT_AXIS = {"fc1": 1, "fc2": 1, "qkv": 0, "proj": 1}


@dataclass(frozen=True)
class Layout:
    """Tensor parallel ranks, data parallel ranks, and how the latter share."""

    tp: int = 1
    dp: int = 1
    flat: bool = False
    split_axis: tuple[tuple[str, int], ...] = tuple(SPLIT_AXIS.items())

    def ranks(self):
        return [(tp, dp) for tp in range(self.tp) for dp in range(self.dp)]

    def shards(self, values, rank):
        """What a rank holds of global tensors."""
        shards = [self._shard(name, tensor, *rank) for name, tensor in values.items()]
        return [shard for shard in shards if shard.tensor.numel()]

    def _shard(self, name, tensor, tp, dp):
        axis = dict(self.split_axis).get(name)
        replicated = self.tp > 1 and axis is None
        offsets, block = [0] * tensor.ndim, tensor
        if axis is not None:
            block = tensor.tensor_split(self.tp, axis)[tp]
            offsets[axis] = tp * block.shape[axis]
        whole = block.contiguous()
        if self.flat:
            # Megatron cuts a buffer of all parameters; here each one, at multiples of the block.
            row = whole.shape[-1]
            edge = whole.numel() // self.dp // row * row + row // BLOCK // 2 * BLOCK
            start, stop = (0, edge)[dp], (edge, whole.numel())[dp]
            held = whole.flatten()[start:stop]
        else:
            matrix = whole.view(-1, whole.shape[-1]) if whole.ndim > 1 else whole.view(-1)
            if whole.ndim == 1 and self.dp > 1:
                edge = len(matrix) // self.dp // BLOCK * BLOCK
                held = matrix[(0, edge)[dp] : (edge, len(matrix))[dp]]
                start = (0, edge)[dp]
            else:
                blocks = matrix.tensor_split(self.dp)
                held = blocks[dp]
                start = sum(block.numel() for block in blocks[:dp])
        return ParamShard(name, held, "layer", 0, replicated, tp == 0 or not replicated,
                          tuple(tensor.shape), tuple(offsets), tuple(whole.shape), start)  # fmt: skip


def gathered(shapes, shards):
    """Global tensors from the shards of all ranks: every element must be there, copies must be equal."""
    found = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for shard, values in shards:
        target = found[shard.name]
        for axis, (offset, size) in enumerate(zip(shard.offsets, shard.block_shape, strict=True)):
            target = target.narrow(axis, offset, size)
        block = target.reshape(-1).clone()
        part = block[shard.start : shard.start + values.numel()]
        assert (part.isnan() | (part == values.flatten())).all()
        part.copy_(values.flatten())
        target.copy_(block.view(target.shape))
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 1e-3 for name, shape in SHAPES.items()}


def decoded(layout, values, codec):
    """Every rank encodes and decodes what it holds."""
    pairs = []
    for rank in layout.ranks():
        shards = layout.shards(values, rank)
        grids = [grid_of(shard) for shard in shards]
        message = codec.encode([shard.tensor for shard in shards], grids)
        assert message.numel() == CODECS.get(codec.name).num_bytes(grids, BLOCK)
        pairs += zip(shards, codec.decode(message, grids), strict=True)
    return gathered({name: tensor.shape for name, tensor in values.items()}, pairs)


LAYOUTS = {
    "TP2": Layout(tp=2),
    "DP2 rows": Layout(dp=2),
    "DP3 rows": Layout(dp=3, split_axis=()),
    "DP2 flat": Layout(dp=2, flat=True),
    "TP2 DP2 rows": Layout(tp=2, dp=2),
    "TP2 DP2 flat": Layout(tp=2, dp=2, flat=True),
    "TP4": Layout(tp=4, split_axis=(("fc1", 1), ("qkv", 0))),
}


def without_vectors(values, layout):
    """Three row blocks of a vector have no edges at multiples of the block."""
    return values if layout.dp < 3 else {name: t for name, t in values.items() if t.ndim > 1}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", WIRE_CODECS)
def test_every_layout_decodes_to_the_same_values(name, layout):
    values = without_vectors(model(1), layout)
    codec = build_codec(name, BLOCK)
    expected = decoded(Layout(), values, codec)
    for key, tensor in decoded(layout, values, codec).items():
        assert torch.equal(tensor.view(torch.int32), expected[key].view(torch.int32)), key


def test_an_edge_inside_a_block_changes_the_values():
    """The sweep above can fail: 96 columns over four ranks are one and a half blocks each."""
    values, codec = {"fc2": model(1)["fc2"]}, build_codec("int4", BLOCK)
    whole = decoded(Layout(), values, codec)["fc2"]
    assert torch.equal(decoded(Layout(tp=2), values, codec)["fc2"], whole)
    split = decoded(Layout(tp=4), values, codec)["fc2"]
    assert not torch.equal(split, whole)
    assert torch.equal(split[:, :16], whole[:, :16])
    assert torch.equal(split[:, 48:64], whole[:, 48:64])  # the third rank starts at a block


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [2, 3])
def test_syncs_with_error_feedback_are_equal_under_every_layout(layout, count):
    config = outer(codec="int4", error_feedback=True, codec_block_size=BLOCK)
    deltas = [[without_vectors(model(10 * step + k), layout) for k in range(count)] for step in range(3)]
    shapes = {name: tensor.shape for name, tensor in deltas[0][0].items()}

    def run(layout):
        means = [[] for _ in deltas]
        for rank in layout.ranks():
            shards = layout.shards({name: torch.zeros(shape) for name, shape in shapes.items()}, rank)
            islands = Islands(count, config, shards)
            for step, per_island in enumerate(deltas):
                held = [[s.tensor for s in layout.shards(values, rank)] for values in per_island]
                means[step] += zip(shards, islands.sync(held, step=step)[0].mean, strict=True)
        return [gathered(shapes, pairs) for pairs in means]

    for step, (got, wanted) in enumerate(zip(run(layout), run(Layout()), strict=True)):
        for name in shapes:
            assert torch.equal(got[name].view(torch.int32), wanted[name].view(torch.int32)), (step, name)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_replicas_stay_equal_where_edges_lie_inside_blocks(rounding):
    """All tensor parallel ranks have equally many blocks, so parts, owners and noise are the same."""
    layout = Layout(tp=4, split_axis=(("a", 1), ("b", 0)))
    shapes = {"a": (9, 48), "norm": (52,), "b": (8, 20), "last": (30,)}
    config = outer(codec="int4", error_feedback=True, codec_block_size=BLOCK, rounding=rounding)
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    ranks = {rank: Islands(3, config, layout.shards(zeros, rank)) for rank in layout.ranks()}
    for step, members in enumerate([[0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2]]):
        generator = torch.Generator().manual_seed(step)
        deltas = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(3)]
        replicas = []
        for rank, islands in ranks.items():
            held = [[s.tensor for s in layout.shards(values, rank)] for values in deltas]
            results = islands.sync(held, step=step, members=members)
            replicas.append([results[0].mean[i] for i in (1, 3)])
        for others in replicas[1:]:
            assert all(torch.equal(a, b) for a, b in zip(replicas[0], others, strict=True))


@pytest.mark.parametrize("name", ["TP2", "DP2 flat", "TP2 DP2 rows"])
def test_after_a_change_of_layout_nothing_is_lost(name):
    """Residuals come in global coordinates; the gather residual is forwarded by the new owners."""
    old, new = Layout(), LAYOUTS[name]
    config = outer(codec="int4", error_feedback=True, codec_block_size=BLOCK)
    zeros = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    before = Islands(3, config, old.shards(zeros, (0, 0)))
    before.sync([[s.tensor for s in old.shards(model(k), (0, 0))] for k in range(3)])
    held = dict(zip(SHAPES, before.held(), strict=True))
    saved = [reducer.state_dict() for reducer in before.reducers]
    pairs = {"mean": [], "held": []}
    for rank in new.ranks():
        shards = new.shards(zeros, rank)
        islands = Islands(3, config, shards)
        for reducer, state in zip(islands.reducers, saved, strict=True):
            kinds = {}
            for kind, tensors in state.tensors.items():
                whole = {key: tensors[key].view(shape) for key, shape in SHAPES.items()}
                kinds[kind] = {s.name: s.tensor for s in new.shards(whole, rank)}
            reducer.load_state_dict(ShardState(kinds, state.common))
        sent = [[s.tensor for s in new.shards(model(3 + k), rank)] for k in range(3)]
        mean = islands.sync(sent, step=1)[0].mean
        pairs["mean"] += zip(shards, mean, strict=True)
        pairs["held"] += [(s, h.float()) for s, h in zip(shards, islands.held(), strict=True)]
    mean, left = gathered(SHAPES, pairs["mean"]), gathered(SHAPES, pairs["held"])
    for key, shape in SHAPES.items():
        true = sum(model(3 + k)[key].double() for k in range(3)) / 3
        assert held[key].any()
        total = mean[key].double() + left[key].double()
        assert torch.allclose(total, true + held[key].view(shape), rtol=0, atol=2e-8)
