"""Which combinations of settings make sense. No torch here.

Types and ranges of single leaves are in `schema.py`; the rules that take two settings to judge are in
`rules/`. A setting that would have no effect is refused, or named in `warnings.py`: its author expects one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dilocox.config.rules import data, inner, logging, model, outer, parallel, wan
from dilocox.config.schema import Config

_RULES: tuple[Callable[[Config], None], ...] = (
    parallel.layout,
    model.heads,
    model.dropout,
    model.without_effect,
    parallel.device,
    parallel.sequence_parallel,
    parallel.recompute,
    data.data_paths,
    data.tokenizer,
    data.split,
    inner.batch,
    inner.learning_rate,
    inner.final_decay,
    inner.inner_optimizer,
    outer.interval,
    outer.fragments,
    outer.delay,
    outer.mixing,
    outer.codec,
    outer.low_rank,
    outer.guards,
    wan.islands,
    wan.addresses,
    logging.tracking,
    logging.validation,
)


def check(config: Config) -> None:
    """Refuses impossible combinations.

    Args:
        config: resolved by `defaults.resolve`.

    Raises:
        ConfigError: names field, value, rule and what to do, for the first broken rule.
    """
    for rule in _RULES:
        rule(config)


def check_device(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Refuses what the device cannot do that `run.device: auto` has come to.

    `check` cannot know: it runs without torch. Every program that knows the device calls this before it
    starts a process group.

    Args:
        config: resolved by `defaults.resolve`.
        device: kind of device that the ranks compute on.

    Raises:
        ConfigError: see `check`.
    """
    parallel.on_device(config, device)
