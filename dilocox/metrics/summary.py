"""`summary.json`: each island's own, and the run's, merged from them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dilocox.atomic import write_json
from dilocox.config.schema import Config
from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.throughput import Throughput, overlap_efficiency
from dilocox.metrics.totals import Totals
from dilocox.run_folder import SUMMARY, island_dir

Status = Literal["running", "completed", "interrupted", "failed"]
FP32_BYTES = 4
_WORST_FIRST: tuple[Status, ...] = ("failed", "running", "interrupted", "completed")


@dataclass(frozen=True)
class RunOutcome:
    """Facts that only the training loop knows, at its end.

    Attributes:
        parameters: elements of the whole model, each counted once.
        anchor_hash: hash over all anchors of the island.
        predicted_bytes: payload bytes that the settings predict for this island's outer steps.
        sample: text generated from the anchor.
    """

    status: Status
    run_id: str
    parameters: int
    outer_steps: int
    anchor_hash: str
    predicted_bytes: int
    sample: str | None = None


@dataclass(frozen=True)
class IslandSummary:
    """`island_I/summary.json`. Bytes, tokens and seconds are this island's."""

    island_id: int
    run_id: str
    status: Status
    num_islands: int
    layout: dict[str, int]
    parameters: int
    inner_steps: int
    outer_steps: int
    tokens: int
    wall_s: float
    compute_s: float
    exchange_s: float
    blocked_s: float
    lm_loss: float | None
    first_val_loss: float | None
    val_loss: float | None
    codec: str
    payload_bytes_sent: int
    predicted_bytes: int
    socket_bytes_sent: int | None
    socket_bytes_note: str | None
    data_parallel_bytes: int
    anchor_hash: str
    failures: dict[str, int]
    sample: str | None


def island_summary(
    config: Config,
    *,
    island_id: int,
    outcome: RunOutcome,
    totals: Totals,
    throughput: Throughput,
    interface: InterfaceBytes,
) -> IslandSummary:
    """Puts the figures of one island together."""
    parallel = config.parallel
    note = _why_no_socket_bytes(parallel.nodes_per_island, totals, interface)
    return IslandSummary(
        island_id=island_id,
        run_id=outcome.run_id,
        status=outcome.status,
        num_islands=parallel.num_islands,
        layout={
            "tp": parallel.tensor_model_parallel_size,
            "pp": parallel.pipeline_model_parallel_size,
            "dp": parallel.data_parallel_size,
        },
        parameters=outcome.parameters,
        inner_steps=totals.inner_steps,
        outer_steps=outcome.outer_steps,
        tokens=totals.tokens,
        wall_s=throughput.wall_s,
        compute_s=throughput.compute_s,
        exchange_s=totals.exchange_s,
        blocked_s=totals.blocked_s,
        lm_loss=_finite(totals.last_lm_loss),
        first_val_loss=_finite(totals.first_val_loss),
        val_loss=_finite(totals.val_loss),
        codec="none" if config.outer.method != "diloco" else config.outer.codec,
        payload_bytes_sent=totals.payload_bytes_sent,
        predicted_bytes=outcome.predicted_bytes,
        socket_bytes_sent=interface.sent if note is None else None,
        socket_bytes_note=note,
        data_parallel_bytes=data_parallel_bytes(
            outcome.parameters, num_islands=parallel.num_islands, inner_steps=totals.inner_steps
        ),
        anchor_hash=outcome.anchor_hash,
        failures=totals.failures,
        sample=outcome.sample,
    )


def _why_no_socket_bytes(num_nodes: int, totals: Totals, interface: InterfaceBytes) -> str | None:
    """Counters cover one host and one process lifetime; a partial count is not reported."""
    if totals.events["resume"]:
        return "the run was resumed, and counters begin with its last part"
    if num_nodes > 1:
        return "the island spans several hosts, and counters are of its first one"
    return interface.reason


def data_parallel_bytes(parameters: int, *, num_islands: int, inner_steps: int) -> int:
    """Returns the bytes that one island would send to average fp32 gradients at every inner step.

    An all-reduce sends 2 (K - 1) / K times the gradient from each of K islands.
    """
    return 2 * (num_islands - 1) * FP32_BYTES * parameters * inner_steps // num_islands


def write_island_summary(run_dir: Path, summary: IslandSummary) -> None:
    write_json(island_dir(run_dir, summary.island_id) / SUMMARY, asdict(summary))


