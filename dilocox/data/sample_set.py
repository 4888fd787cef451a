"""One Megatron data set with its index files: which documents, how many samples, in which order.

The index files of a set are in a folder of their own, whose name is a hash of everything that decides their
content. Megatron's own cache key does not contain which documents were chosen, nor whether the pair was
rewritten; a stale hit would silently train on other data.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import megatron.core
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from dilocox.atomic import atomic_folder
from dilocox.data.samples import SampleSet, documents_of
from dilocox.data.tokenizer import Tokenizer
from dilocox.errors import ConfigError

_BLEND_SURPLUS = 1.005
"""Megatron's margin: samples built per pair above its share of the blend."""

_MAX_SEED = 2**32
"""NumPy's RandomState, which Megatron shuffles with, takes seeds below this."""


def folder_name(samples: SampleSet) -> str:
    """Returns the name of the folder for the index files; equal names mean equal samples."""
    content = json.dumps([megatron.core.__version__, asdict(samples)], sort_keys=True)
    return f"{Split(samples.part).name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def build_index(samples: SampleSet, cache: Path, tokenizer: Tokenizer) -> None:
    """Writes the index files unless they exist. One rank per island calls it: Megatron requires rank 0.

    The folder gets its name when it is complete, so a killed run leaves no half-written index behind.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    folder = cache / folder_name(samples)
    if folder.is_dir():
        return
    try:
        with atomic_folder(folder) as building:
            _open(samples, building, tokenizer)
    except OSError as error:
        rule = f"index files cannot be written ({error}); choose a writable folder"
        raise ConfigError("data.data_cache_path", str(cache), rule) from error


def load(samples: SampleSet, cache: Path, tokenizer: Tokenizer) -> GPTDataset | BlendedDataset:
    """Opens a set whose index files have been built.

    Raises:
        ConfigError: they are missing, as on a second node without a shared folder.
    """
    folder = cache / folder_name(samples)
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
        chosen = documents_of(pair, samples)
        datasets.append(GPTDataset(low_level, pair.prefix, chosen, num_samples, split, config))
    if single:
        return datasets[0]
    return BlendedDataset(datasets, list(blend.weights), samples.num_samples, config)


@dataclass(frozen=True)
class _MegatronTokenizer:
    """The three attributes of a tokenizer that Megatron's data sets use."""

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
