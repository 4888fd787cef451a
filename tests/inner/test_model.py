"""Initial weights do not depend on the layout, and what is built is what the configuration says."""

import re

import numpy as np
import pytest
import torch

from dilocox.backend import choose_backend
from dilocox.errors import ConfigError, ModelError
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import LAYOUTS, VOCAB_SIZE, join_island, make_config

PINNED = [[-0.1205868050456047, -0.044939007610082626], [-0.5075103640556335, -1.2498047351837158]]
MODELS = {
    "swiglu": {},
    "GPT-2 like": {
        "swiglu": False,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": True,
    },
}


def _weights(rank, config):
    from dilocox.inner.model import build_model
    from dilocox.inner.names import named_global_parameters

    island = join_island(rank, config)
    model = build_model(config, island, vocab_size=VOCAB_SIZE)
    return {
        name: (island.coordinate.tp, getattr(parameter, "partition_dim", -1), parameter.detach().clone())
        for name, parameter in named_global_parameters(model).items()
    }


def whole(name, parts, config):
    """Joins the parts of the tensor parallel ranks, by hand."""
    dim = parts[0][1]
    values = [value for _, _, value in sorted(parts, key=lambda part: part[0])]
    if dim == -1:
        assert all(torch.equal(value, values[0]) for value in values), f"{name} differs between its copies"
        return values[0]
    if config.model.swiglu and "linear_fc1" in name:
        halves = [value.chunk(2, dim) for value in values]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves], dim)
    return torch.cat(values, dim)


@pytest.mark.parametrize("model", MODELS)
def test_initial_weights_are_those_of_one_rank(model):
    config = make_config(model=MODELS[model], parallel=LAYOUTS["TP2xPP2"])
    (one,) = run_ranks(_weights, 1, make_config(model=MODELS[model]))
    parts = {}
    for rank in run_ranks(_weights, 4, config):
        for name, part in rank.items():
            parts.setdefault(name, []).append(part)
    if model == "swiglu":
        tied = whole("output_layer.weight", parts.pop("output_layer.weight"), config)
        assert torch.equal(tied, one["embedding.word_embeddings.weight"][2])
    assert parts.keys() == one.keys()
    for name, (_, _, reference) in one.items():
        assert torch.equal(whole(name, parts[name], config), reference), name


def test_initial_weights_follow_megatrons_rules():
    config = make_config(model=MODELS["GPT-2 like"] | {"hidden_size": 128, "kv_channels": 32})
    (weights,) = run_ranks(_weights, 1, config)
    for name, (_, _, value) in weights.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            expected = 0.02 / (2 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1)
            assert float(value.std()) == pytest.approx(expected, rel=0.05), name
            assert abs(float(value.mean())) < expected / 10, name


def test_initial_weights_are_pinned():
    """A change here makes new runs incomparable with old ones and islands of two versions unequal."""
    from dilocox.inner.initial_weights import _normal

    values = _normal("decoder.layers.0.mlp.linear_fc1.weight", [2, 2], std=1.0, seed=1).numpy()
    np.testing.assert_array_equal(values, np.array(PINNED, dtype=np.float32))


def _check(rank, change):
    from dilocox.inner.model import build_model, check_built
    from dilocox.inner.names import unwrap

    config = make_config()
    gpt = unwrap(build_model(config, join_island(rank, config), vocab_size=VOCAB_SIZE))
    other = config.model_copy(update={"model": config.model.model_copy(update=change)})
    with pytest.raises(ModelError) as caught:
        check_built(gpt, other, vocab_size=VOCAB_SIZE, pp_rank=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 3}, r"layers\.2\..*built None, the configuration says \(32,\)"),
        ({"num_query_groups": 4}, r"linear_qkv.*built \(64, 32\), the configuration says \(96, 32\)"),
        ({"make_vocab_size_divisible_by": 128}, r"word_embeddings.*built \(64, 32\).*says \(128, 32\)"),
        ({"num_layers": 1}, r"layers\.1\..*built \(32,\), the configuration says None"),
    ],
)
def test_a_model_that_is_not_the_configured_one_is_refused_with_both_values(change, text):
    (message,) = run_ranks(_check, 1, change)
    assert re.search(text, message), message


def test_transformer_engine_without_a_gpu_is_refused():
    from dilocox.inner.model import check_layers

    model = make_config(model={"transformer_impl": "transformer_engine"}).model
    with pytest.raises(ConfigError, match=r"model\.transformer_impl = 'transformer_engine': needs a GPU"):
        check_layers(model, choose_backend("cpu"))
