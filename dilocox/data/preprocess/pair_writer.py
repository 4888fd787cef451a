"""Write files so that either all of them appear or none does.

Megatron's `.bin/.idx` pair is only usable together, so the files grow under temporary names in the target
folder and are renamed at the very end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


class PendingFiles:
    """A context in which files are written under temporary names; `commit()` renames them all.

    Leaving the context without `commit()`, for whatever reason, removes them.
    """

    def __init__(self) -> None:
        self._targets: dict[Path, Path] = {}

    def __enter__(self) -> PendingFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for temporary in self._targets:
            with suppress(OSError):
                temporary.unlink()

    def add(self, target: Path) -> Path:
        """Temporary path, in the same folder, of a file that will be called `target`.

        Files get their names in the order of these calls.
        """
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        self._targets[temporary] = target
        return temporary

    def commit(self) -> None:
        """Flush to disk and give the files their names; one that cannot be renamed takes the others along.

        Old files of these names go first, so that old and new parts never stand side by side.
        """
        for temporary in self._targets:
            _sync_to_disk(temporary)
        placed: list[Path] = []
        try:
            for target in self._targets.values():
                target.unlink(missing_ok=True)
            for temporary, target in self._targets.items():
                placed.append(target)
                temporary.rename(target)
        except BaseException:
            for target in placed:
                target.unlink(missing_ok=True)
            raise
        for folder in {target.parent for target in self._targets.values()}:
            _sync_to_disk(folder)


class PairWriter:
    """One `.bin/.idx` pair in Megatron's format, pending until the files are committed."""

    def __init__(self, prefix: str, dtype: str, pending: PendingFiles) -> None:
        """Start a pair `prefix.bin`, `prefix.idx`."""
        data = pending.add(Path(prefix + ".bin"))
        self._index = pending.add(Path(prefix + ".idx"))  # named last: a pair counts once its index is there
        builder = _megatron_format().IndexedDatasetBuilder
        self._builder: IndexedDatasetBuilder = builder(str(data), dtype=np.dtype(dtype).type)
        self._prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0

    def add_documents(self, tokens: NDArray[Any], lengths: Sequence[int]) -> None:
        """Append documents that stand one after another in `tokens`, shape [sum of lengths]."""
        start = 0
        for length in lengths:
            self._builder.add_document(tokens[start : start + length], [length])
            start += length
        self.num_documents += len(lengths)
        self.num_tokens += start

    def finish(self) -> None:
        """Close the data file and write the index."""
        self._builder.finalize(str(self._index))

    def describe(self) -> str:
        """For example `out_text_document.bin/.idx: 674 documents, 3978546 tokens`."""
        return f"{self._prefix}.bin/.idx: {self.num_documents} documents, {self.num_tokens} tokens"

    def close(self) -> None:
        """Let go of the data file of a pair that is given up; a full disk cannot stop this."""
        with suppress(OSError):
            self._builder.data_file.close()


def token_dtype(vocab_size: int) -> str:
    """NumPy name of the smallest token type that Megatron uses for a vocabulary."""
    name: str = _megatron_format().DType.optimal_dtype(vocab_size).__name__
    return name


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that temporary files are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _megatron_format() -> ModuleType:
    """Import late and quietly: it takes seconds, and wrong input shall be reported before."""
    from dilocox.backend import quiet_third_parties

    quiet_third_parties()
    from megatron.core.datasets import indexed_dataset

    module: ModuleType = indexed_dataset
    return module


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
