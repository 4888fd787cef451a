"""The run folder at the start: never overwrite progress by accident, keep the resolved settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from dilocox.config.load import dump
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.metrics.files import CONFIG, METRICS, SUMMARY, write_atomic

Start = Literal["new", "resume", "overwrite"]
TRACKER = "latest_checkpointed_iteration.txt"


def run_dir_of(config: Config) -> Path:
    return Path(config.run.output_dir) / config.run.name


def checkpoint_dir_of(config: Config) -> Path:
    """Folder that holds `island_I/` folders of checkpoints."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir_of(config) / "checkpoints"


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob(f"island_*/{TRACKER}"))


def check(config: Config, start: Start) -> None:
    """Finds out whether the run may start, and changes nothing.

    Raises:
        ConfigError: the run has progress and `start` is `new`; or what `overwrite` would have to delete is
            not a run folder, or lies outside of it.
    """
    run_dir, checkpoints = run_dir_of(config), checkpoint_dir_of(config)
    if start == "new" and (has_checkpoint(checkpoints) or any(run_dir.glob(f"island_*/{METRICS}"))):
        advice = "--resume goes on with it, --overwrite starts anew, another name keeps both"
        raise ConfigError("run.name", config.run.name, f"{run_dir} already holds a run; {advice}")
    if start != "overwrite":
        return
    if run_dir.exists() and any(run_dir.iterdir()) and not (run_dir / CONFIG).exists():
        raise ConfigError("run.name", config.run.name, f"{run_dir} is not a run folder; choose another name")
    if has_checkpoint(checkpoints) and not checkpoints.resolve().is_relative_to(run_dir.resolve()):
        rule = "holds checkpoints outside of the run folder, which are not overwritten; move them away"
        raise ConfigError("checkpoint.save", str(checkpoints), rule)


def prepare(config: Config, start: Start) -> bool:
    """Makes the run folder ready and writes `config.yaml`.

    Returns: True if there is a checkpoint to go on from.

    Raises:
        ConfigError: see `check`.
    """
    check(config, start)
    run_dir = run_dir_of(config)
    resumable = start == "resume" and has_checkpoint(
        Path(config.checkpoint.load or checkpoint_dir_of(config))
    )
    if start == "overwrite" and run_dir.exists():
        shutil.rmtree(run_dir)
    for verdict in (run_dir / SUMMARY, *run_dir.glob(f"island_*/{SUMMARY}")):
        verdict.unlink(missing_ok=True)
    write_atomic(run_dir / CONFIG, dump(config))
    return resumable
