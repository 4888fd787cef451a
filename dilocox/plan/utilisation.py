"""Predicted compute utilisation: the share of wall time in which an island computes. No torch here.

First order, as in the simulations of 2501.18512: full bandwidth, no latency, one sync at a time. A
measurement study found real links 1.1 to 1.9 times slower than this formula at every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.schema import Config

LINKS_BPS = {
    "10M": 10e6,
    "50M": 50e6,
    "100M": 100e6,
    "200M": 200e6,
    "500M": 500e6,
    "1G": 1e9,
    "5G": 5e9,
    "10G": 10e9,
    "100G": 100e9,
}
"""Link speeds of the tables, bits per second."""


def compute_utilisation(
    sync_bytes: Sequence[int],
    *,
    sync_interval: int,
    overlap_delay: int,
    step_time_s: float,
    link_bps: float,
) -> float:
    """Utilisation of one outer step.

    Args:
        sync_bytes: sent through the link in the sync of each fragment.
        sync_interval: H.
        overlap_delay: inner steps that hide a sync; 0: none, it blocks.
        step_time_s: compute of one inner step.
    """
    compute_s = sync_interval * step_time_s
    hidden_s = overlap_delay * step_time_s
    blocked_s = sum(max(0.0, 8 * sent / link_bps - hidden_s) for sent in sync_bytes)
    return compute_s / (compute_s + blocked_s)


@dataclass(frozen=True)
class StepTime:
    """Compute seconds of an inner step, and where the figure comes from."""

    seconds: float
    source: str


DEFAULT_TFLOPS = {"cpu": 0.02, "cuda": 150.0}
"""What a rank is assumed to achieve: a share of two laptop cores, or about 40 % of an A100."""


def step_time(
    config: Config, num_parameters: int, *, seconds: float | None, tflops: float | None
) -> StepTime:
    """Time of an inner step: as given, else 6 * parameters * tokens over the achieved FLOP/s of the island.

    Args:
        seconds: measured step time.
        tflops: achieved by one rank, 1e12 floating point operations per second.
    """
    if seconds is not None:
        return StepTime(seconds, "as given")
    tokens = config.inner.global_batch_size * config.model.seq_length
    device = "cpu" if config.run.device == "cpu" else "cuda"
    assumed = DEFAULT_TFLOPS[device] if tflops is None else tflops
    ranks = config.parallel.ranks_per_island
    source = f"6 * N * {tokens} tokens at {assumed:g} TFLOP/s per rank"
    flops = 6.0 * num_parameters * tokens
    return StepTime(
        flops / (assumed * 1e12 * ranks),
        source if tflops is not None else f"{source}, assumed",
    )
