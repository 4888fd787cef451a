"""Every path of a run, and what may happen to its folder at the start. No torch.

runs/NAME/
  config.yaml                     resolved settings, written by `dilocox launch`
  summary.json report.html loss.png figures/    results of the whole run
  launch.log logs/ submit/ lighthouse           of the launcher, or of the SLURM jobs
  island_I/                       metrics.jsonl summary.json rank_R.log torchrun/
  checkpoints/island_I/           unless `checkpoint.save` names another folder
  data_cache/                     Megatron's index files, unless `data.data_cache_path` names another folder
  tensorboard/island_I/
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from dilocox.atomic import write_atomic
from dilocox.config.load import dump
from dilocox.config.schema import Config
from dilocox.errors import ConfigError

Start = Literal["new", "resume", "overwrite"]
TRACKER = "latest_checkpointed_iteration.txt"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
PAGE = "report.html"
LOSS_FIGURE = "loss.png"


def run_dir_of(config: Config) -> Path:
    """Folder of a run."""
    return Path(config.run.output_dir) / config.run.name


def checkpoint_dir_of(config: Config) -> Path:
    """Folder that holds the `island_I/` folders of the checkpoints that this run writes."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir_of(config) / "checkpoints"


def load_dir_of(config: Config) -> Path:
    """The same of the checkpoints that this run resumes from."""
    return Path(config.checkpoint.load) if config.checkpoint.load else checkpoint_dir_of(config)


def data_cache_dir_of(config: Config) -> Path:
    """Folder of Megatron's index files."""
    return (
        Path(config.data.data_cache_path)
        if config.data.data_cache_path
        else run_dir_of(config) / "data_cache"
    )


def island_dir(parent: Path, island_id: int) -> Path:
    """Folder of one island below the run folder, or below a folder of checkpoints."""
    return parent / f"island_{island_id}"


def island_ids(run_dir: Path) -> list[int]:
    """Islands that have left something in the run folder."""
    folders = (path.name.removeprefix("island_") for path in run_dir.glob("island_*") if path.is_dir())
    return sorted(int(name) for name in folders if name.isdecimal())


def rank_log(folder: Path, rank: int) -> Path:
    """Log of one rank, in the folder of its island."""
    return folder / f"rank_{rank}.log"


def torchrun_dir(run_dir: Path, island_id: int) -> Path:
    """Folder in which torchrun keeps the output of an island's ranks."""
    return island_dir(run_dir, island_id) / "torchrun"


def tensorboard_dir(run_dir: Path, island_id: int) -> Path:
    """Folder of an island's event files."""
    return island_dir(run_dir / "tensorboard", island_id)


def figures_dir(run_dir: Path) -> Path:
    """Folder of the report's figures."""
    return run_dir / "figures"


def launch_log(run_dir: Path) -> Path:
    """What `dilocox launch` has shown."""
    return run_dir / "launch.log"


def job_log_dir(run_dir: Path) -> Path:
    """Folder of the output of SLURM jobs."""
    return run_dir / "logs"


def job_script_dir(run_dir: Path, site: str) -> Path:
    """Folder of the job scripts that `dilocox submit` has written for a site."""
    return run_dir / "submit" / site


def lighthouse_file(run_dir: Path) -> Path:
    """File in which a lighthouse job leaves its address."""
    return run_dir / "lighthouse"


def has_checkpoint(folder: Path) -> bool:
    """Whether any island has a complete checkpoint in a folder of checkpoints."""
    return any(folder.glob(f"island_*/{TRACKER}"))


def check_writable(config: Config) -> None:
    """Finds out whether the folders that a run needs can be written; leaves no trace.

    Raises:
        ConfigError: names the setting whose folder cannot be written.
    """
    _check_writable("run.output_dir", config.run.output_dir, run_dir_of(config))
    if config.checkpoint.save is not None:
        _check_writable("checkpoint.save", config.checkpoint.save, checkpoint_dir_of(config))
    if config.data.data_cache_path is not None:
        _check_writable("data.data_cache_path", config.data.data_cache_path, data_cache_dir_of(config))


def check(config: Config, start: Start) -> None:
    """Finds out whether the run may start; leaves no trace.

    Raises:
        ConfigError: the run has progress and `start` is `new`; or what `overwrite` would have to delete is
            not a run folder, or lies outside of it; or a folder that the run needs cannot be written.
    """
    run_dir, checkpoints = run_dir_of(config), checkpoint_dir_of(config)
    check_writable(config)
    if start == "new" and (has_checkpoint(checkpoints) or any(run_dir.glob(f"island_*/{METRICS}"))):
        advice = "--resume continues it, --overwrite starts anew, another name keeps both"
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

    Returns: True if there is a checkpoint to resume from.

    Raises:
        ConfigError: see `check`.
    """
    check(config, start)
    run_dir = run_dir_of(config)
    resumable = start == "resume" and has_checkpoint(load_dir_of(config))
    try:
        if start == "overwrite" and run_dir.exists():
            shutil.rmtree(run_dir)
        for status in (run_dir / SUMMARY, *run_dir.glob(f"island_*/{SUMMARY}")):
            status.unlink(missing_ok=True)
        write_atomic(run_dir / CONFIG, dump(config))
    except OSError as error:
        raise _not_writable("run.output_dir", config.run.output_dir, error) from error
    return resumable


def _check_writable(field: str, value: str, folder: Path) -> None:
    """Tries the folder, or its nearest parent that exists: what is missing is made later."""
    try:
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that no file system takes
        raise _not_writable(field, value, error) from error
    if not parent.is_dir():
        raise ConfigError(field, value, f"{parent} is a file; choose another folder")
    # Permission bits say little (root, read-only and network file systems): only an attempt tells.
    try:
        Path(tempfile.mkdtemp(prefix=".dilocox-", dir=parent)).rmdir()
    except OSError as error:
        raise _not_writable(field, value, error) from error


def _not_writable(field: str, value: str, error: OSError) -> ConfigError:
    return ConfigError(field, value, f"cannot be written ({error.strerror}); choose another folder or name")
