"""Rules on corpora and tokenizers."""

from __future__ import annotations

import re

from dilocox.config.rules.require import require, require_default
from dilocox.config.schema import Config


def tokenizer(config: Config) -> None:
    """The tokenizer has its file, or its size, and reads what the data are."""
    data = config.data
    is_stdlib = data.data_path == "stdlib" and data.island_data is None
    if data.tokenizer_type == "NullTokenizer":
        require(
            data.vocab_size is not None,
            "data.vocab_size",
            None,
            "tokenizer_type NullTokenizer needs it; set the number of tokens",
        )
        require_default(data, "data", ("tokenizer_model",), "with tokenizer_type NullTokenizer")
        require(
            not is_stdlib,
            "data.tokenizer_type",
            data.tokenizer_type,
            "data_path stdlib is text, which NullTokenizer cannot read; use SentencePieceTokenizer",
        )
        return
    require(
        data.tokenizer_model is not None or (is_stdlib and data.tokenizer_type == "SentencePieceTokenizer"),
        "data.tokenizer_model",
        None,
        f"tokenizer_type {data.tokenizer_type} needs its file (only SentencePiece on data_path stdlib is "
        "trained on first use); give the path",
    )


def data_paths(config: Config) -> None:
    """Paths are prefixes or well-formed blends."""
    data, islands = config.data, config.parallel.num_islands
    _data_path("data.data_path", data.data_path)
    if data.island_data is None:
        return
    require(
        len(data.island_data) == islands,
        "data.island_data",
        data.island_data,
        f"has {len(data.island_data)} entries for parallel.num_islands = {islands}; give one per island",
    )
    require_default(data, "data", ("data_path",), "beside island_data")
    for island, entry in enumerate(data.island_data):
        field = f"data.island_data[{island}]"
        require(
            entry != "stdlib", field, entry, "must be a prefix; for stdlib on all islands use data.data_path"
        )
        _data_path(field, entry)


def _data_path(field: str, value: list[str | float] | str) -> None:
    if isinstance(value, str):
        require(bool(value), field, value, "must not be empty; give the prefix of a .bin/.idx pair")
        return
    weights, prefixes = value[0::2], value[1::2]
    well_formed = (
        0 < len(weights) == len(prefixes)
        and all(not isinstance(weight, str) and weight > 0 for weight in weights)
        and all(isinstance(prefix, str) and prefix not in ("", "stdlib") for prefix in prefixes)
    )
    require(
        well_formed,
        field,
        value,
        "a blend is [weight, prefix, weight, prefix ...] with weights over 0; write a weight before "
        "each prefix",
    )


def split(config: Config) -> None:
    """Three shares, with text to train on."""
    split = config.data.split
    parts = split.split(",")
    numeric = len(parts) == 3 and all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", part) for part in parts)
    require(
        numeric,
        "data.split",
        split,
        "must be three shares for train, validation, test; write for example 969,30,1",
    )
    train, validation, _ = (float(part) for part in parts)
    require(train > 0, "data.split", split, "the share of train must be over 0; write for example 969,30,1")
    require(
        validation > 0 or config.logging.eval_iters == 0,
        "data.split",
        split,
        "the share of validation must be over 0; write for example 969,30,1, or logging.eval_iters: 0 for a "
        "run without validation",
    )
