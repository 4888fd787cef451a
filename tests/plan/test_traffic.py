"""Predicted payload against the reducers that would send it, and parameters that layouts cut unequally."""

from __future__ import annotations

import pytest
import torch

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, ModelConfig, OuterConfig, ParallelConfig
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.param_shard import ParamShard
from dilocox.plan.traffic import Traffic, uneven_blocks

CODECS = ["none", "bf16", "int8", "int4", "nf4", "e3m0", "low_rank"]


def traffic(*, codec="int4", block_size=16, hidden=64, ffn=128, position="rope", **parallel):
    lossless = codec in ("none", "bf16")
    outer = OuterConfig(codec=codec, codec_rank=4, codec_block_size=64 if lossless else block_size)
    model = ModelConfig(
        num_layers=2,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=4,
        position_embedding_type=position,
    )
    return Traffic(resolve(Config(model=model, parallel=ParallelConfig(**parallel), outer=outer)), 512)


def shards(parameters, tp):
    """What tensor parallel rank 0 of one data parallel rank holds."""
    found = []
    for parameter in parameters:
        tensor = torch.zeros(parameter.shape_on_rank(tp))
        replicated = tp > 1 and parameter.split_dim is None
        found.append(ParamShard.whole(parameter.name, tensor, replicated=replicated))
    return found


@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
@pytest.mark.parametrize("hidden", [64, 40])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_prediction_equals_the_reducers(codec, tp, hidden, position):
    """Learned positions are a replicated matrix, which low_rank sends as it is."""
    plan = traffic(
        codec=codec,
        hidden=hidden,
        position=position,
        ffn=104,
        num_islands=2,
        ranks_per_island=tp,
        tensor_model_parallel_size=tp,
    )
    (fragment,) = plan.fragments[0]
    reducer = FragmentReducer(plan.config.outer, shards(fragment, tp), island=0)
    assert plan.sync_bytes(0, 0) == reducer.predicted_bytes(2, 0)


def test_even_layouts_are_not_mentioned():
    assert uneven_blocks(traffic()) is None
    assert uneven_blocks(traffic(tensor_model_parallel_size=2, ranks_per_island=2)) is None
    assert uneven_blocks(traffic(hidden=40)) is None  # short blocks at the row's end, but no edges inside
    uneven = {"ffn": 40, "tensor_model_parallel_size": 2, "ranks_per_island": 2}
    assert uneven_blocks(traffic(codec="none", **uneven)) is None
    assert uneven_blocks(traffic(codec="low_rank", **uneven)) is None


@pytest.mark.parametrize(
    ("ffn", "text"),
    [(48, "use codec_block_size 8"), (40, "no block size helps"), (72, "no block size helps")],
)
def test_an_edge_inside_a_block_names_the_parameter_and_what_helps(ffn, text):
    uneven = traffic(ffn=ffn, tensor_model_parallel_size=2, ranks_per_island=2)
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(2)]
    expected = f"blocks differ between layouts for {', '.join(names)}; {text}"
    assert uneven_blocks(uneven) == expected


def test_flat_shards_may_meet_inside_a_row():
    flat = {"ranks_per_island": 2, "use_distributed_optimizer": True, "hidden": 40, "ffn": 48}
    line = uneven_blocks(traffic(**flat))
    assert line is not None
    assert "norm" in line  # 20 of 40 values
    assert uneven_blocks(traffic(block_size=8, **flat | {"hidden": 64})) is None
