"""Which documents a data set draws from, and whether they are enough. No torch, no megatron-core.

`dilocox launch` and every rank check with it, before anything starts, that a corpus is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilocox.config.schema import Config
from dilocox.data.pair import PairInfo, read_index
from dilocox.data.resolve import Blend, ResolvedData
from dilocox.errors import ConfigError

PARTS = ("train", "valid", "test")
"""Megatron's names of the shares of `data.split`, by number."""


@dataclass(frozen=True)
class SampleSet:
    """Everything that decides the samples of a set and their order.

    Attributes:
        split: Megatron's `train,validation,test` shares.
        part: 0 = the train share, 1 = the validation share.
        island, num_islands: of the train documents, those whose number is `island` modulo `num_islands`.
        num_samples: samples to draw; the documents are read again, reshuffled, when they run out.
        seq_length: tokens per sample.
    """

    blend: Blend
    split: str
    part: int
    island: int
    num_islands: int
    num_samples: int
    seq_length: int
    seed: int
    tokenizer_identity: str


def train_set(config: Config, resolved: ResolvedData, island_id: int) -> SampleSet:
    """Returns the training samples of an island: its part of a shared corpus, or its site's documents."""
    return SampleSet(
        blend=resolved.training_blend(island_id),
        split=config.data.split,
        part=0,
        island=island_id if resolved.shared else 0,
        num_islands=config.parallel.num_islands if resolved.shared else 1,
        num_samples=config.inner.train_iters * config.inner.global_batch_size,
        seq_length=config.model.seq_length,
        seed=config.run.seed + island_id,
        tokenizer_identity=resolved.tokenizer_identity,
    )


def validation_set(config: Config, resolved: ResolvedData) -> SampleSet | None:
    """Returns the validation samples, the same on all islands; None with `logging.eval_iters` 0."""
    if config.logging.eval_iters == 0:
        return None
    return SampleSet(
        blend=resolved.validation_blend(),
        split=config.data.split,
        part=1,
        island=0,
        num_islands=1,
        num_samples=config.logging.eval_iters * config.inner.global_batch_size,
        seq_length=config.model.seq_length,
        seed=config.run.seed,
        tokenizer_identity=resolved.tokenizer_identity,
    )


def check_sizes(config: Config, resolved: ResolvedData, *, island_ids: Iterable[int]) -> None:
    """Checks that every set has samples to draw.

    Args:
        island_ids: islands whose training documents are looked at.

    Raises:
        ConfigError: too little text; the rule says how much there is.
    """
    for island_id in island_ids:
        field = "data.data_path" if resolved.shared else f"data.island_data[{island_id}]"
        reader = f"island {island_id} of {config.parallel.num_islands}"
        check_size(train_set(config, resolved, island_id), at_least=1, field=field, reader=reader)
    validation = validation_set(config, resolved)
    if validation is not None:
        field = "data.data_path" if resolved.shared else "data.island_data"
        check_size(validation, at_least=config.inner.global_batch_size, field=field, reader="all islands")


def check_size(samples: SampleSet, *, at_least: int, field: str, reader: str) -> None:
    """Checks that the documents of every pair fill the samples of one pass.

    Args:
        samples: the set to look at.
        at_least: samples that one pass over the pairs has to give, by their weights.
        field: the setting to name, for example `data.data_path`.
        reader: who draws the samples, for example `island 1 of 2`.

    Raises:
        ConfigError: too little text; the rule says how much there is.
    """
    for pair, weight in zip(samples.blend.pairs, samples.blend.weights, strict=True):
        num_samples = math.ceil(at_least * weight)
        needed = num_samples * samples.seq_length + 1
        lengths, _ = read_index(pair.prefix)
        chosen = documents_of(pair, samples)
        # Every sequence has at least one token, so no more sequences than tokens have to be read.
        num_tokens = int(lengths[chosen[:needed]].sum())
        if num_tokens < needed:
            share = f"{PARTS[samples.part]} share (data.split {samples.split})"
            none = " (for a run without validation set logging.eval_iters: 0)" if samples.part == 1 else ""
            raise ConfigError(
                field,
                pair.prefix,
                f"its {share} for {reader} has {num_tokens} tokens "
                f"in {len(chosen)} documents, but {num_samples} samples of model.seq_length "
                f"{samples.seq_length} need {needed}; use more text, a larger share or a shorter "
                f"seq_length{none}",
            )


def documents_of(pair: PairInfo, samples: SampleSet) -> NDArray[np.int32]:
    """Returns the sequences of a pair that a set draws from: the island's part of the set's share."""
    lengths, document_ends = read_index(pair.prefix)
    begin, end = share_bounds(samples.split, samples.part, num_sequences=len(lengths))
    return choose_documents(document_ends, begin, end, island=samples.island, num_islands=samples.num_islands)


def share_bounds(split: str, part: int, *, num_sequences: int) -> tuple[int, int]:
    """Returns first and last + 1 sequence of a share, with exactly Megatron's rounding."""
    shares = np.array([float(share) for share in split.split(",")], dtype=np.float64)
    shares = shares / shares.sum()
    ends = [0.0]
    for share in shares.tolist():
        ends.append(ends[-1] + share)
    return round(ends[part] * num_sequences), round(ends[part + 1] * num_sequences)


def choose_documents(
    document_ends: NDArray[np.int64], begin: int, end: int, *, island: int, num_islands: int
) -> NDArray[np.int32]:
    """Returns the sequences of [begin, end) that belong to an island, in whole documents.

    Neighbouring documents go to different islands, so that an ordered corpus is spread evenly.

    Args:
        document_ends: shape [num_documents + 1], the first sequence of each document, then the total.
    """
    sequences = np.arange(begin, end, dtype=np.int32)
    documents = np.searchsorted(document_ends, sequences, side="right") - 1
    chosen: NDArray[np.int32] = sequences[documents % num_islands == island]
    return chosen
