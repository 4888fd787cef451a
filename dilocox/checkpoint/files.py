"""Folders of checkpoints: atomic appearance, tracker, retention. No torch here.

island_0/iter_0000100/                        one checkpoint, complete or not there at all
island_0/latest_checkpointed_iteration.txt    Megatron's tracker, written last
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from dilocox.atomic import fsync, write_atomic
from dilocox.errors import CheckpointError
from dilocox.run_folder import TRACKER

_FOLDER = re.compile(r"^iter_(\d{7,})$")
_UNFINISHED = ".unfinished"


def folder_of(directory: Path, iteration: int) -> Path:
    """Returns the folder of the checkpoint of an iteration."""
    return directory / f"iter_{iteration:07d}"


def latest(directory: Path) -> int | None:
    """Returns the iteration of the newest complete checkpoint; None where there is none.

    Raises:
        CheckpointError: the tracker names a checkpoint that is not there, or is not a number.
    """
    tracker = directory / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(f"{tracker} holds {text!r}, which is not an iteration")
    if not folder_of(directory, int(text)).is_dir():
        found = ", ".join(str(iteration) for iteration in iterations(directory)) or "none"
        raise CheckpointError(f"{tracker} names iteration {text}, but the checkpoints there are: {found}")
    return int(text)


def iterations(directory: Path) -> list[int]:
    """Returns the iterations of all complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    matches = (_FOLDER.match(entry.name) for entry in directory.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def begin(directory: Path, iteration: int) -> Path:
    """Makes an empty folder to write a checkpoint into; no reader looks at it until `commit`."""
    unfinished = unfinished_of(directory, iteration)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def unfinished_of(directory: Path, iteration: int) -> Path:
    """Returns the folder that `begin` makes."""
    return directory / (_UNFINISHED + folder_of(directory, iteration).name)


def contents(folder: Path) -> dict[str, int]:
    """Returns the bytes of every file in a folder, by its path there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def check_complete(folder: Path, expected: dict[str, int]) -> None:
    """Compares a checkpoint's files with those listed when it was written.

    Raises:
        CheckpointError: names the first file that is missing or has another size.
    """
    found = contents(folder)
    for name, size in expected.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes, not {size}" if name in found else "is missing"
            raise CheckpointError(f"incomplete checkpoint: {folder / name} {state}")


def commit(directory: Path, iteration: int, *, retain: int) -> None:
    """Makes a finished checkpoint appear under its name, then moves the tracker, then deletes old ones.

    A crash at any point leaves the tracker on a complete checkpoint.

    Args:
        retain: number of newest checkpoints to keep, at least one.
    """
    unfinished, final = unfinished_of(directory, iteration), folder_of(directory, iteration)
    # Contents reach the disk before the name does, and the name before the tracker: after a power failure the
    # tracker must not name a checkpoint with holes.
    for entry in sorted(unfinished.rglob("*")):
        fsync(entry)
    fsync(unfinished)
    replaced = None
    if final.exists():  # a run that resumed from an older checkpoint has come here again
        replaced = directory / f"{_UNFINISHED}.replaced.{final.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    fsync(directory)
    _write_tracker(directory, iteration)
    if replaced is not None:
        shutil.rmtree(replaced)
    for old in [i for i in iterations(directory) if i != iteration][: 1 - retain or None]:
        shutil.rmtree(folder_of(directory, old), ignore_errors=True)


def abandon(directory: Path, iteration: int) -> None:
    """Removes what a failed save has written, so that it takes no space."""
    shutil.rmtree(unfinished_of(directory, iteration), ignore_errors=True)


def _write_tracker(directory: Path, iteration: int) -> None:
    write_atomic(directory / TRACKER, f"{iteration}\n", durable=True)
