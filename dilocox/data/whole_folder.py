"""Fill a folder so that it exists complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets the name `folder` when the context ends well, and goes away otherwise.

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
