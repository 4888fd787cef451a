"""Inspects a `.bin/.idx` pair without torch: whether it exists and is complete, and its size."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dilocox.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes per token by Megatron's code of the type."""


@dataclass(frozen=True)
class PairInfo:
    """Facts from the index of a pair.

    Attributes:
        prefix: absolute path without extension.
        version: changes whenever the pair is rewritten; part of cache keys.
    """

    prefix: str
    num_sequences: int
    num_tokens: int
    version: str


def inspect_pair(prefix: str, *, field: str) -> PairInfo:
    """Checks that both files exist and fit each other.

    Args:
        field: the setting that named the prefix, for errors.

    Raises:
        ConfigError: a file is missing or truncated, or is not an index.
    """
    base = Path(prefix).expanduser().absolute()
    index, data = Path(f"{base}.idx"), Path(f"{base}.bin")
    for path in (index, data):
        if not path.is_file():
            advice = (
                "give the prefix without extension" if base.suffix in (".bin", ".idx") else "check the path"
            )
            raise ConfigError(field, prefix, f"{path} does not exist; {advice}")
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ConfigError(field, prefix, f"{index} is not a Megatron index; run dilocox preprocess")
    _, _, code, num_sequences, num_documents = _HEADER.unpack(header)
    token_bytes = _TOKEN_BYTES.get(code)
    expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if token_bytes is None or index.stat().st_size < expected_bytes:
        raise ConfigError(field, prefix, f"{index} is cut off or damaged; preprocess the text again")
    if num_sequences == 0:
        raise ConfigError(field, prefix, "holds no documents; preprocess some text")
    data_bytes = _data_bytes(index, num_sequences, token_bytes)
    if data.stat().st_size != data_bytes:
        found = data.stat().st_size
        rule = f"{data} has {found} bytes, its index says {data_bytes}; preprocess the text again"
        raise ConfigError(field, prefix, rule)
    status = index.stat()
    version = f"{status.st_size}.{status.st_mtime_ns}.{data_bytes}"
    return PairInfo(str(base), num_sequences, data_bytes // token_bytes, version)


def read_index(prefix: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns memory-mapped arrays of a pair that `inspect_pair` has checked.

    Returns: tokens of each sequence, shape [num_sequences]; first sequence of each document and then the
        total, shape [num_documents + 1].
    """
    index = Path(f"{prefix}.idx")
    with index.open("rb") as stream:
        _, _, _, num_sequences, num_ends = _HEADER.unpack(stream.read(_HEADER.size))
    lengths = np.memmap(index, np.int32, "r", offset=_HEADER.size, shape=(num_sequences,))
    ends = np.memmap(index, np.int64, "r", offset=_HEADER.size + 12 * num_sequences, shape=(num_ends,))
    return lengths, ends


def _data_bytes(index: Path, num_sequences: int, token_bytes: int) -> int:
    """Returns where the last sequence ends: its start plus its length."""
    lengths = np.memmap(index, np.int32, "r", offset=_HEADER.size, shape=(num_sequences,))
    starts = np.memmap(index, np.int64, "r", offset=_HEADER.size + 4 * num_sequences, shape=(num_sequences,))
    return int(starts[-1]) + int(lengths[-1]) * token_bytes
