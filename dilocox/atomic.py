"""Files and folders that appear complete or not at all, even if writing them is interrupted. No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4


def fsync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file so that readers see the old content or the new one, never a part of it.

    Args:
        path: missing parent folders are made.
        durable: flush it to the disk before this returns, so that it also survives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: islands on other hosts may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_text(text)
        # The content must be on the disk before the name is: the other order can leave an empty file.
        if durable:
            fsync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync(path.parent)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes a mapping as JSON, atomically; NaN and infinity are refused (`ValueError`)."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `folder` at the end, or removed after an error.

    Several processes may fill the same folder at once if they all write the same: the first one wins.

    Raises:
        OSError: the folder cannot be written.
    """
    building = folder.with_name(f".{folder.name}.{uuid4().hex}.tmp")
    building.mkdir(parents=True)
    try:
        yield building
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


class PendingFiles:
    """A context in which files are written under temporary names; `commit()` renames them all.

    Leaving the context without `commit()` removes them.
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
        """Returns a temporary path, in the same folder, for a file that will be called `target`.

        Files get their names in the order of these calls.
        """
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        self._targets[temporary] = target
        return temporary

    def commit(self) -> None:
        """Flushes the files to the disk and renames them; if one rename fails, all targets are removed."""
        for temporary in self._targets:
            fsync(temporary)
        placed: list[Path] = []
        try:
            # Old files go first, so that an old and a new part of a pair never stand side by side.
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
            fsync(folder)
