"""The shapes against the closed formula, and against what megatron-core builds."""

import pytest

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, ModelConfig, ParallelConfig, RunConfig
from dilocox.shapes import all_parameters, count_parameters, padded_vocab_size, stage_layers, stage_parameters
from tests.distributed.forkserver import run_ranks

VOCAB = 500
PLAIN = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
MODELS = {
    "rmsnorm-swiglu-rope-tied": PLAIN,
    "grouped-queries-untied": PLAIN.model_copy(
        update={"num_query_groups": 2, "untie_embeddings_and_output_weights": True, "qk_layernorm": True}
    ),
    "gpt2-like": PLAIN.model_copy(
        update={
            "normalization": "LayerNorm",
            "swiglu": False,
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
        }
    ),
    "wide-heads": PLAIN.model_copy(update={"kv_channels": 32, "ffn_hidden_size": 96}),
}


def config_of(model, tp=1, pp=1):
    parallel = ParallelConfig(
        ranks_per_island=tp * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    return resolve(Config(run=RunConfig(device="cpu"), model=model, parallel=parallel))


def built_shapes(rank, config):
    """Names and shapes of the parameters that megatron-core builds on this rank."""
    from dilocox.backend import choose_backend, init_island
    from dilocox.inner.model import build_model
    from dilocox.inner.names import named_global_parameters
    from dilocox.topology import Topology

    topology = Topology.from_config(config.parallel)
    island = init_island(choose_backend("cpu"), topology, rank=rank, run=config.run)
    model = build_model(config, island, vocab_size=VOCAB)
    shapes = {name: tuple(parameter.shape) for name, parameter in named_global_parameters(model).items()}
    return island.coordinate.pp, shapes


@pytest.mark.heavy
def test_wide_heads_equal_what_megatron_builds():
    """The one model that no other test builds: each build compares its shapes (`inner.model.check_built`)."""
    config = config_of(MODELS["wide-heads"], 2, 2)
    for pp_rank, built in run_ranks(built_shapes, 4, config):
        expected = stage_parameters(config.model, config.parallel, vocab_size=VOCAB, pp_rank=pp_rank)
        assert built == {parameter.name: parameter.shape_on_rank(2) for parameter in expected}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_the_number_of_parameters_follows_the_closed_formula(model, tp, pp):
    config = config_of(model, tp, pp)
    m = config.model
    hidden, ffn, channels = m.hidden_size, m.ffn_hidden_size, m.kv_channels
    qkv, query = (m.num_attention_heads + 2 * m.num_query_groups) * channels, m.num_attention_heads * channels
    fc1 = 2 * ffn if m.swiglu else ffn
    layer = hidden * (qkv + query + fc1 + ffn)
    layer += (qkv + fc1 + 2 * hidden) if m.add_bias_linear else 0
    per_norm = 2 if m.normalization == "LayerNorm" else 1
    layer += per_norm * (2 * hidden + (2 * channels if m.qk_layernorm else 0))
    rows = 512
    embedding = rows * hidden * (2 if m.untie_embeddings_and_output_weights else 1)
    embedding += m.seq_length * hidden if m.position_embedding_type == "learned_absolute" else 0
    total = 4 * layer + embedding + per_norm * hidden
    assert count_parameters(m, config.parallel, vocab_size=VOCAB) == total


def test_stages_hold_every_layer_once():
    config = config_of(PLAIN, pp=4)
    names = [parameter.name for parameter in all_parameters(config.model, config.parallel, vocab_size=VOCAB)]
    assert len(names) == len(set(names))
    layers = [layer for pp_rank in range(4) for layer in stage_layers(12, pp_size=4, pp_rank=pp_rank)]
    assert layers == list(range(12))


@pytest.mark.parametrize(
    ("size", "divisible_by", "tp", "rows"),
    [(500, 128, 1, 512), (500, 128, 2, 512), (513, 128, 2, 768), (1, 1, 1, 1)],
)
def test_padded_vocab_size(size, divisible_by, tp, rows):
    assert padded_vocab_size(size, divisible_by=divisible_by, tp=tp) == rows
