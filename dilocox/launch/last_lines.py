"""The last lines of a run: what it reached, what it sent, where the files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.run_folder import LOSS_FIGURE, PAGE, SUMMARY

_SAMPLE_LINES = 12


def closing_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Text for the end of a run, from the merged summary."""
    layout = summary["layout"]
    head = (
        f"run {run_dir.name} {summary['status']}: {summary['num_islands']} islands x (TP {layout['tp']} x "
        f"PP {layout['pp']} x DP {layout['dp']}), {summary['parameters'] / 1e6:.2f} M parameters, "
        f"{summary['inner_steps']} inner steps, {summary['outer_steps']} outer steps"
    )
    rows = {
        "validation loss": _loss(summary),
        "bytes sent": _bytes(summary),
        "on the wire": _wire(summary),
        "speed": _speed(summary),
        "anchors": _anchors(summary),
        "failures": _failures(summary["failures"]),
    }
    lines = ["", head, *(f"  {label:<16} {text}" for label, text in rows.items())]
    if summary.get("sample"):
        lines += ["", "text from the trained anchor:"]
        lines += [f"  | {line}" for line in str(summary["sample"]).splitlines()[:_SAMPLE_LINES]]
    files = [SUMMARY, LOSS_FIGURE, PAGE]
    found = [str(run_dir / name) for name in files if (run_dir / name).exists()]
    return [*lines, "", "files: " + "  ".join(found)]


def _loss(summary: Mapping[str, Any]) -> str:
    if summary["val_loss"] is None:
        return "not measured, or not finite"
    first = summary["first_val_loss"]
    start = "" if first is None or first == summary["val_loss"] else f"{first:.3f} -> "
    return f"{start}{summary['val_loss']:.3f} nats a token (perplexity {summary['val_perplexity']:,.1f})"


def _bytes(summary: Mapping[str, Any]) -> str:
    sent, baseline = summary["wan"]["payload_bytes_sent"], summary["wan"]["data_parallel_bytes"]
    if not sent:
        return "nothing crossed the WAN"
    return (
        f"{_megabytes(sent)} by all islands (codec {summary['wan']['codec']}); gradients averaged at every "
        f"step would be {_megabytes(baseline)}: {baseline / sent:,.1f} times as much"
    )


def _wire(summary: Mapping[str, Any]) -> str:
    wan = summary["wan"]
    bits = wan["bits_per_parameter_per_outer_step"]
    rate = "no outer step" if bits is None else f"{bits:.2f} bits per parameter and outer step"
    if wan["socket_bytes_sent"] is None:
        sockets = f"sockets not counted ({wan['socket_bytes_note']})"
    else:
        sockets = f"sockets {_megabytes(wan['socket_bytes_sent'])}"
    return f"{rate}; predicted {_megabytes(wan['predicted_bytes'])}; {sockets}"


def _speed(summary: Mapping[str, Any]) -> str:
    figures = [f"{summary['tokens']:,} tokens in {summary['wall_s']:.0f} s"]
    if summary["tokens_per_s"] is not None:
        figures.append(f"{summary['tokens_per_s']:,.0f} tokens/s")
    for key, label in (
        ("compute_utilisation", "compute utilisation"),
        ("overlap_efficiency", "overlap efficiency"),
    ):
        if summary[key] is not None:
            figures.append(f"{label} {summary[key]:.2f}")
    return ", ".join(figures)


def _anchors(summary: Mapping[str, Any]) -> str:
    if summary["anchors_identical"]:
        return f"identical on all islands, hash {str(summary['anchor_hash'])[:16]}"
    steps = sorted({island["outer_steps"] for island in summary["islands"]})
    if len(steps) > 1:
        return f"not to be compared: the islands ended at outer steps {', '.join(map(str, steps))}"
    return "NOT identical on all islands"


def _failures(failures: Mapping[str, Any]) -> str:
    seen = [f"{name.replace('_', ' ')} {count}" for name, count in failures.items() if count]
    return ", ".join(seen) or "none"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
