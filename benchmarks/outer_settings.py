"""Which outer settings lose least? Equal tokens, real text, two islands; every delay mode and codec.

    python benchmarks/outer_settings.py sweep --interval 100    one seed: outer lr, momentum and alpha
    python benchmarks/outer_settings.py table --interval 100    the best of each on several seeds: the table

Runs that are already in the results file are not run again; `machine` there is that of the newest run. Each
is the whole trainer (Megatron, torchft over loopback) on a model of 0.25 M parameters, with 8 x 64 tokens an
island and inner step, over 20 outer steps of H = 30 or 100; the islands come from the tests' fork server,
which saves the imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from provenance import REPOSITORY, provenance

sys.path.insert(0, str(REPOSITORY))

from dilocox.config.load import load_config
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
OUTER_STEPS = 20
INT4 = {"codec": "int4", "error_feedback": True}
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Regime:
    """How often the islands meet.

    Attributes:
        interval: H.
        modes: delay mode -> outer section without lr and momentum.
        grid: delay mode -> (outer lr, outer momentum) or (outer lr, outer momentum, alpha) to try.
        sweep_seed: of the sweep; where it is one of SEEDS, the best settings have a little luck in the table.
        num_seeds: of the rows whose difference is asked to 0.02 nats: one run varies by as much.
    """

    interval: int
    modes: dict[str, dict]
    grid: dict[str, list[tuple[float, ...]]]
    sweep_seed: int
    num_seeds: int

    def result(self, part: str) -> Path:
        return RESULTS / f"outer_settings_h{self.interval}_{part}.json"

    def best(self, mode: str, alpha: float | None = None) -> dict:
        """The outer section with the lowest loss of the sweep, among those with this alpha if given."""
        runs = json.loads(self.result("sweep").read_text())["runs"].values()
        tried = [
            run for run in runs if run["mode"] == mode and alpha in (None, run["outer"].get("mixing_alpha"))
        ]
        return min(tried, key=lambda run: run["val_loss"])["outer"]


OFTEN = Regime(
    30,
    {
        "blocking": {"sync_interval": 30},
        "streaming": {"sync_interval": 30, "num_fragments": 3, "overlap_delay": 3},
        "delayed_keep": {"sync_interval": 30, "overlap_delay": 30, "delay_mode": "delayed_keep"},
        "eager": {"sync_interval": 30, "overlap_delay": 30, "delay_mode": "eager"},
        "delayed_reset": {"sync_interval": 30, "overlap_delay": 30, "delay_mode": "delayed_reset"},
    },
    {
        "blocking": [
            (0.7, 0.9), (0.4, 0.9), (0.7, 0.8), (0.4, 0.8), (0.7, 0.6), (1.0, 0.6), (1.0, 0.3), (0.7, 0.3),
        ],
        "streaming": [
            (0.7, 0.9, 0.5), (0.4, 0.9, 0.5), (0.7, 0.8, 0.5), (0.4, 0.8, 0.5), (0.7, 0.6, 0.5),
            (1.0, 0.6, 0.5), (1.0, 0.8, 0.5), (1.0, 0.3, 0.5),
            (0.7, 0.6, 0.0), (1.0, 0.6, 0.0), (0.7, 0.8, 0.0), (0.4, 0.9, 0.0), (1.0, 0.3, 0.0),
        ],
        "delayed_keep": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (0.4, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.6)],
        "eager": [(0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (0.4, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.0)],
        "delayed_reset": [(0.7, 0.9), (0.4, 0.6), (0.2, 0.6), (0.4, 0.3), (0.7, 0.3)],
    },
    sweep_seed=1,
    num_seeds=12,
)  # fmt: skip
SELDOM = Regime(
    100,
    {
        "blocking": {"sync_interval": 100},
        "streaming": {"sync_interval": 100, "num_fragments": 4, "overlap_delay": 3},
        "streaming, long delay": {"sync_interval": 100, "num_fragments": 4, "overlap_delay": 20},
    },
    {
        "blocking": [
            (0.7, 0.6), (0.7, 0.7), (0.4, 0.8), (0.7, 0.8), (1.0, 0.3), (0.4, 0.9), (0.7, 0.9), (0.7, 0.5),
        ],
        "streaming": [
            (0.7, 0.6, 0.0), (0.7, 0.7, 0.0), (0.4, 0.8, 0.0), (0.7, 0.8, 0.0), (1.0, 0.3, 0.0),
            (0.7, 0.6, 0.5), (0.7, 0.7, 0.5), (0.4, 0.9, 0.5), (0.7, 0.8, 0.5), (0.7, 0.9, 0.5),
            (0.7, 0.7, 0.25),
        ],
        "streaming, long delay": [(0.7, 0.6, 0.0), (0.7, 0.6, 0.5)],
    },
    sweep_seed=11,
    num_seeds=4,
)  # fmt: skip
REGIMES = {regime.interval: regime for regime in (OFTEN, SELDOM)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["sweep", "table"])
    parser.add_argument("--interval", type=int, choices=REGIMES, required=True, help="H")
    arguments = parser.parse_args()
    regime = REGIMES[arguments.interval]
    runs = sweep(regime) if arguments.part == "sweep" else table(regime)
    path = regime.result(arguments.part)
    RESULTS.mkdir(exist_ok=True)
    done = json.loads(path.read_text())["runs"] if path.exists() else {}
    for name, run in runs.items():
        if name not in done or done[name]["outer"] != run["outer"]:
            done[name] = run | train_both(run["seed"], run["outer"], OUTER_STEPS * regime.interval)
            path.write_text(json.dumps({"machine": provenance(), "runs": done}, indent=1) + "\n")
        print(f"{name:56} {done[name]['val_loss']:.4f}", flush=True)
    if arguments.part == "table":
        (RESULTS / "outer_settings.md").write_text(markdown())
    return 0


def sweep(regime: Regime) -> dict[str, dict]:
    """Run name -> delay mode, seed and outer section."""
    runs = {}
    for mode, tried in regime.grid.items():
        for lr, momentum, *alpha in tried:
            outer = regime.modes[mode] | {"outer_lr": lr, "outer_momentum": momentum}
            name = f"{mode} lr {lr} momentum {momentum}"
            if alpha:
                outer["mixing_alpha"] = alpha[0]
                name += f" alpha {alpha[0]}"
            runs[name] = {"mode": mode, "seed": regime.sweep_seed, "outer": outer}
    return runs


def table(regime: Regime) -> dict[str, dict]:
    """Run name -> row, seed and outer section."""
    tuned = {mode: regime.best(mode) for mode in regime.modes}
    blocking, streaming = tuned["blocking"], tuned["streaming"]
    important = {
        "blocking, fp32": blocking,
        "streaming, fp32": streaming,
        "streaming, int4 + EF": streaming | INT4,
    }
    if regime is SELDOM:
        often = OFTEN.best("streaming")
        tuned_often = {leaf: often[leaf] for leaf in ("outer_lr", "outer_momentum", "mixing_alpha")}
        important["streaming, int4 + EF, best of H = 30"] = streaming | tuned_often | INT4
        others = {}
    else:
        others = {
            "streaming, int4 + EF, alpha = 0.5": regime.best("streaming", 0.5) | INT4,
            "streaming, int4 + EF, tau = 1": streaming | INT4 | {"overlap_delay": 1},
            "blocking, int4 + EF": blocking | INT4,
            "blocking, fp32, fragments in turn": blocking | {"num_fragments": streaming["num_fragments"]},
            "blocking, fp32, Streaming DiLoCo's": blocking | {"outer_lr": 0.4, "outer_momentum": 0.9},
            "blocking, fp32, DiLoCo's settings": blocking | {"outer_lr": 0.7, "outer_momentum": 0.9},
            "delayed_keep, int4 + EF": tuned["delayed_keep"] | INT4,
            "eager, int4 + EF": tuned["eager"] | INT4,
            "delayed_reset, int4 + EF": tuned["delayed_reset"] | INT4,
            "data parallel, fp32": {"method": "data_parallel"},
            "islands alone": {"method": "none"},
        }
    return {
        f"{row} | seed {seed}": {"row": row, "seed": seed, "outer": outer}
        for rows, seeds in ((important, range(1, regime.num_seeds + 1)), (others, SEEDS))
        for seed in seeds
        for row, outer in rows.items()
    }


def train_island(island: int, rank: int, path: str, lighthouse: str) -> None:
    from dilocox.train import train
    from dilocox.trainer import RankContext

    config = load_config(path, [f"wan.lighthouse={lighthouse}"])
    train(config, RankContext(island, rank, rank, CACHE), resume=False)


def train_both(seed: int, outer: dict, train_iters: int) -> dict:
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


def markdown() -> str:
    """The tables of all intervals that have been run."""
    lines = [
        "# Outer settings at equal tokens",
        "",
        "Validation loss in nats per token (spread = half the range over the seeds), and what one run sends.",
        "Every run has 20 outer steps. Outer lr, momentum and alpha are the best of a sweep on one seed, but",
        "where a row says whose they are. Differences are taken seed by seed (same data and first weights);",
        "± is the standard error of their mean.",
    ]
    for regime in REGIMES.values():
        path = regime.result("table")
        if path.exists():
            done = json.loads(path.read_text())["runs"]
            lines += ["", *section(regime, {name: done[name] for name in table(regime)})]
    return "\n".join(lines) + "\n"


def section(regime: Regime, runs: dict[str, dict]) -> list[str]:
    rows: dict[str, dict[int, dict]] = {}
    for run in runs.values():
        rows.setdefault(run["row"], {})[run["seed"]] = run
    lines = [
        f"## H = {regime.interval}, {OUTER_STEPS * regime.interval} inner steps",
        "",
        "| setting | lr / momentum / alpha | tau | seeds | mean | spread | to blocking, fp32 | MB sent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, results in rows.items():
        losses = [run["val_loss"] for run in results.values()]
        first = results[SEEDS[0]]
        tuned = [first["outer"].get(leaf) for leaf in ("outer_lr", "outer_momentum", "mixing_alpha")]
        figures = [
            " / ".join(str(value) for value in tuned if value is not None) or "-",
            str(first["outer"].get("overlap_delay", "-")),
            str(len(results)),
            f"{statistics.mean(losses):.4f}",
            f"{(max(losses) - min(losses)) / 2:.4f}",
            difference(results, rows["blocking, fp32"]) if row != "blocking, fp32" else "",
            f"{first['payload_bytes_sent'] / 1e6:.2f}",
        ]
        lines.append(f"| {row} | {' | '.join(figures)} |")
    cost = difference(rows["streaming, int4 + EF"], rows["streaming, fp32"])
    return [*lines, "", f"Streaming, int4 + EF, against streaming, fp32: {cost}."]


def difference(mine: dict[int, dict], other: dict[int, dict]) -> str:
    """Mean over the seeds that both have, and its standard error."""
    each = [mine[seed]["val_loss"] - other[seed]["val_loss"] for seed in mine if seed in other]
    return f"{statistics.mean(each):+.4f} ± {statistics.stdev(each) / len(each) ** 0.5:.4f}"


if __name__ == "__main__":
    raise SystemExit(main())
