"""`metrics.jsonl` as a file: whole lines only, unique steps after a resume, readable while it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from dilocox.metrics.records import EventRecord, InnerRecord, Record, SyncRecord, from_line, to_line

CHECKPOINT = "checkpoint"
"""Name of the event that follows a saved checkpoint; records before it belong to the checkpoint."""


class JsonlWriter:
    """Appends records, each with one `write` call, so that no reader ever sees half a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: Record, *, time_s: float | None = None) -> None:
        """Appends one line.

        Args:
            time_s: when it happened, in seconds since the epoch; None: now.
        """
        os.write(self._file, to_line(record, time_s=time.time() if time_s is None else time_s).encode())

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
        """Returns the new records. A missing file is empty; a file that shrank (resume) is read anew."""
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
    """Returns all whole lines of the file."""
    return JsonlTail(path).read_new()


def truncate_after(path: Path, inner_step: int) -> list[Record]:
    """Drops the records that a run resumed from the checkpoint of `inner_step` repeats; returns the others.

    Afterwards every inner step, sync and validation is there once. A sync counts by when it was applied,
    which can be later than the step it names: what was in flight in the checkpoint is applied again.
    Events stay, also those of steps that were rolled back.
    """
    if not path.exists():
        return []
    _drop_torn_line(path)
    lines = path.read_text().splitlines(keepends=True)
    records = [from_line(line) for line in lines]
    last = _position_of_checkpoint(records, inner_step)
    kept = [index for index, record in enumerate(records) if _stays(record, inner_step, index <= last)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines[index] for index in kept))
    temporary.replace(path)
    return [records[index] for index in kept]


def _stays(record: Record, inner_step: int, before_checkpoint: bool) -> bool:
    if isinstance(record, EventRecord):
        return True
    return record.inner_step <= inner_step and (before_checkpoint or not isinstance(record, SyncRecord))


def _position_of_checkpoint(records: Sequence[Record], inner_step: int) -> int:
    """Returns the index of the checkpoint's event, else (killed before that) of the last inner step."""
    position = -1
    for index, record in enumerate(records):
        is_event = isinstance(record, EventRecord) and record.event == CHECKPOINT
        if is_event and record.inner_step == inner_step:
            position = index
    if position >= 0:
        return position
    steps = (i for i, r in enumerate(records) if isinstance(r, InnerRecord) and r.inner_step <= inner_step)
    return max(steps, default=-1)


def _drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line of a killed process: the next record would be appended to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
