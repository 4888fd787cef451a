"""TensorBoard and Weights & Biases: optional packages, used only if `logging` names them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.metrics.records import EvalRecord, InnerRecord, Record, SyncRecord
from dilocox.run_folder import tensorboard_dir

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives scalars."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_packages(config: Config) -> None:
    """Checks before anything starts that the packages of the chosen sinks are installed.

    Raises:
        ConfigError: `logging.tensorboard` or `logging.wandb` without its package.
    """
    for leaf in ("tensorboard", "wandb"):
        if getattr(config.logging, leaf) and importlib.util.find_spec(leaf) is None:
            rule = f"the package {leaf} is not installed; pip install 'dilocox[{leaf}]' or set it to false"
            raise ConfigError(f"logging.{leaf}", True, rule)


def open_sinks(config: Config, *, run_dir: Path, island_id: int) -> list[Sink]:
    """Opens the sinks of the configuration; one writer per island. See `check_packages`."""
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        sinks.append(TensorBoardSink(tensorboard_dir(run_dir, island_id)))
    if config.logging.wandb:
        sinks.append(WandbSink(config, run_dir=run_dir, island_id=island_id))
    return sinks


def scalars_of(record: Record) -> dict[str, float]:
    """Names and values of a record's curves; events have none."""
    if isinstance(record, InnerRecord):
        return {
            "inner/lm_loss": record.lm_loss,
            "inner/grad_norm": record.grad_norm,
            "inner/lr": record.lr,
            "inner/tokens_per_s": record.tokens / max(record.step_time_s, 1e-9),
        }
    if isinstance(record, EvalRecord):
        return {"eval/val_loss": record.val_loss}
    if isinstance(record, SyncRecord):
        part = f"fragment_{record.fragment}"
        values = {
            f"sync/pseudo_gradient_norm/{part}": record.pseudo_gradient_norm,
            "sync/num_participants": float(record.num_participants),
            "sync/payload_bytes_sent": float(record.payload_bytes_sent),
            "sync/exchange_s": record.exchange_s,
            "sync/waiting_s": record.waiting_s,
            "sync/blocked_s": record.blocked_s,
        }
        if record.cosine_to_mean is not None:
            values[f"sync/cosine_to_mean/{part}"] = record.cosine_to_mean
        return values
    return {}


class TensorBoardSink:
    """Event files below `tensorboard/island_I/`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run per island, grouped by the name of the run. Without a login it records offline."""

    def __init__(self, config: Config, *, run_dir: Path, island_id: int) -> None:
        import wandb

        mode = "online" if wandb.login(prompt=False) else "offline"
        if mode == "offline":
            logger.warning(
                "W&B: not logged in, recording offline in %s; upload later with `wandb sync`", run_dir
            )
        self._run: Any = wandb.init(
            project=config.logging.wandb_project,
            group=config.run.name,
            name=f"{config.run.name}-island-{island_id}",
            dir=str(run_dir),
            mode=mode,
            config=config.model_dump(),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "inner_step": step})

    def close(self) -> None:
        self._run.finish()
