"""Rules on the model."""

from __future__ import annotations

from dilocox.config.rules.require import require, require_default, require_multiple
from dilocox.config.schema import Config


def heads(config: Config) -> None:
    """Attention heads fall evenly on key/value groups and tensor parallel ranks."""
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


def dropout(config: Config) -> None:
    """Something must be left."""
    for leaf in ("attention_dropout", "hidden_dropout"):
        value = getattr(config.model, leaf)
        require(
            value < 1, f"model.{leaf}", value, "must be under 1, which would drop everything; use 0 to 0.5"
        )


def without_effect(config: Config) -> None:
    """Settings of a model that is not built."""
    if config.model.position_embedding_type != "rope":
        require_default(config.model, "model", ("rotary_base",), "unless position_embedding_type is rope")
