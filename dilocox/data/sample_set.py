"""One Megatron data set with its index files: which documents, how many samples, in which order.

The index files of a set lie in a folder of their own, whose name covers everything that decides their
content. Megatron's own cache key leaves out which documents were chosen, and whether the pair was written
anew; a stale hit would silently train on other data.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import megatron.core
import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from dilocox.data.resolve import Blend
from dilocox.data.tokenizer import Tokenizer
from dilocox.data.whole_folder import whole_folder
from dilocox.errors import ConfigError

_BLEND_SURPLUS = 1.005
"""Megatron's margin: samples built per pair above its share of the blend."""

_MAX_SEED = 2**32
"""NumPy's RandomState, which Megatron shuffles with, takes seeds below this."""


@dataclass(frozen=True)
class SampleSet:
    """Everything that decides the samples of a set and their order.

    Attributes:
        split: Megatron's `train,validation,test` shares.
        part: 0 = the train share, 1 = the validation share.
        island, num_islands: of the train documents, those whose number is `island` modulo `num_islands`.
        num_samples: samples to draw; the documents are read again, reshuffled, when they run out.
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

    @property
    def folder_name(self) -> str:
        """Name of the folder for the index files; equal names mean equal samples."""
        content = json.dumps([megatron.core.__version__, asdict(self)], sort_keys=True)
        return f"{Split(self.part).name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def choose_documents(
    document_ends: NDArray[np.int64], begin: int, end: int, *, island: int, num_islands: int
) -> NDArray[np.int32]:
    """Sequences `begin` to `end` that belong to an island, whole documents at a time.

    Neighbouring documents go to different islands, so that an ordered corpus is spread evenly.

    Args:
        document_ends: shape [num_documents + 1], the first sequence of each document, then the total.
    """
    sequences = np.arange(begin, end, dtype=np.int32)
    documents = np.searchsorted(document_ends, sequences, side="right") - 1
    chosen: NDArray[np.int32] = sequences[documents % num_islands == island]
    return chosen


def check_size(samples: SampleSet, *, at_least: int, field: str) -> None:
    """Fail early if the documents of any pair cannot fill the samples of one pass.

    Args:
        at_least: samples that one pass over the pairs has to give, by their weights.
        field: the setting to name, for example `data.data_path`.

    Raises:
        ConfigError: too little text; the rule says how much there is.
    """
    for pair, weight in zip(samples.blend.pairs, samples.blend.weights, strict=True):
        num_samples = math.ceil(at_least * weight)
        needed = num_samples * samples.seq_length + 1
        dataset = IndexedDataset(pair.prefix)
        chosen = _documents(dataset, samples)
        # every sequence has a token: that many sequences are enough to look at
        num_tokens = int(dataset.sequence_lengths[chosen[:needed]].sum())
        if num_tokens < needed:
            share = f"{Split(samples.part).name} share (data.split {samples.split})"
            raise ConfigError(
                field,
                pair.prefix,
                f"its {share} for island {samples.island} of {samples.num_islands} has {num_tokens} tokens "
                f"in {len(chosen)} documents, but {num_samples} samples of model.seq_length "
                f"{samples.seq_length} need {needed}; use more text, a larger share or a shorter seq_length",
            )


def build_index(samples: SampleSet, cache: Path, tokenizer: Tokenizer) -> None:
    """Write the index files unless they are there. One rank an island calls it: Megatron wants rank 0.

    The folder gets its name when it is complete, so a run that was killed leaves nothing to trip over.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    folder = cache / samples.folder_name
    if folder.is_dir():
        return
    try:
        with whole_folder(folder) as building:
            _open(samples, building, tokenizer)
    except OSError as error:
        rule = f"index files cannot be written ({error}); choose a writable folder"
        raise ConfigError("data.data_cache_path", str(cache), rule) from error


def load(samples: SampleSet, cache: Path, tokenizer: Tokenizer) -> GPTDataset | BlendedDataset:
    """Open a set whose index files have been built.

    Raises:
        ConfigError: they are not there, as on a second node without a shared folder.
    """
    folder = cache / samples.folder_name
    if not folder.is_dir():
        raise ConfigError(
            "data.data_cache_path",
            str(cache),
            f"has no {folder.name}; all nodes of an island must see the same folder, choose a shared one",
        )
    return _open(samples, folder, tokenizer)


def _open(samples: SampleSet, folder: Path, tokenizer: Tokenizer) -> GPTDataset | BlendedDataset:
    blend, split = samples.blend, Split(samples.part)
    config = _megatron_config(samples, folder, tokenizer)
    single = len(blend.pairs) == 1
    datasets = []
    for pair, weight in zip(blend.pairs, blend.weights, strict=True):
        low_level = IndexedDataset(pair.prefix)
        share = math.ceil(samples.num_samples * weight * _BLEND_SURPLUS) + 1
        num_samples = samples.num_samples if single else share
        chosen = _documents(low_level, samples)
        datasets.append(GPTDataset(low_level, pair.prefix, chosen, num_samples, split, config))
    if single:
        return datasets[0]
    return BlendedDataset(datasets, list(blend.weights), samples.num_samples, config)


def _documents(dataset: IndexedDataset, samples: SampleSet) -> NDArray[np.int32]:
    """The island's part of the set's share; shares are cut where Megatron cuts them."""
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(samples.split))[samples.part]
    if bounds is None:
        return np.zeros(0, dtype=np.int32)
    total = len(dataset)
    begin, end = (round(bound * total) for bound in bounds)
    return choose_documents(
        dataset.document_indices, begin, end, island=samples.island, num_islands=samples.num_islands
    )


@dataclass(frozen=True)
class _MegatronTokenizer:
    """The three things that Megatron's data sets ask of a tokenizer."""

    vocab_size: int
    eod: int | None
    unique_identifiers: dict[str, str]


def _megatron_config(samples: SampleSet, folder: Path, tokenizer: Tokenizer) -> GPTDatasetConfig:
    identifiers = {"identity": samples.tokenizer_identity}
    return GPTDatasetConfig(
        random_seed=samples.seed % _MAX_SEED,
        sequence_length=samples.seq_length,
        blend=([pair.prefix for pair in samples.blend.pairs], list(samples.blend.weights)),
        split=samples.split,
        path_to_cache=str(folder),
        tokenizer=_MegatronTokenizer(tokenizer.vocab_size, tokenizer.eod, identifiers),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
