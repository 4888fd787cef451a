"""Records whole runs: every delay mode, kind of codec and layout, two islands, 30 inner steps.

    python -m tests.golden.record FILE            # records
    python -m tests.golden.record FILE --compare  # runs again and prints every row that differs

What is kept of a run: the losses of all inner steps of each island, and the hash of the anchors. A change
that changes no arithmetic leaves both equal, bit for bit, on the same processor with the same libraries:
torch adds up in another order on a CPU with other vector units.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path

from tests.training import train, write_run

STEPS = 30
MODES = {
    "blocking": {"sync_interval": 6},
    "streaming": {"sync_interval": 6, "num_fragments": 2, "overlap_delay": 1, "mixing_alpha": 0.5},
    "delayed_keep": {"sync_interval": 6, "num_fragments": 2, "overlap_delay": 3},
    "delayed_reset": {
        "sync_interval": 6, "num_fragments": 2, "overlap_delay": 3, "delay_mode": "delayed_reset"
    },
    "eager": {"sync_interval": 6, "overlap_delay": 6, "delay_mode": "eager"},
}  # fmt: skip
# Blocks of 16 divide every row of every shard; blocks of 64 are longer than the rows of this model.
CODECS = {
    "fp32": {"codec": "none"},
    "int4": {"codec": "int4", "error_feedback": True, "codec_block_size": 16},
    "int4-64": {"codec": "int4", "error_feedback": True, "codec_block_size": 64},
    "low_rank": {"codec": "low_rank", "error_feedback": True, "codec_rank": 4, "codec_block_size": 16},
    "low_rank-adaptive": {
        "codec": "low_rank", "codec_rank": 4, "adaptive_rank": True, "adaptive_interval": True
    },
}  # fmt: skip
LAYOUTS = {
    "TP1": {},
    "TP2": {"ranks_per_island": 2, "tensor_model_parallel_size": 2},
    "PP2": {"ranks_per_island": 2, "pipeline_model_parallel_size": 2},
    "DP2": {"ranks_per_island": 2, "use_distributed_optimizer": True},
}
# The distributed optimizer cuts matrices into flat shards, so low_rank runs without it.
LOW_RANK_LAYOUTS = LAYOUTS | {"DP2": {"ranks_per_island": 2}}


def cases() -> dict[str, dict]:
    """Sections of the configuration by name of the case."""
    found = {}
    for mode, codec, layout in product(MODES, CODECS, LAYOUTS):
        if codec in ("int4-64", "low_rank-adaptive") and mode not in ("blocking", "delayed_keep"):
            continue
        layouts = LOW_RANK_LAYOUTS if codec.startswith("low_rank") else LAYOUTS
        # one layer more than Megatron needs: two fragments in each stage of two
        found[f"{mode} {codec} {layout}"] = {
            "model": {"num_layers": 4},
            "parallel": {"num_islands": 2, "ranks_per_island": 1} | layouts[layout],
            "outer": MODES[mode] | CODECS[codec],
            "inner": {"train_iters": STEPS},
        }
    return found


def run(sections: dict) -> dict:
    """Trains one case. Returns what is kept of it."""
    from tests.training import SETTINGS

    folder = Path(tempfile.mkdtemp(prefix="dilocox-golden-"))
    try:
        merged = {name: SETTINGS.get(name, {}) | values for name, values in sections.items()}
        islands = train(write_run(folder, **merged))
        summary = json.loads((folder / "runs" / "test" / "summary.json").read_text())
    finally:
        shutil.rmtree(folder)
    return {
        "losses": [ranks[0][0] for ranks in islands],
        "anchor_hash": summary["anchor_hash"],
        "outer_steps": summary["outer_steps"],
        "payload_bytes": summary["wan"]["payload_bytes_sent"],
        "val_loss": summary["val_loss"],
    }


def machine() -> dict[str, str]:
    """What the bits depend on: the CPU, and the libraries that do the arithmetic."""
    import torch

    libraries = {name: version(name).split("+")[0] for name in ("torch", "megatron-core")}
    units = torch.backends.cpu.get_cpu_capability()
    return {"processor": _processor(), "vector units": units} | libraries


def differences(kept: dict) -> list[str]:
    """What is different here from where rows were recorded; empty if bits must be equal."""
    return [
        f"{key} is {here}, recorded on {there}"
        for key, here in machine().items()
        if (there := kept.get(key, "an unknown one")) != here
    ]


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    kept = json.loads(args.file.read_text()) if args.file.exists() else machine() | {"rows": {}}
    if args.compare:
        for difference in differences(kept):
            print(f"bits may differ: {difference}")
    num_different = 0
    for name, sections in cases().items():
        if args.only not in name or (not args.compare and name in kept["rows"]):
            continue
        row = run(sections)
        if not args.compare:
            kept["rows"][name] = row
            args.file.write_text(json.dumps(kept, indent=1) + "\n")
            print(name, row["anchor_hash"], row["outer_steps"], f"{row['losses'][0][-1]:.4f}", flush=True)
            continue
        different = [key for key, value in kept["rows"][name].items() if row[key] != value]
        num_different += bool(different)
        print(f"{'equal    ' if not different else 'DIFFERENT'} {name} {' '.join(different)}", flush=True)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
