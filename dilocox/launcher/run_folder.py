"""The run folder at the start: never overwrite progress by accident, keep the resolved settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from dilocox.config import Config
from dilocox.config_load import dump
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


def prepare(config: Config, start: Start) -> bool:
    """Makes the run folder ready and writes `config.yaml`.

    Returns: True if there is a checkpoint to go on from.

    Raises:
        ConfigError: the run has progress and `start` is `new`; or checkpoints that lie outside of the run
            folder would have to be overwritten.
    """
    run_dir, checkpoints = run_dir_of(config), checkpoint_dir_of(config)
    resumable = start == "resume" and has_checkpoint(Path(config.checkpoint.load or checkpoints))
    if start == "new" and (has_checkpoint(checkpoints) or any(run_dir.glob(f"island_*/{METRICS}"))):
        advice = "--resume goes on with it, --overwrite starts anew, another name keeps both"
        raise ConfigError("run.name", config.run.name, f"{run_dir} already holds a run; {advice}")
    if start == "overwrite":
        _remove_run(run_dir)
        if has_checkpoint(checkpoints):
            rule = "holds checkpoints outside of the run folder, which are not overwritten; move them away"
            raise ConfigError("checkpoint.save", str(checkpoints), rule)
    for verdict in (run_dir / SUMMARY, *run_dir.glob(f"island_*/{SUMMARY}")):
        verdict.unlink(missing_ok=True)
    write_atomic(run_dir / CONFIG, dump(config))
    return resumable


def _remove_run(run_dir: Path) -> None:
    """Removes a run folder; a folder that is not one is left alone."""
    if not run_dir.exists():
        return
    if not (run_dir / CONFIG).exists():
        if any(run_dir.iterdir()):
            raise ConfigError("run.name", run_dir.name, f"{run_dir} is not a run folder; choose another name")
        return
    shutil.rmtree(run_dir)
