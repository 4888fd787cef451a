"""A run in a WAN box: the lighthouse in the hub, one island a namespace, one rank an island."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.netns.wan_box import WanBox


def run_in_box(box: WanBox, config: Path, *overrides: str, timeout_s: float = 240.0) -> dict:
    """Trains all islands of a configuration and returns the merged summary.

    Raises:
        AssertionError: an island failed; the text is the end of what it printed.
    """
    lighthouse = box.start_in(
        box.hub,
        [sys.executable, "-m", "dilocox", "lighthouse", "--bind", f"{box.hub.address}:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    address = lighthouse.stdout.readline().split()[1]
    logs = [config.with_name(f"island_{island}.log") for island in range(len(box.islands))]
    jobs = []
    for island, log in enumerate(logs):
        environment = os.environ | {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
        }  # fmt: skip
        command = [sys.executable, "-m", "dilocox", "train", str(config), "--island-id", str(island)]
        for override in (f"wan.lighthouse={address}", *overrides):
            command += ["--set", override]
        with log.open("w") as output:
            jobs.append(
                box.start_in(island, command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        for job, log in zip(jobs, logs, strict=True):
            assert job.wait(timeout_s) == 0, log.read_text()[-3000:]
    finally:
        for process in (*jobs, lighthouse):
            process.kill()
            process.wait()
        lighthouse.stdout.close()
    values = json.loads(config.read_text())
    return json.loads(
        (Path(values["run"]["output_dir"]) / values["run"]["name"] / "summary.json").read_text()
    )
