"""The figures of a report, each drawn from records alone; only `report` imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dilocox.metrics.summary import data_parallel_bytes
from dilocox.report.run_data import RunData

_GRID = {"color": "#e3e6ea", "linewidth": 0.8}
_ANCHOR = "#111827"
_BASELINE = "#9ca3af"
_COMPUTE, _BLOCKED, _REST = "#2563eb", "#dc2626", "#d1d5db"
_LEGEND_LIMIT = 8
_SMOOTH_PARTS = 40


def loss_figure(run: RunData) -> Figure:
    """Training loss of every island, and validation on the anchor."""
    figure, (axes,) = _new_figure("Loss", 1)
    for index, island in enumerate(run.islands):
        steps = [record.inner_step for record in island.inner]
        losses = [record.lm_loss for record in island.inner]
        colour = _colour(index, len(run.islands))
        axes.plot(steps, losses, color=colour, alpha=0.18, linewidth=0.8)
        axes.plot(
            steps, smooth(losses), color=colour, linewidth=1.4, label=f"island {island.island_id}, training"
        )
    evals = next((island.evals for island in run.islands if island.evals), [])
    if evals:
        steps, values = [e.inner_step for e in evals], [e.val_loss for e in evals]
        style = "o-" if len(steps) > 2 else "o"  # a line through two points would suggest a trend
        axes.plot(
            steps, values, style, color=_ANCHOR, markersize=5, linewidth=1.2, label="anchor, validation"
        )
        side = "left" if len(steps) == 1 else "right"
        axes.annotate(
            f"{values[-1]:.3f}", (steps[-1], values[-1]), (0, 8), textcoords="offset points", ha=side
        )
    _label(axes, "inner step", "nats per token")
    return figure


def bytes_figure(run: RunData) -> Figure:
    """Bytes on the WAN so far, all islands together, against averaging gradients at every step."""
    figure, (axes,) = _new_figure("Bytes sent over the WAN, all islands", 1)
    sent = sorted((s.inner_step, s.payload_bytes_sent) for island in run.islands for s in island.syncs)
    if any(count for _, count in sent):
        total = list(accumulate(count for _, count in sent))
        steps = [step for step, _ in sent]
        label = f"this run ({run.config.outer.method}, codec {run.config.outer.codec})"
        axes.step(steps, [t / 1e6 for t in total], where="post", color=_COMPUTE, linewidth=1.8, label=label)
    last = max((island.inner[-1].inner_step for island in run.islands if island.inner), default=0)
    if run.parameters is not None and last > 0 and len(run.islands) > 1:
        steps = sorted({*range(1, last + 1, max(1, last // 100)), last})
        axes.plot(
            steps,
            [_baseline_megabytes(run, step) for step in steps],
            "--",
            color=_BASELINE,
            linewidth=1.8,
            label="gradients averaged at every step (fp32)",
        )
    # A run without WAN bytes has nothing that a logarithm could show, and matplotlib would warn of it.
    if axes.has_data():
        axes.set_yscale("log")
    _label(axes, "inner step", "MB, logarithmic")
    return figure


def fragments_figure(run: RunData) -> Figure:
    """Pseudo-gradient norm and cosine to the islands' mean, one line per fragment."""
    figure, (norms, cosines) = _new_figure("Pseudo-gradients by fragment", 2)
    fragments = run.syncs_by_fragment()
    for index, (fragment, syncs) in enumerate(fragments.items()):
        colour = colormaps["viridis"](index / max(1, len(fragments) - 1) * 0.9)
        steps = [sync.inner_step for sync in syncs]
        label = f"fragment {fragment}"
        values = [sync.pseudo_gradient_norm for sync in syncs]
        norms.plot(steps, values, "o-", color=colour, markersize=3, linewidth=1.3, label=label)
        known = [(sync.inner_step, sync.cosine_to_mean) for sync in syncs if sync.cosine_to_mean is not None]
        cosines.plot(
            [step for step, _ in known],
            [cosine for _, cosine in known],
            "o-",
            color=colour,
            markersize=3,
            linewidth=1.3,
        )
    norms.set_ylim(bottom=0)
    lowest = min((s.cosine_to_mean or 0.0 for syncs in fragments.values() for s in syncs), default=0.0)
    cosines.set_ylim(min(0.0, lowest) - 0.05, 1.05)
    _label(norms, "inner step", "L2 norm")
    _label(cosines, "inner step", "cosine to the mean", legend=False)
    return figure


