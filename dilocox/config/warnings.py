"""Warnings about legal but questionable settings, one sentence each. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dilocox.config.schema import Config, OuterConfig, Section

MOST_DROPPED = 0.1
"""Share of the progress that `streaming` may drop without a warning. With 10 % alpha 0 was the best of the
sweep, with 20 % it lost 0.06 nats to alpha 0.5 (benchmarks/results/outer_settings_h30_sweep.json, _h100_)."""

MOST_HELD_BACK = 0.01
"""Share of the documents that the unread test share may hold back without a warning."""


def find_warnings(config: Config) -> list[str]:
    """All warnings about a resolved configuration, for the log and `plan`."""
    rules: tuple[Callable[[Config], Iterator[str]], ...] = (
        _lost_progress,
        _delay_mode,
        _unused_wan,
        _intervals,
        _test_share,
    )
    return [text for rule in rules for text in rule(config)]


def dropped_share(outer: OuterConfig) -> float:
    """Share of the islands' progress that `streaming` overwrites when it applies: (1 - alpha) * tau / H."""
    return (1 - outer.mixing_alpha) * outer.overlap_delay / outer.sync_interval


def _lost_progress(config: Config) -> Iterator[str]:
    outer, iters = config.outer, config.inner.train_iters
    if outer.method == "diloco" and iters % outer.sync_interval:
        yield (
            f"inner.train_iters = {iters} is not a multiple of outer.sync_interval = {outer.sync_interval}: "
            "the steps after a fragment's last sync never reach the anchor"
        )
    if outer.delay_mode == "streaming" and (dropped := dropped_share(outer)) > MOST_DROPPED:
        yield (
            f"outer.mixing_alpha = {outer.mixing_alpha:g} with overlap_delay = {outer.overlap_delay} and "
            f"sync_interval = {outer.sync_interval} drops {dropped:.0%} of the islands' progress; shorten "
            "the delay, lengthen the interval, or keep a part with mixing_alpha 0.5"
        )


def _delay_mode(config: Config) -> Iterator[str]:
    if config.outer.delay_mode == "delayed_reset":
        yield (
            "outer.delay_mode = 'delayed_reset' is there for comparison: it is unstable at the usual outer "
            "lr 0.7 and momentum 0.9; prefer 'streaming' or 'delayed_keep'"
        )


def _unused_wan(config: Config) -> Iterator[str]:
    """Settings of a WAN that nothing crosses: a run with one island is one override away."""
    if config.parallel.num_islands > 1 and config.outer.method != "none":
        return
    unused = _changed(config.wan, "wan")
    if config.outer.method == "diloco":
        leaves: tuple[str, ...] = (
            "codec",
            "codec_block_size",
            "rounding",
            "error_feedback",
            "island_weights",
        )
        if config.outer.codec == "low_rank":  # which also decides what is averaged, whatever crosses the WAN
            leaves = ("codec_block_size", "rounding", "island_weights")
        unused = _changed(config.outer, "outer", leaves) + unused
    if unused:
        why = "outer.method = none" if config.outer.method == "none" else "parallel.num_islands = 1"
        verb = "is" if len(unused) == 1 else "are"
        yield f"{why}: nothing crosses the WAN, so {', '.join(unused)} {verb} not used"


def _intervals(config: Config) -> Iterator[str]:
    """Intervals that a run does not live to see: a short trial of a long run is one override away."""
    iters = config.inner.train_iters
    intervals = {
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "logging.eval_interval": config.logging.eval_interval,
        "run.exit_interval": config.run.exit_interval,
    }
    for name, interval in intervals.items():
        if interval is not None and interval > iters:
            yield f"{name} = {interval} is never reached: inner.train_iters = {iters}"
    retain_given = _changed(config.checkpoint, "checkpoint", ("save_retain",))
    if config.checkpoint.save_interval is None and retain_given:
        yield (
            f"checkpoint.save_retain = {config.checkpoint.save_retain} without checkpoint.save_interval: a "
            "checkpoint is written only where the run stops or ends"
        )


def _test_share(config: Config) -> Iterator[str]:
    shares = [float(share) for share in config.data.split.split(",")]
    held_back = shares[2] / sum(shares)
    if held_back > MOST_HELD_BACK:
        yield (
            f"data.split = {config.data.split!r} holds {held_back:.0%} of the documents back for testing, "
            "and nothing here reads them"
        )


def _changed(section: Section, prefix: str, leaves: tuple[str, ...] | None = None) -> list[str]:
    """Full names of the leaves that differ from their defaults."""
    fields = type(section).model_fields
    chosen = fields if leaves is None else leaves
    return [f"{prefix}.{leaf}" for leaf in chosen if getattr(section, leaf) != fields[leaf].default]
