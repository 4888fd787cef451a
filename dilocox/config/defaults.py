"""Defaults that depend on other settings. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from dilocox.config.schema import Config, DataConfig, InnerConfig, ModelConfig, OuterConfig, Section
from dilocox.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)

DelayMode = Literal["blocking", "streaming", "delayed_keep", "eager", "delayed_reset"]

STDLIB_VOCAB_SIZE = 2048
"""Tokens of the SentencePiece model trained on `data_path: stdlib` where no size is given."""


class OuterDefaults(NamedTuple):
    """Outer learning rate and momentum of a delay mode."""

    lr: float
    momentum: float


# Best of the sweep in benchmarks/results/outer_settings_h30_sweep.json (20 outer steps from scratch), for
# streaming with mixing_alpha 0. Long runs were published with 0.7/0.9 and blocking syncs (DiLoCo, 2311.08105)
# and with 0.4/0.9 and alpha 0.5 for streaming (2501.18512).
OUTER_DEFAULTS: dict[DelayMode, OuterDefaults] = {
    "blocking": OuterDefaults(0.7, 0.6),
    "streaming": OuterDefaults(0.7, 0.6),
    "delayed_keep": OuterDefaults(0.7, 0.6),
    "eager": OuterDefaults(1.0, 0.3),
    "delayed_reset": OuterDefaults(0.4, 0.6),  # 0.7/0.9 diverges with a whole interval of delay
}
PLAIN_SGD_DEFAULTS = OuterDefaults(1.0, 0.0)  # averaging of the islands, as in FedAvg


def resolve(config: Config) -> Config:
    """Fills every default that follows from other settings; settings that are given stay.

    With `outer.method` none or data_parallel the rest of `outer` has no effect: it goes back to its defaults,
    so that the resolved file says what runs and a baseline is one override away.

    Raises:
        ConfigError: a default cannot be derived.
    """
    return config.model_copy(
        update={
            "model": _fill(config.model, _model_defaults(config.model)),
            "data": _fill(config.data, _data_defaults(config.data)),
            "inner": _fill(config.inner, _inner_defaults(config.inner)),
            "outer": _resolve_outer(config.outer),
        }
    )


def _fill(section: SectionT, defaults: Mapping[str, Any]) -> SectionT:
    missing = {leaf: value for leaf, value in defaults.items() if getattr(section, leaf) is None}
    return section.model_copy(update=missing)


def _model_defaults(model: ModelConfig) -> dict[str, Any]:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            "model.hidden_size",
            model.hidden_size,
            f"must be a multiple of num_attention_heads ({model.num_attention_heads}) where kv_channels "
            "is not given; change one of them or set model.kv_channels",
        )
    swiglu_size = -(-8 * model.hidden_size // (3 * 64)) * 64
    return {
        "ffn_hidden_size": swiglu_size if model.swiglu else 4 * model.hidden_size,
        "num_query_groups": model.num_attention_heads,
        "kv_channels": model.hidden_size // model.num_attention_heads,
    }


def _data_defaults(data: DataConfig) -> dict[str, Any]:
    if data.tokenizer_type == "SentencePieceTokenizer" and data.tokenizer_model is None:
        return {"vocab_size": STDLIB_VOCAB_SIZE}
    return {}


def _inner_defaults(inner: InnerConfig) -> dict[str, Any]:
    return {"lr_decay_iters": inner.train_iters}


def _resolve_outer(outer: OuterConfig) -> OuterConfig:
    if outer.method == "none":
        return OuterConfig(method="none")
    if outer.method == "data_parallel":
        return OuterConfig(method="data_parallel", island_weights=outer.island_weights)
    mode = outer.delay_mode or delay_mode(outer)
    gather_codec = "int4" if outer.codec == "low_rank" else outer.codec
    defaults = PLAIN_SGD_DEFAULTS if outer.outer_optimizer == "sgd" else OUTER_DEFAULTS[mode]
    return _fill(
        outer,
        {
            "delay_mode": mode,
            "gather_codec": gather_codec,
            "outer_lr": defaults.lr,
            "outer_momentum": defaults.momentum,
        },
    )


def delay_mode(outer: OuterConfig) -> DelayMode:
    """The mode that an overlap delay means by itself."""
    if outer.overlap_delay == 0:
        return "blocking"
    if outer.overlap_delay * outer.num_fragments < outer.sync_interval:
        return "streaming"
    return "delayed_keep"
