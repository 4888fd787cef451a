"""Names inside a run folder, and files that are either there in full or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"


def island_dir(run_dir: Path, island_id: int) -> Path:
    return run_dir / f"island_{island_id}"


def island_ids(run_dir: Path) -> list[int]:
    """Islands that have left something in the run folder."""
    folders = (path.name.removeprefix("island_") for path in run_dir.glob("island_*") if path.is_dir())
    return sorted(int(name) for name in folders if name.isdecimal())


def write_atomic(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")  # islands on other hosts write it too
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