def read_island_summaries(run_dir: Path) -> list[IslandSummary]:
    """Summaries of the islands that have ended, in island order."""
    paths = run_dir.glob(f"island_*/{SUMMARY}")
    found = (IslandSummary(**json.loads(path.read_text())) for path in paths)
    return sorted(found, key=lambda summary: summary.island_id)


def merge(
    run_dir: Path, *, missing_status: Status = "running", failed_islands: Collection[int] = ()
) -> dict[str, object]:
    """Writes the run's `summary.json` from the islands' and returns it.

    Each island calls it at its end. Two of them may do so at once, and the one that has read less may write
    last. So each one reads again after its write: the last write then contains all summaries.

    Args:
        missing_status: status of islands without a summary; a launcher may know more than `running`.
        failed_islands: islands that a launcher saw fail, whatever their last summary says.

    Raises:
        FileNotFoundError: no island has ended with a summary.
    """
    merged: dict[str, object] = {}
    islands: list[IslandSummary] = []
    while (found := read_island_summaries(run_dir)) != islands:
        islands = found
        merged = _complete(islands, missing_status, failed_islands)
        write_json(run_dir / SUMMARY, merged)
    if not merged:
        raise FileNotFoundError(f"no island summary below {run_dir}")
    return merged


def _complete(
    islands: list[IslandSummary], missing_status: Status, failed_islands: Collection[int]
) -> dict[str, object]:
    merged = _merged(islands)
    missing = sorted(set(range(islands[0].num_islands)) - {island.island_id for island in islands})
    statuses = {island.status for island in islands}
    statuses |= {missing_status} if missing else set()
    statuses |= {"failed"} if failed_islands else set()
    merged["status"] = next(status for status in _WORST_FIRST if status in statuses)
    merged["anchors_identical"] = merged["anchors_identical"] and not missing
    merged["failures"] = {
        **_sum_of_failures(islands),
        "missing_islands": missing,
        "failed_islands": sorted(failed_islands),
    }
    return merged


def _merged(islands: list[IslandSummary]) -> dict[str, object]:
    first = islands[0]
    outer_steps = max(island.outer_steps for island in islands)
    wall_s = max(island.wall_s for island in islands)
    tokens = sum(island.tokens for island in islands)
    val_loss = _mean(island.val_loss for island in islands)
    return {
        "run_id": first.run_id,
        "status": first.status,
        "num_islands": first.num_islands,
        "layout": first.layout,
        "parameters": first.parameters,
        "inner_steps": max(island.inner_steps for island in islands),
        "outer_steps": outer_steps,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        "first_val_loss": _mean(island.first_val_loss for island in islands),
        "val_loss": val_loss,
        "val_perplexity": None if val_loss is None else math.exp(min(val_loss, 700.0)),
        "compute_utilisation": _mean(
            island.compute_s / island.wall_s if island.wall_s > 0 else None for island in islands
        ),
        "overlap_efficiency": overlap_efficiency(
            exchange_s=sum(island.exchange_s for island in islands),
            blocked_s=sum(island.blocked_s for island in islands),
        ),
        "wan": _merged_wan(islands, outer_steps),
        "anchors_identical": len({(island.anchor_hash, island.outer_steps) for island in islands}) == 1,
        "anchor_hash": first.anchor_hash,
        "failures": {},
        "sample": first.sample,
        "islands": [asdict(island) for island in islands],
    }


def _merged_wan(islands: list[IslandSummary], outer_steps: int) -> dict[str, object]:
    """Bytes are sums over the islands; bits per parameter are those of the average island."""
    first = islands[0]
    payload = sum(island.payload_bytes_sent for island in islands)
    sockets = [island.socket_bytes_sent for island in islands]
    counted = [count for count in sockets if count is not None]
    sent_parameters = first.parameters * outer_steps * len(islands)
    return {
        "codec": first.codec,
        "payload_bytes_sent": payload,
        "predicted_bytes": sum(island.predicted_bytes for island in islands),
        "socket_bytes_sent": sum(counted) if len(counted) == len(sockets) else None,
        "socket_bytes_note": first.socket_bytes_note,
        "bits_per_parameter_per_outer_step": 8 * payload / sent_parameters if sent_parameters else None,
        "data_parallel_bytes": sum(island.data_parallel_bytes for island in islands),
    }


def _sum_of_failures(islands: list[IslandSummary]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for island in islands:
        total.update(island.failures)
    return dict(total)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
