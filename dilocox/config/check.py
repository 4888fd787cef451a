"""Which combinations of settings make sense. No torch here.

Types and ranges of single leaves are in `config.py`; the rules that take two settings to judge are in
`rules/`. A setting that would have no effect is refused too: whoever wrote it expects one.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.config.rules import data, inner, island, outer, wan
from dilocox.config.schema import Config, OuterConfig

MOST_DROPPED = 0.1
"""Share of the progress that `streaming` may drop without a hint. With 10 % alpha 0 was the best of the
sweep, with 20 % it lost 0.06 nats to alpha 0.5 (benchmarks/results/outer_settings_h30_sweep.json, _h100_)."""


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


def dropped_share(outer: OuterConfig) -> float:
    """Share of the islands' progress that `streaming` overwrites when it applies: (1 - alpha) * tau / H."""
    return (1 - outer.mixing_alpha) * outer.overlap_delay / outer.sync_interval


def warnings(config: Config) -> list[str]:
    """What is allowed but may surprise; one sentence each, for the log and `plan`."""
    sync, iters = config.outer, config.inner.train_iters
    found = []
    if sync.method == "diloco" and iters % sync.sync_interval:
        found.append(
            f"inner.train_iters = {iters} is not a multiple of outer.sync_interval = {sync.sync_interval}: "
            "the steps after a fragment's last sync never reach the anchor"
        )
    if sync.delay_mode == "streaming" and (dropped := dropped_share(sync)) > MOST_DROPPED:
        found.append(
            f"outer.mixing_alpha = {sync.mixing_alpha:g} with overlap_delay = {sync.overlap_delay} and "
            f"sync_interval = {sync.sync_interval} drops {dropped:.0%} of the islands' progress; shorten the "
            "delay, lengthen the interval, or keep a part with mixing_alpha 0.5"
        )
    if sync.delay_mode == "delayed_reset":
        found.append(
            "outer.delay_mode = 'delayed_reset' is there for comparison: it is unstable at the usual outer "
            "lr 0.7 and momentum 0.9; prefer 'streaming' or 'delayed_keep'"
        )
    if config.parallel.num_islands == 1 and sync.codec != "none":
        found.append("parallel.num_islands = 1: nothing crosses the WAN, so outer.codec is not used")
    return found
