"""Small corpora of known tokens, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dilocox.atomic import PendingFiles
from dilocox.config.schema import Config
from dilocox.data.preprocess.pair_writer import PairWriter

VOCAB_SIZE = 60_000


def write_pair(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    """Write a pair and return its prefix."""
    with PendingFiles() as pending:
        writer = PairWriter(str(prefix), "uint16", pending)
        for document in documents:
            writer.add_documents(np.array(document), [len(document)])
        writer.finish()
        pending.commit()
    return str(prefix)


def numbered_documents(num_documents: int, length: int, *, base: int = 0) -> list[list[int]]:
    """Documents whose tokens all say which document they are from: base, base, ..., base+1, ..."""
    return [[base + number] * length for number in range(num_documents)]


def make_config(data_path: object, **sections: dict[str, object]) -> Config:
    """A configuration on NullTokenizer corpora; sections override leaf by leaf."""
    values: dict[str, dict[str, object]] = {
        "model": {"seq_length": 8},
        "parallel": {"num_islands": 1},
        "data": {
            "data_path": data_path,
            "tokenizer_type": "NullTokenizer",
            "vocab_size": VOCAB_SIZE,
            "split": "80,20,0",
        },
        "inner": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "logging": {"eval_iters": 2},
    }
    for section, leaves in sections.items():
        values[section] = {**values.get(section, {}), **leaves}
    return Config.model_validate(values)
