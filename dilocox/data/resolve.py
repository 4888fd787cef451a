"""Resolves the `data` section to existing files, before any process group exists. No torch.

Every launcher calls `prepare` first: a missing file is one line and exit code 2, and the demo's corpus is
made once instead of by every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.config.schema import Config, DataConfig
from dilocox.data.corpus import prepare_stdlib
from dilocox.data.pair import PairInfo, inspect_pair
from dilocox.data.tokenizer import Tokenizer, TokenizerSpec
from dilocox.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blend:
    """Pairs to draw from, and how often: weights sum to 1."""

    pairs: tuple[PairInfo, ...]
    weights: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(pair.num_tokens for pair in self.pairs)


@dataclass(frozen=True)
class ResolvedData:
    """The `data` section, resolved on this machine.

    Attributes:
        sites: one blend where the islands share a corpus and split its documents; one per island where each
            site has data of its own, None for a site whose files are not on this machine.
        tokenizer_identity: must be equal on all islands.
    """

    sites: tuple[Blend | None, ...]
    shared: bool
    tokenizer: TokenizerSpec
    vocab_size: int
    tokenizer_identity: str

    def training_blend(self, island_id: int) -> Blend:
        """Returns the pairs that an island trains on.

        Raises:
            ConfigError: they are not on this machine.
        """
        blend = self.sites[0 if self.shared else island_id]
        if blend is None:
            raise ConfigError(
                f"data.island_data[{island_id}]",
                "missing files",
                "an island needs its own files; check the path",
            )
        return blend

    def validation_blend(self) -> Blend:
        """Returns all pairs of the sites whose files are on this machine, each site with the same weight."""
        present = [blend for blend in self.sites if blend is not None]
        return Blend(
            pairs=tuple(pair for blend in present for pair in blend.pairs),
            weights=tuple(weight / len(present) for blend in present for weight in blend.weights),
        )


def prepare(config: Config, cache_dir: Path, *, island_id: int | None = None) -> ResolvedData:
    """Finds the corpora and the tokenizer, and prepares the demo's corpus if the settings name it.

    Safe in any number of processes at once.

    Args:
        cache_dir: where the demo's corpus is kept.
        island_id: with `island_data`, the island that runs here; only its files have to exist. None: all.

    Raises:
        ConfigError: names the setting whose file is missing or unusable.
    """
    data = config.data
    if data.island_data is None and data.data_path == "stdlib":
        own = None if data.tokenizer_model is None else _spec(data)
        corpus = prepare_stdlib(cache_dir, data.vocab_size, tokenizer=own)
        blend = Blend((inspect_pair(corpus.prefix, field="data.data_path"),), (1.0,))
        return _resolved((blend,), corpus.tokenizer, data)
    spec = _spec(data)
    if data.island_data is None:
        return _resolved((_blend(data.data_path, "data.data_path"),), spec, data)
    return _resolved(_site_blends(data.island_data, island_id), spec, data)


def _resolved(sites: tuple[Blend | None, ...], spec: TokenizerSpec, data: DataConfig) -> ResolvedData:
    tokenizer = spec.build()
    _check_vocab_size(data, tokenizer)
    return ResolvedData(
        sites=sites,
        shared=data.island_data is None,
        tokenizer=spec,
        vocab_size=tokenizer.vocab_size,
        tokenizer_identity=tokenizer.identity,
    )


def _spec(data: DataConfig) -> TokenizerSpec:
    return TokenizerSpec(data.tokenizer_type, data.tokenizer_model, data.vocab_size)


def _check_vocab_size(data: DataConfig, tokenizer: Tokenizer) -> None:
    if data.vocab_size is not None and data.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            "data.vocab_size",
            data.vocab_size,
            f"the tokenizer {data.tokenizer_model} has {tokenizer.vocab_size} tokens; leave vocab_size out",
        )


def _blend(data_path: Sequence[str | float] | str, field: str) -> Blend:
    if isinstance(data_path, str):
        return Blend((inspect_pair(data_path, field=field),), (1.0,))
    weights = [float(weight) for weight in data_path[0::2]]
    pairs = tuple(inspect_pair(str(prefix), field=field) for prefix in data_path[1::2])
    return Blend(pairs, tuple(weight / sum(weights) for weight in weights))


def _site_blends(
    island_data: Sequence[Sequence[str | float] | str], island_id: int | None
) -> tuple[Blend | None, ...]:
    blends: list[Blend | None] = []
    for site, data_path in enumerate(island_data):
        field = f"data.island_data[{site}]"
        try:
            blends.append(_blend(data_path, field))
        except ConfigError:
            if island_id is None or site == island_id:
                raise
            logger.warning("%s is not on this machine: validation here leaves out its documents", field)
            blends.append(None)
    return tuple(blends)
