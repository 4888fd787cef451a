"""Identity of a checkpoint: which settings must be equal to load it, and which may differ. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilocox.config.load import LOCAL_LEAVES
from dilocox.config.schema import Config
from dilocox.errors import CheckpointError

FORMAT = 2
IDENTITY_FILE = "dilocox.json"
OLD_READERS = {1: "version 0.1.0 (commit ea94644)"}
"""Versions of dilocox that read formats which this one does not."""

LAYOUT_LEAVES = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.ranks_per_island",
    "parallel.nodes_per_island",
    "parallel.use_distributed_optimizer",
    "parallel.sequence_parallel",
    "parallel.recompute_granularity",
    "parallel.recompute_method",
    "parallel.recompute_num_layers",
)
"""Settings that say how an island computes, not what: a checkpoint may be loaded with others."""

FREE_LEAVES = frozenset({"run.name", *LAYOUT_LEAVES})
"""What may differ beside the leaves that are local to an island: `checkpoint.load` may name another run."""


@dataclass(frozen=True)
class Layout:
    """The settings that decide which shards a rank holds."""

    tp: int
    pp: int
    dp: int
    distributed_optimizer: bool

    @classmethod
    def of(cls, config: Config) -> Layout:
        parallel = config.parallel
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            dp=parallel.data_parallel_size,
            distributed_optimizer=parallel.use_distributed_optimizer,
        )

    def __str__(self) -> str:
        optimizer = " with the distributed optimizer" if self.distributed_optimizer else ""
        return f"TP{self.tp} x PP{self.pp} x DP{self.dp}{optimizer}"


def identity_of(config: Config, vocab_size: int) -> dict[str, Any]:
    """Returns the content of the identity file of a run.

    Args:
        config: resolved.
        vocab_size: of the tokenizer, before padding.
    """
    return {
        "format": FORMAT,
        "layout": asdict(Layout.of(config)),
        "vocab_size": vocab_size,
        "settings": config.model_dump(mode="json"),
    }


def read_identity(folder: Path, config: Config, vocab_size: int) -> dict[str, Any]:
    """Reads a checkpoint's identity file and compares it with this run.

    Raises:
        CheckpointError: the file is missing, is of another format, or is of a run with other settings;
            names every setting that differs, with both values.
    """
    path = folder / IDENTITY_FILE
    if not path.is_file():
        raise CheckpointError(f"incomplete checkpoint: {path} is missing")
    found: dict[str, Any] = json.loads(path.read_text())
    if found["format"] != FORMAT:
        reader = OLD_READERS.get(found["format"], "another version")
        raise CheckpointError(
            f"{folder} has format {found['format']}, which {reader} of dilocox reads; this one reads {FORMAT}"
        )
    wanted = identity_of(config, vocab_size)
    different = list(_differences(found["settings"], wanted["settings"]))
    if found["vocab_size"] != vocab_size:
        different.append(f"the tokenizer's vocabulary is {found['vocab_size']} there, {vocab_size} here")
    if different:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(different)}")
    return found


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    for section, leaves in own.items():
        local = LOCAL_LEAVES.get(section, frozenset())
        if local is None:  # all of the section
            continue
        before = saved.get(section, {})
        for leaf in sorted(leaves.keys() | before.keys()):
            name = f"{section}.{leaf}"
            if leaf not in local and name not in FREE_LEAVES and leaves.get(leaf) != before.get(leaf):
                yield f"{name} is {before.get(leaf)!r} there, {leaves.get(leaf)!r} here"
