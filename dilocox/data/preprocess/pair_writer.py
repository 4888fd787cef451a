"""Writes a `.bin/.idx` pair in Megatron's format. No torch until the first pair is opened.

The two files are only usable together, so they grow under temporary names and are renamed at the very end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dilocox.atomic import PendingFiles

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


class PairWriter:
    """One `.bin/.idx` pair in Megatron's format, pending until the files are committed."""

    def __init__(self, prefix: str, dtype: str, pending: PendingFiles) -> None:
        """Starts a pair `prefix.bin`, `prefix.idx`."""
        data = pending.add(Path(prefix + ".bin"))
        self._index = pending.add(Path(prefix + ".idx"))  # named last: a pair counts once its index is there
        builder = _megatron_format().IndexedDatasetBuilder
        self._builder: IndexedDatasetBuilder = builder(str(data), dtype=np.dtype(dtype).type)
        self._prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0

    def add_documents(self, tokens: NDArray[Any], lengths: Sequence[int]) -> None:
        """Appends documents that stand one after another in `tokens`, shape [sum of lengths]."""
        start = 0
        for length in lengths:
            self._builder.add_document(tokens[start : start + length], [length])
            start += length
        self.num_documents += len(lengths)
        self.num_tokens += start

    def finish(self) -> None:
        """Closes the data file and writes the index."""
        self._builder.finalize(str(self._index))

    def describe(self) -> str:
        """Returns for example `out_text_document.bin/.idx: 674 documents, 3978546 tokens`."""
        return f"{self._prefix}.bin/.idx: {self.num_documents} documents, {self.num_tokens} tokens"

    def close(self) -> None:
        """Closes the data file of a pair that is given up; a full disk cannot stop this."""
        with suppress(OSError):
            self._builder.data_file.close()


def token_dtype(vocab_size: int) -> str:
    """Returns the NumPy name of the smallest token type that Megatron uses for a vocabulary."""
    name: str = _megatron_format().DType.optimal_dtype(vocab_size).__name__
    return name


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM unwind the stack as Ctrl-C does, so that temporary files are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _megatron_format() -> ModuleType:
    """Imports late and quietly: it takes seconds, and wrong input must be reported before."""
    from dilocox.backend import quiet_third_parties

    quiet_third_parties()
    from megatron.core.datasets import indexed_dataset

    module: ModuleType = indexed_dataset
    return module
