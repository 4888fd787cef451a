"""A run folder read for its report; also while the run is under way."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.metrics.jsonl import read_records
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord
from dilocox.run_folder import CONFIG, METRICS, SUMMARY, island_dir, island_ids


@dataclass(frozen=True)
class IslandData:
    """Records of one island, in the order they were written."""

    island_id: int
    inner: list[InnerRecord]
    syncs: list[SyncRecord]
    evals: list[EvalRecord]
    events: list[EventRecord]


@dataclass(frozen=True)
class RunData:
    """What a report needs.

    Attributes:
        parameters: elements of the model; None while no island has told.
        summary: the merged summary; empty while the run is under way.
    """

    name: str
    config: Config
    islands: list[IslandData]
    parameters: int | None
    summary: Mapping[str, Any]

    def syncs_by_fragment(self) -> dict[int, list[SyncRecord]]:
        """Syncs of the first island that has any, by fragment."""
        found: dict[int, list[SyncRecord]] = defaultdict(list)
        for island in self.islands:
            for record in island.syncs:
                found[record.fragment].append(record)
            if found:
                break
        return dict(sorted(found.items()))


def read_run(run_dir: Path) -> RunData:
    """Reads settings, records and, if there, the summary.

    Raises:
        ConfigError: not the folder of a run that has begun.
    """
    ids = island_ids(run_dir)
    if not (run_dir / CONFIG).exists() or not ids:
        rule = f"not a run folder: it needs {CONFIG} and island_0/{METRICS}; give the folder of a run"
        raise ConfigError("RUN", str(run_dir), rule)
    islands = [_read_island(run_dir, island_id) for island_id in ids]
    summary_path = run_dir / SUMMARY
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    events = (event for island in islands for event in island.events)
    return RunData(
        name=run_dir.resolve().name,
        config=Config.model_validate(yaml.safe_load((run_dir / CONFIG).read_text())),
        islands=islands,
        parameters=summary.get("parameters") or _announced_parameters(events),
        summary=summary,
    )


def _read_island(run_dir: Path, island_id: int) -> IslandData:
    records = read_records(island_dir(run_dir, island_id) / METRICS)
    return IslandData(
        island_id=island_id,
        inner=[record for record in records if isinstance(record, InnerRecord)],
        syncs=[record for record in records if isinstance(record, SyncRecord)],
        evals=[record for record in records if isinstance(record, EvalRecord)],
        events=[record for record in records if isinstance(record, EventRecord)],
    )


def _announced_parameters(events: Iterable[EventRecord]) -> int | None:
    for event in events:
        count = event.details.get("parameters")
        if isinstance(count, int):
            return count
    return None
