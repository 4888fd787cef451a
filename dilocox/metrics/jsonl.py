"""`metrics.jsonl` as a file: whole lines only, unique steps after a resume, readable while it grows."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dilocox.metrics.records import EventRecord, Record, from_line, to_line


class JsonlWriter:
    """Appends records, each with one `write` call, so that no reader ever sees half a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: Record) -> None:
        os.write(self._file, to_line(record, time_s=time.time()).encode())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JsonlTail:
    """Reads what has been added since the last call; a line without its newline waits for the rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Record]:
        """A missing file is an empty one; a file that shrank (a resume) is read again from its start."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [from_line(line) for line in whole.decode().splitlines()]


def read_records(path: Path) -> list[Record]:
    """All whole lines of the file."""
    return JsonlTail(path).read_new()


def truncate_after(path: Path, inner_step: int) -> list[Record]:
    """Drops what a resumed run is going to repeat and returns what stays.

    Inner steps, syncs and validations after `inner_step` go, so that every step is there once. Events
    stay: they tell what happened, also on a path that was rolled back.
    """
    if not path.exists():
        return []
    _drop_torn_line(path)
    kept: list[Record] = []
    lines: list[str] = []
    for line in path.read_text().splitlines(keepends=True):
        record = from_line(line)
        if isinstance(record, EventRecord) or record.inner_step <= inner_step:
            kept.append(record)
            lines.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines))
    temporary.replace(path)
    return kept


def _drop_torn_line(path: Path) -> None:
    """A killed process may leave a last line without its end; the next record must not be glued to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
