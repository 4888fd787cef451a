"""Rules on the layout of an island and on the device it computes on."""

from __future__ import annotations

from typing import Literal

from dilocox.config.rules.require import require, require_default, require_multiple
from dilocox.config.schema import Config


def layout(config: Config) -> None:
    """Ranks, layers and matrices fall evenly on the axes of the layout."""
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


def sequence_parallel(config: Config) -> None:
    """Sequence parallelism needs tensor parallel ranks to split a sequence over."""
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
        model.transformer_impl != "local",
        "parallel.sequence_parallel",
        True,
        "needs the norms of Transformer Engine, which model.transformer_impl local does not use; "
        "set it to false",
    )
    require_multiple(
        "model.seq_length",
        model.seq_length,
        tp,
        "tensor_model_parallel_size, because sequence_parallel splits the sequence",
    )


def device(config: Config) -> None:
    """What is known before the hardware is asked: `run.device` cpu."""
    if config.run.device == "cpu":
        on_device(config, "cpu")


def on_device(config: Config, kind: Literal["cpu", "cuda"]) -> None:
    """Settings that the device cannot do, whether it was asked for or `run.device: auto` came to it.

    Args:
        kind: device that the ranks compute on.
    """
    if kind == "cuda":
        return
    chosen = "run.device cpu" if config.run.device == "cpu" else "run.device auto found no GPU, and the CPU"
    model = config.model
    require(
        model.params_dtype == "fp32",
        "model.params_dtype",
        model.params_dtype,
        f"{chosen} trains in fp32 only; use fp32 or a GPU",
    )
    require(
        model.transformer_impl != "transformer_engine",
        "model.transformer_impl",
        model.transformer_impl,
        f"needs a GPU, but the device is the CPU (run.device {config.run.device}); use auto or local",
    )
    require(
        not config.parallel.sequence_parallel,
        "parallel.sequence_parallel",
        True,
        "needs the norms of Transformer Engine, which are not there on the CPU "
        f"(run.device {config.run.device}); set it to false",
    )


def recompute(config: Config) -> None:
    """Recomputation by layers stays inside a pipeline stage."""
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
