"""Which combinations of settings make sense. No torch here.

Types and ranges of single leaves are in `config.py`; the rules that take two settings to judge are in
`rules/`. A setting that would have no effect is refused too: whoever wrote it expects one.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.config import Config
from dilocox.rules import data, inner, island, outer, wan


def check(config: Config) -> None:
    """Refuses impossible combinations.

    Args:
        config: resolved by `config_defaults.resolve`.

    Raises:
        ConfigError: names field, value, rule and what to do, for the first broken rule.
    """
    rules: tuple[Callable[[Config], None], ...] = (
        island.layout,
        island.heads,
        island.device,
        island.sequence_parallel,
        island.recompute,
        island.model_without_effect,
        data.data_paths,
        data.tokenizer,
        data.split,
        inner.batch,
        inner.learning_rate,
        inner.inner_optimizer,
        outer.interval,
        outer.delay,
        outer.mixing,
        outer.codec,
        outer.low_rank,
        outer.guards,
        wan.islands,
        wan.addresses,
        wan.tracking,
    )
    for rule in rules:
        rule(config)


def hints(config: Config) -> list[str]:
    """What is allowed but may surprise; one sentence each, for the log and `plan`."""
    sync, iters = config.outer, config.inner.train_iters
    found = []
    if sync.method == "diloco" and iters % sync.sync_interval:
        found.append(
            f"inner.train_iters = {iters} is not a multiple of outer.sync_interval = {sync.sync_interval}: "
            "the steps after a fragment's last sync never reach the anchor"
        )
    if sync.delay_mode == "delayed_reset":
        found.append(
            "outer.delay_mode = 'delayed_reset' is there for comparison: it is unstable at the usual outer "
            "lr 0.7 and momentum 0.9; prefer 'streaming' or 'delayed_keep'"
        )
    if config.parallel.num_islands == 1 and sync.codec != "none":
        found.append("parallel.num_islands = 1: nothing crosses the WAN, so outer.codec is not used")
    return found