def time_figure(run: RunData) -> Figure:
    """Seconds of each sync against those that training stood still, and where all seconds went."""
    figure, (syncs_axes, shares) = _new_figure("Where the time goes", 2)
    syncs = [sync for island in run.islands for sync in island.syncs]
    steps = [sync.inner_step for sync in syncs]
    syncs_axes.plot(
        steps, [s.exchange_s for s in syncs], "o", color=_COMPUTE, markersize=3.5, label="exchange"
    )
    syncs_axes.plot(
        steps, [s.blocked_s for s in syncs], "o", color=_BLOCKED, markersize=3.5, label="training blocked"
    )
    syncs_axes.set_ylim(bottom=0)
    _label(syncs_axes, "inner step", "seconds of a sync")
    _draw_shares(shares, run)
    return figure


def _draw_shares(axes: Axes, run: RunData) -> None:
    """One bar per island: compute, blocked, and once the wall clock is known, the rest."""
    walls = {island["island_id"]: island["wall_s"] for island in run.summary.get("islands", [])}
    names = [f"island {island.island_id}" for island in run.islands]
    compute = [sum(record.step_time_s for record in island.inner) for island in run.islands]
    blocked = [sum(sync.blocked_s for sync in island.syncs) for island in run.islands]
    busy = [c + b for c, b in zip(compute, blocked, strict=True)]
    rest = [max(0.0, walls.get(island.island_id, b) - b) for island, b in zip(run.islands, busy, strict=True)]
    axes.barh(names, compute, color=_COMPUTE, label="inner compute", height=0.5)
    axes.barh(names, blocked, left=compute, color=_BLOCKED, label="blocked by the WAN", height=0.5)
    axes.barh(names, rest, left=busy, color=_REST, label="rest of the loop", height=0.5)
    for row, (c, b, r) in enumerate(zip(compute, blocked, rest, strict=True)):
        if walls and c + b + r > 0:
            axes.annotate(f" {c / (c + b + r):.0%} compute", (0, row), color="white", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_ylim(len(names) - 0.5, -0.5)
    _label(axes, "seconds", "")


FIGURES: dict[str, Callable[[RunData], Figure]] = {
    "loss": loss_figure,
    "bytes": bytes_figure,
    "pseudo_gradients": fragments_figure,
    "time": time_figure,
}


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a 40th of the points, without a bias at its start.

    A NaN stays where it is and is not carried on.
    """
    weight = 1 - 1 / max(1.0, len(values) / _SMOOTH_PARTS)
    result, mean, mass = [], 0.0, 0.0
    for value in values:
        if value == value:
            mean = weight * mean + (1 - weight) * value
            mass = weight * mass + (1 - weight)
        result.append(mean / mass if value == value else value)
    return result


def _new_figure(title: str, num_panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(8.0, 3.9) if num_panels == 1 else (10.5, 3.9), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    return figure, list(panels)


def _label(axes: Axes, x: str, y: str, *, legend: bool = True) -> None:
    """Axis names, grid, and a legend above the panel, where it covers no data."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(**_GRID)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if x == "inner step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color=_BASELINE)
    elif legend and handles:
        axes.legend(
            handles[-_LEGEND_LIMIT:],
            labels[-_LEGEND_LIMIT:],
            frameon=False,
            fontsize=9,
            ncols=4,
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            columnspacing=1.2,
        )


def _colour(index: int, count: int) -> tuple[float, float, float, float]:
    """Distinct colours for a few islands, shades of one map for many."""
    return colormaps["tab10"](index) if count <= 10 else colormaps["turbo"](index / (count - 1))


def _baseline_megabytes(run: RunData, inner_steps: int) -> float:
    num_islands = run.config.parallel.num_islands
    one = data_parallel_bytes(run.parameters or 0, num_islands=num_islands, inner_steps=inner_steps)
    return one * num_islands / 1e6
