"""A stand-in for the trainer, to try what the job scripts do with signals, ends and restarts; no training.

It counts steps in `island_I/step` (after a resume only a few more), stops on a signal as the real one does
(state saved, status `interrupted`) and appends one line a start to `starts`. On PYTHONPATH before the real
package.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

STEP_S = 0.1
STEPS_AFTER_RESUME = 5
SAVE_S = 2.0
"""A checkpoint takes time, in which nothing may kill the ranks."""


def train(arguments: list[str]) -> int:
    settings = dict(a.split("=", 1) for before, a in pairwise(arguments) if before == "--set")
    run_dir = Path(settings["run.output_dir"]) / settings["run.name"]
    island = int(arguments[arguments.index("--island-id") + 1])
    folder = run_dir / f"island_{island}"
    folder.mkdir(parents=True, exist_ok=True)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stopped.append(number))
    saved = folder / "step"
    step = int(saved.read_text()) if saved.exists() else 0
    record = {
        name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME")
    }
    record |= {"island": island, "step": step, "lighthouse": settings.get("wan.lighthouse")}
    with (run_dir / "starts").open("a") as file:
        file.write(json.dumps(record) + "\n")
    last = step + STEPS_AFTER_RESUME if step else int(os.environ["STAND_IN_STEPS"])
    while step < last and not stopped:
        time.sleep(STEP_S)
        step += 1
    if stopped:
        time.sleep(SAVE_S)
    if record["rank"] == "0":
        saved.write_text(str(step))
        status = "interrupted" if stopped else "completed"
        (folder / "summary.json").write_text(json.dumps({"status": status}, indent=2))
    print(f"rank {record['rank']} of island {island} ends at step {step}, signals {stopped}", flush=True)
    return 0


def lighthouse() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("stand-in lighthouse", sys.argv[2:], flush=True)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(train(sys.argv[2:]) if sys.argv[1] == "train" else lighthouse())
