"""How much of a slow link does streaming hide? Two islands in network namespaces, links shaped by tc.

    python benchmarks/wan_overlap.py          as root; about a quarter of an hour on two cores

The link rates follow from the step time measured first, so that the figures mean the same on any machine:

* half:    one 4-bit exchange of a fragment takes half of H/P inner steps;
* slow:    one fp32 exchange of the model takes twice as long as H inner steps (blocking: utilisation 0.33);
* slowest: four times slower still (blocking: 0.11).

On each link the same islands run blocking fp32 DiLoCo and streaming int4, and once without any sync. The end
of training waits for what is in flight: `drain_s` is that part of `blocked_s`, once a run however long it is.
Predicted utilisation is that of `dilocox plan`'s formula: H t / (H t + max(0, T_exchange - overlap)).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from provenance import REPOSITORY, provenance

sys.path.insert(0, str(REPOSITORY))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.netns.islands import run_in_box
from tests.netns.wan_box import WanBox

RESULTS = Path(__file__).parent / "results"
H, P, TAU = 80, 2, 39
VOCAB_SIZE = 512  # the embedding is a small part of the model, as in large ones
WIRE_BYTES_PER_BYTE = 1514 / 1448  # Ethernet, IP and TCP headers; the link's rate counts them
MODEL = {"num_layers": 4, "hidden_size": 384, "num_attention_heads": 6, "seq_length": 64}
BATCH = {"micro_batch_size": 2, "global_batch_size": 2, "lr": 1e-3}
BLOCKING = {"sync_interval": H, "codec": "none"}
STREAMING = {
    "sync_interval": H, "num_fragments": P, "overlap_delay": TAU,
    "codec": "int4", "codec_block_size": 128, "error_feedback": True,
}  # fmt: skip
ROUNDS = {"half": (12, 0), "slow": (8, 2), "slowest": (14, 1)}
"""Outer steps of streaming and of blocking on each link."""


def main() -> int:
    alone = train(None, {"method": "none"}, steps=2 * H)
    step_s, parameters = alone["step_s"], alone["parameters"]
    round_s = H * step_s
    int4_bits, fp32_bits = 4.125 * parameters, 32 * parameters
    links = {
        "half": int4_bits / P / (0.5 * round_s / P),
        "slow": fp32_bits / (2 * round_s),
        "slowest": fp32_bits / (8 * round_s),
    }
    rows = {}
    for link, bits_per_s in links.items():
        mbit = bits_per_s * WIRE_BYTES_PER_BYTE / 1e6
        streaming_rounds, blocking_rounds = ROUNDS[link]
        rows[link] = {"mbit": round(mbit, 2), "alone": train(mbit, {"method": "none"}, steps=2 * H)}
        rows[link]["streaming"] = train(mbit, STREAMING, steps=streaming_rounds * H)
        if blocking_rounds:
            rows[link]["blocking"] = train(mbit, BLOCKING, steps=blocking_rounds * H)
        for name, sent_bits, window in (("streaming", int4_bits, TAU * P), ("blocking", fp32_bits, 0)):
            if name in rows[link]:
                hidden_s = min(window * step_s, sent_bits / bits_per_s)
                stalled_s = sent_bits / bits_per_s - hidden_s
                rows[link][name]["predicted_utilisation"] = round(round_s / (round_s + stalled_s), 3)
        print(link, json.dumps(rows[link]), flush=True)
    result = {"machine": provenance(), "H": H, "P": P, "tau": TAU, "parameters": parameters, "step_s": step_s}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "wan_overlap.json").write_text(json.dumps(result | {"links": rows}, indent=1) + "\n")
    plot(rows)
    return 0


def train(mbit: float | None, outer: dict, *, steps: int) -> dict:
    """One run of two islands; figures over both of them."""
    with tempfile.TemporaryDirectory(prefix="dilocox-bench-") as folder:
        path = Path(folder) / "config.yaml"
        config = {
            "run": {"name": "run", "device": "cpu", "output_dir": folder},
            "model": MODEL,
            "parallel": {"num_islands": 2},
            "data": {"data_path": "stdlib", "vocab_size": VOCAB_SIZE},
            "inner": BATCH | {"train_iters": steps},
            "outer": outer,
            "wan": {"timeout_s": 900.0},
            "logging": {"eval_iters": 1, "log_interval": 10},
        }
        path.write_text(json.dumps(config))
        with WanBox(2, rate_mbit=mbit) as box:
            if mbit is not None:
                box.confirm_shaping(seconds=2.0)
            summary = run_in_box(box, path, timeout_s=1800)
        lines = [
            json.loads(line)
            for island in range(2)
            for line in (Path(folder) / "run" / f"island_{island}" / "metrics.jsonl").read_text().splitlines()
        ]
    syncs = [line for line in lines if line["kind"] == "sync"]
    steps_s = [line["step_time_s"] for line in lines if line["kind"] == "inner"]
    drained = [s for s in syncs if outer.get("overlap_delay") and s["inner_step"] == steps]
    return {
        "parameters": summary["parameters"],
        "step_s": statistics.median(steps_s),
        "tokens_per_s": round(summary["tokens_per_s"], 1),
        "utilisation": round(summary["compute_utilisation"], 3),
        "exchange_s": round(sum(s["exchange_s"] for s in syncs), 2),
        "blocked_s": round(sum(s["blocked_s"] for s in syncs), 2),
        "drain_s": round(sum(s["blocked_s"] for s in drained), 2),
        "waiting_s": round(sum(s["waiting_s"] for s in syncs), 2),
        "mb_sent": round(summary["wan"]["payload_bytes_sent"] / 1e6, 2),
    }


def plot(rows: dict) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, style in (("streaming", "o-"), ("blocking", "s-")):
        points = sorted((row["mbit"], row[name]) for row in rows.values() if name in row)
        label = "streaming int4" if name == "streaming" else "blocking fp32"
        rates = [rate for rate, _ in points]
        (line,) = axes.plot(rates, [p["utilisation"] for _, p in points], style, label=label)
        predicted = [p["predicted_utilisation"] for _, p in points]
        axes.plot(rates, predicted, "--", color=line.get_color(), alpha=0.6, label=f"{label}, predicted")
    axes.set(xscale="log", xlabel="link, Mbit/s", ylabel="compute utilisation", ylim=(0, 1.05))
    axes.set_xticks(sorted(row["mbit"] for row in rows.values()))
    axes.get_xaxis().set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "wan_overlap.png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
