"""Where and on what a benchmark ran: goes into every file under `benchmarks/results/`."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, object]:
    """Machine, versions, load before the run, and commit (`+` = with uncommitted changes)."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD")
        + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    vector = [word for word in ("avx2", "avx512f") if any(word in line.split() for line in lines[:40])]
    return " ".join([names[0] if names else platform.machine(), *vector])
