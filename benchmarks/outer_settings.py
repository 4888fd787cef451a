"""Which outer settings lose least? Equal tokens, real text, two islands; every delay mode and codec.

    python benchmarks/outer_settings.py sweep      one seed: outer lr and momentum of each delay mode
    python benchmarks/outer_settings.py table      three seeds with the best of each: the table
    python benchmarks/outer_settings.py long       blocking and streaming again, over 60 outer steps

Runs that are already in the results file are not run again. Each run is the whole trainer (Megatron, torchft
over loopback) on a model of 0.25 M parameters, 600 inner steps of 8 x 64 tokens an island, H = 30 (20 outer
steps); the islands come from the tests' fork server, which saves the imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from provenance import REPOSITORY, provenance

sys.path.insert(0, str(REPOSITORY))

from dilocox.config_load import load_config
from dilocox.outer.wan.membership import serve_lighthouse
from tests.distributed.forkserver import run_islands

CACHE = Path.home() / ".cache" / "dilocox"
RESULTS = Path(__file__).parent / "results"
CONFIG = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
    "parallel": {"num_islands": 2, "ranks_per_island": 1},
    "data": {"data_path": "stdlib", "vocab_size": 512},
    "inner": {"micro_batch_size": 8, "global_batch_size": 8, "lr": 2e-3, "min_lr": 2e-4,
              "lr_warmup_iters": 30},
    "logging": {"log_interval": 100, "eval_iters": 16},
    "run": {"device": "cpu"},
}  # fmt: skip

BLOCKING = {"sync_interval": 30}
STREAMING = {"sync_interval": 30, "num_fragments": 3, "overlap_delay": 3}
ROUND_DELAY = {"sync_interval": 30, "overlap_delay": 30}
TWICE_AS_OFTEN = {"sync_interval": 15, "overlap_delay": 2}
INT4 = {"codec": "int4", "error_feedback": True}
MODES = {
    "blocking": BLOCKING,
    "streaming": STREAMING,
    "streaming alpha 0": STREAMING | {"mixing_alpha": 0.0},  # islands take the anchor; 0.5 is the paper's
    "delayed_keep": ROUND_DELAY | {"delay_mode": "delayed_keep"},
    "eager": ROUND_DELAY | {"delay_mode": "eager"},
    "delayed_reset": ROUND_DELAY | {"delay_mode": "delayed_reset"},
}
GRID = {
    "blocking": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.8), (0.4, 0.8), (0.7, 0.6), (1.0, 0.6), (1.0, 0.3)],
    "streaming": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.8), (0.4, 0.8), (0.7, 0.6), (1.0, 0.6), (1.0, 0.8)],
    "streaming alpha 0": [(0.7, 0.6), (1.0, 0.6), (0.7, 0.8), (0.4, 0.9), (1.0, 0.3)],
    "delayed_keep": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (0.4, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.6)],
    "eager": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (0.4, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.0)],
    "delayed_reset": [(0.7, 0.9), (0.4, 0.6), (0.2, 0.6), (0.4, 0.3), (0.7, 0.3)],
}
GRID_LONG = {
    "blocking": [(0.7, 0.6), (0.4, 0.8), (0.7, 0.8), (0.4, 0.9)],
    "streaming": [(0.4, 0.9), (0.7, 0.9), (0.7, 0.8), (0.4, 0.8)],
}
SEEDS = (1, 2, 3)
COMPARISONS = [
    ("blocking, int4 + EF", "blocking, fp32"),
    ("streaming, int4 + EF", "streaming, fp32"),
    ("streaming, int4 + EF", "blocking, fp32"),
    ("blocking, fp32, fragments in turn", "blocking, fp32"),
    ("streaming, int4 + EF", "blocking, fp32, Streaming DiLoCo's"),
    ("streaming, int4 + EF", "blocking, fp32, DiLoCo's settings"),
    ("blocking, fp32", "data parallel, fp32"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["sweep", "table", "long"])
    part = parser.parse_args().part
    runs = {"sweep": lambda: sweep(GRID), "table": table, "long": lambda: sweep(GRID_LONG)}[part]()
    train_iters = 1800 if part == "long" else 600
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"outer_settings_{part}.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else {}
    for name, (seed, outer) in runs.items():
        if name not in done or done[name]["outer"] != outer:
            done[name] = {"seed": seed, "outer": outer, **run(seed, outer, train_iters)}
            path.write_text(json.dumps({"machine": provenance(), "runs": done}, indent=1) + "\n")
        print(f"{name:48} {done[name]['val_loss']:.4f}", flush=True)
    if part == "table":
        (RESULTS / "outer_settings.md").write_text(markdown({name: done[name] for name in runs}))
    return 0


def sweep(grid: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[int, dict]]:
    """Run name -> seed and outer section."""
    return {
        f"{mode} lr {lr} momentum {momentum}": (
            1, MODES[mode] | {"outer_lr": lr, "outer_momentum": momentum}
        )
        for mode, tried in grid.items()
        for lr, momentum in tried
    }  # fmt: skip


def best(mode: str) -> dict[str, float]:
    """The settings with the lowest loss of the sweep."""
    runs = json.loads((RESULTS / "outer_settings_sweep.json").read_text())["runs"]
    tried = [result for name, result in runs.items() if name.startswith(f"{mode} lr")]
    return min(tried, key=lambda result: result["val_loss"])["outer"]


def table() -> dict[str, tuple[int, dict]]:
    """Run name -> seed and outer section."""
    tuned = {mode: best(mode) for mode in MODES}
    rows: dict[str, dict] = {
        "data parallel, fp32": {"method": "data_parallel"},
        "islands alone": {"method": "none"},
        "blocking, fp32": tuned["blocking"],
        "blocking, fp32, DiLoCo's settings": BLOCKING | {"outer_lr": 0.7, "outer_momentum": 0.9},
        "blocking, fp32, Streaming DiLoCo's": BLOCKING | {"outer_lr": 0.4, "outer_momentum": 0.9},
        "blocking, fp32, fragments in turn": tuned["blocking"] | {"num_fragments": 3},
        "blocking, int4 + EF": tuned["blocking"] | INT4,
        "streaming, fp32": tuned["streaming"],
        "streaming, int4 + EF": tuned["streaming"] | INT4,
        "streaming, int4 + EF, alpha = 0": tuned["streaming alpha 0"] | INT4,
        "streaming, int4 + EF, H = 15": tuned["streaming"] | INT4 | TWICE_AS_OFTEN,
        "delayed_keep, int4 + EF": tuned["delayed_keep"] | INT4,
        "eager, int4 + EF": tuned["eager"] | INT4,
        "delayed_reset, int4 + EF": tuned["delayed_reset"] | INT4,
    }
    return {f"{row} | seed {seed}": (seed, outer) for row, outer in rows.items() for seed in SEEDS}


def train_island(island: int, rank: int, path: str, lighthouse: str) -> None:
    from dilocox.train import Place, train

    config = load_config(path, [f"wan.lighthouse={lighthouse}"])
    train(config, Place(island, rank, rank, CACHE), resume=False)


def run(seed: int, outer: dict, train_iters: int) -> dict:
    """One training run; returns what the table needs of its summary."""
    with tempfile.TemporaryDirectory(prefix="dilocox-bench-") as folder:
        inner = {**CONFIG["inner"], "train_iters": train_iters}
        config = CONFIG | {
            "inner": inner,
            "outer": outer,
            "run": {**CONFIG["run"], "seed": seed, "output_dir": folder},
        }
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        lighthouse = serve_lighthouse("127.0.0.1:0", min_islands=1, grace_s=30)
        address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
        run_islands(train_island, 2, 1, str(path), address, timeout_s=1800)
        lighthouse.shutdown()
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    wan = summary["wan"]
    return {
        "val_loss": summary["val_loss"],
        "payload_bytes_sent": wan["payload_bytes_sent"],
        "bits_per_parameter_per_outer_step": wan["bits_per_parameter_per_outer_step"],
        "anchors_identical": summary["anchors_identical"],
        "failures": summary["failures"],
    }


def markdown(runs: dict) -> str:
    groups: dict[str, list[dict]] = {}
    for name, result in runs.items():
        groups.setdefault(name.split(" | ")[0], []).append(result)
    lines = [
        "# Outer settings at equal tokens",
        "",
        "Validation loss in nats a token (spread = half the range over the seeds), and what one run sends.",
        "",
        f"| setting | lr / momentum | {' | '.join(f'seed {s}' for s in SEEDS)} | mean | spread | MB sent |",
        "|---|---|" + "---|" * (len(SEEDS) + 3),
    ]
    for row, results in groups.items():
        losses = [r["val_loss"] for r in results]
        outer = results[0]["outer"]
        tuned = f"{outer['outer_lr']} / {outer['outer_momentum']}" if "outer_lr" in outer else "-"
        spread = (max(losses) - min(losses)) / 2
        sent = results[0]["payload_bytes_sent"] / 1e6
        values = " | ".join(f"{loss:.4f}" for loss in losses)
        figures = f"{statistics.mean(losses):.4f} | {spread:.4f} | {sent:.2f}"
        lines.append(f"| {row} | {tuned} | {values} | {figures} |")
    lines += ["", "Differences of means, seed by seed the same data and first weights:", ""]
    means = {row: statistics.mean(r["val_loss"] for r in results) for row, results in groups.items()}
    for mine, other in COMPARISONS:
        lines.append(f"* {mine}, against {other}: {means[mine] - means[other]:+.4f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
