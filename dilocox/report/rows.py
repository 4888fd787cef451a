"""The words and figures of a report page: a headline, a table of facts, a table of events."""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.report.run_data import RunData

_MAX_EVENTS = 200


def headline(run: RunData) -> str:
    """One sentence: what was trained, how far, how well."""
    parallel = run.config.parallel
    steps = max((island.inner[-1].inner_step for island in run.islands if island.inner), default=0)
    layout = (
        f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} "
        f"x DP {parallel.data_parallel_size}"
    )
    size = "" if run.parameters is None else f", {run.parameters / 1e6:,.2f} M parameters"
    status = run.summary.get("status", "running")
    return (
        f"{status}: {parallel.num_islands} islands of {layout}{size}, "
        f"{steps} of {run.config.inner.train_iters} inner steps"
    )


def fact_rows(run: RunData) -> Iterator[tuple[str, str]]:
    """Settings of level 2, then the figures of the summary as far as there are any."""
    outer = run.config.outer
    yield "method", f"{outer.method}, H {outer.sync_interval}, fragments {outer.num_fragments}"
    yield "overlap", f"delay {outer.overlap_delay} inner steps, mode {outer.delay_mode}"
    yield "codec", f"{outer.codec}, error feedback {'on' if outer.error_feedback else 'off'}"
    yield "outer optimizer", f"{outer.outer_optimizer}, lr {outer.outer_lr}, momentum {outer.outer_momentum}"
    yield from _summary_rows(run)
    for island in run.islands:
        if island.inner:
            last = island.inner[-1]
            yield f"island {island.island_id}", f"step {last.inner_step}, training loss {last.lm_loss:.4f}"


def _summary_rows(run: RunData) -> Iterator[tuple[str, str]]:
    summary = run.summary
    if not summary:
        return
    formats = {
        "val_loss": "{:.4f}",
        "val_perplexity": "{:,.2f}",
        "tokens": "{:,}",
        "tokens_per_s": "{:,.0f}",
        "wall_s": "{:,.1f}",
        "compute_utilisation": "{:.3f}",
        "overlap_efficiency": "{:.3f}",
        "outer_steps": "{}",
        "anchors_identical": "{}",
        "anchor_hash": "{}",
    }
    for key, form in formats.items():
        value = summary.get(key)
        yield key, "n/a" if value is None else form.format(value)
    for key, value in summary["wan"].items():
        if value is not None:
            yield f"wan: {key}", f"{value:,}" if isinstance(value, int) else f"{value}"
    yield (
        "failures",
        ", ".join(f"{name} {count}" for name, count in summary["failures"].items() if count) or "none",
    )


def event_rows(run: RunData) -> list[tuple[str, str]]:
    """Events of all islands by inner step; the newest ones if there are very many."""
    rows = []
    for island in run.islands:
        for event in island.events:
            details = ", ".join(f"{key} {value}" for key, value in event.details.items())
            text = f"{event.event}{': ' if details else ''}{details}"
            rows.append((event.inner_step, island.island_id, text))
    rows.sort(key=lambda row: row[:2])
    return [(f"step {step}, island {island}", text) for step, island, text in rows[-_MAX_EVENTS:]]
