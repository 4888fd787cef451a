"""Rules on services that curves are sent to, and on validation."""

from __future__ import annotations

from dilocox.config.rules.require import require_default
from dilocox.config.schema import Config


def tracking(config: Config) -> None:
    """A project needs its service."""
    if not config.logging.wandb:
        require_default(config.logging, "logging", ("wandb_project",), "unless wandb is true")


def validation(config: Config) -> None:
    """A run without validation has no interval between validations."""
    if config.logging.eval_iters == 0:
        require_default(config.logging, "logging", ("eval_interval",), "with eval_iters 0")
