"""How much of a slow link does streaming hide? Two islands in network namespaces, links shaped by tc.

    python benchmarks/wan_overlap.py          as root; about a quarter of an hour on two cores

The link rates follow from a blocking run measured first, so that the figures mean the same on any machine:

* half:    one 4-bit sync of a fragment takes half of H/P inner steps;
* slow:    one fp32 sync of the model takes twice as long as H inner steps (blocking: utilisation 0.33);
* slowest: four times slower still (blocking: 0.11).

On each link the same islands run streaming int4, and blocking fp32 DiLoCo on the slow ones; before and after
the first they run without any sync. The end of training waits for what is in flight: `drain_s` is that part
of `blocked_s`, once a run however long it is.
Predicted utilisation is `dilocox plan`'s, with equal fragments.
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

from dilocox.plan.utilisation import compute_utilisation
from tests.netns.islands import run_in_box
from tests.netns.wan_box import WanBox

RESULTS = Path(__file__).parent / "results"
H, P, TAU = 80, 2, 39
VOCAB_SIZE = 512  # the embedding is a small part of the model, as in large ones
PARAMETERS = 7.3e6  # about; for the first guess of a rate
MODEL = {"num_layers": 4, "hidden_size": 384, "num_attention_heads": 6, "seq_length": 64}
BATCH = {"micro_batch_size": 2, "global_batch_size": 2, "lr": 1e-3}
BLOCKING = {"sync_interval": H, "codec": "none"}
STREAMING = {
    "sync_interval": H, "num_fragments": P, "overlap_delay": TAU,
    "codec": "int4", "codec_block_size": 128, "error_feedback": True,
}  # fmt: skip
OUTER_STEPS = {"half": (12, 0), "slow": (8, 2), "slowest": (14, 1)}
"""Outer steps of streaming and of blocking on each link."""


def main() -> int:
    step_s = train(None, {"method": "none"}, steps=2 * H)["step_s"]
    # What a byte costs in truth: headers, TCP, both levels on the same cores.
    guess = train(16 / step_s * PARAMETERS / H / 1e6, BLOCKING, steps=2 * H)
    parameters, interval_s = guess["parameters"], H * guess["step_s"]
    mbit_s = guess["mbit"] * guess["exchange_s"] / guess["num_syncs"]
    int4_mbit = mbit_s * 4.125 / 32
    links = {
        "half": int4_mbit / (0.5 * interval_s),
        "slow": mbit_s / (2 * interval_s),
        "slowest": mbit_s / (8 * interval_s),
    }
    rows = {}
    for link, mbit in links.items():
        streaming_steps, blocking_steps = OUTER_STEPS[link]
        rows[link] = {"mbit": round(mbit, 2)}
        if link == "half":
            rows[link]["alone before"] = train(mbit, {"method": "none"}, steps=4 * H)
        rows[link]["streaming"] = train(mbit, STREAMING, steps=streaming_steps * H)
        if link == "half":
            rows[link]["alone after"] = train(mbit, {"method": "none"}, steps=4 * H)
        if blocking_steps:
            rows[link]["blocking"] = train(mbit, BLOCKING, steps=blocking_steps * H)
        for name, sent_mbit, fragments, delay in (
            ("streaming", int4_mbit, P, TAU),
            ("blocking", mbit_s, 1, 0),
        ):
            if name in rows[link]:
                predicted = compute_utilisation(
                    [int(sent_mbit * 1e6 / 8 / fragments)] * fragments,
                    sync_interval=H,
                    overlap_delay=delay,
                    step_time_s=interval_s / H,
                    link_bps=mbit * 1e6,
                )
                rows[link][name]["predicted_utilisation"] = round(predicted, 3)
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
    seconds = {
        name: round(sum(s[name] for s in syncs), 2) for name in ("exchange_s", "waiting_s", "blocked_s")
    }
    drained = [s for s in syncs if outer.get("overlap_delay") and s["inner_step"] == steps]
    return {
        "mbit": mbit,
        "parameters": summary["parameters"],
        "step_s": round(statistics.mean(steps_s), 5),
        "tokens_per_s": round(summary["tokens_per_s"], 1),
        "utilisation": round(summary["compute_utilisation"], 3),
        "num_syncs": len(syncs),
        **seconds,
        "drain_s": round(sum(s["blocked_s"] for s in drained), 2),
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
