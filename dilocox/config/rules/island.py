"""Rules on the model and on its layout inside an island."""

from __future__ import annotations

from dilocox.config.rules.require import require, require_default, require_multiple
from dilocox.config.schema import Config


def layout(config: Config) -> None:
    parallel, model = config.parallel, config.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ranks = parallel.ranks_per_island
    require_multiple(
        "parallel.ranks_per_island",
        ranks,
        tp * pp,
        "tensor_model_parallel_size * pipeline_model_parallel_size",
    )
    require_multiple("parallel.ranks_per_island", ranks, parallel.nodes_per_island, "nodes_per_island")
    require_multiple("model.num_layers", model.num_layers, pp, "parallel.pipeline_model_parallel_size")
    assert model.ffn_hidden_size is not None
    require_multiple(
        "model.ffn_hidden_size", model.ffn_hidden_size, tp, "parallel.tensor_model_parallel_size"
    )


def heads(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups, channels = model.num_query_groups, model.kv_channels
    assert groups is not None and channels is not None
    require_multiple(
        "model.num_attention_heads", model.num_attention_heads, tp, "parallel.tensor_model_parallel_size"
    )
    require(
        model.num_attention_heads % groups == 0,
        "model.num_query_groups",
        groups,
        f"must divide num_attention_heads ({model.num_attention_heads}); choose a divisor",
    )
    require_multiple("model.num_query_groups", groups, tp, "parallel.tensor_model_parallel_size")
    require(
        model.position_embedding_type != "rope" or channels % 2 == 0,
        "model.kv_channels",
        channels,
        f"must be even with position_embedding_type rope; use {channels + 1}",
    )


def device(config: Config) -> None:
    if config.run.device != "cpu":
        return
    dtype, implementation = config.model.params_dtype, config.model.transformer_impl
    require(
        dtype == "fp32",
        "model.params_dtype",
        dtype,
        "run.device cpu trains in fp32 only; use fp32 or a GPU",
    )
    require(
        implementation != "transformer_engine",
        "model.transformer_impl",
        implementation,
        "needs a GPU and run.device is cpu; use auto or local",
    )


def sequence_parallel(config: Config) -> None:
    parallel, model = config.parallel, config.model
    if not parallel.sequence_parallel:
        return
    tp = parallel.tensor_model_parallel_size
    require(
        tp > 1,
        "parallel.sequence_parallel",
        True,
        "needs tensor_model_parallel_size > 1; set it to false",
    )
    require(
        config.run.device != "cpu" and model.transformer_impl != "local",
        "parallel.sequence_parallel",
        True,
        "needs the norms of Transformer Engine, which are not there with run.device cpu or "
        "model.transformer_impl local; set it to false",
    )
    require_multiple(
        "model.seq_length",
        model.seq_length,
        tp,
        "tensor_model_parallel_size, because sequence_parallel splits the sequence",
    )


def recompute(config: Config) -> None:
    parallel = config.parallel
    if parallel.recompute_granularity != "full":
        require_default(
            parallel,
            "parallel",
            ("recompute_method", "recompute_num_layers"),
            "unless recompute_granularity is full",
        )
    per_stage = config.model.num_layers // parallel.pipeline_model_parallel_size
    require(
        parallel.recompute_num_layers <= per_stage,
        "parallel.recompute_num_layers",
        parallel.recompute_num_layers,
        f"a pipeline stage has {per_stage} layers; use at most that",
    )


def model_without_effect(config: Config) -> None:
    model = config.model
    if model.position_embedding_type != "rope":
        require_default(model, "model", ("rotary_base",), "unless position_embedding_type is rope")
    for leaf in ("attention_dropout", "hidden_dropout"):
        value = getattr(model, leaf)
        require(
            value < 1, f"model.{leaf}", value, "must be under 1, which would drop everything; use 0 to 0.5"
        )
