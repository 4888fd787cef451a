"""Two islands that have nothing but IPv6 between them, and a host name that means loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.launch.trial import REPOSITORY, write_trial
from tests.netns.wan_box import WanBox, missing_requirement

REASON = missing_requirement()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
SECTIONS = """\
parallel: {num_islands: 2, ranks_per_island: 1}
inner: {train_iters: 20, micro_batch_size: 4, global_batch_size: 4}
outer: {sync_interval: 10, num_fragments: 2, overlap_delay: 2, codec: int4}
wan: {port_range: 29600-29609}
"""


def test_islands_train_over_ipv6_alone(tmp_path):
    write_trial(tmp_path, SECTIONS)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "RANKS_PER_NODE": "1",
    }
    script = str(REPOSITORY / "launch/torchrun/one_node.sh")
    with WanBox(2, ipv6=True) as box:
        bind = f"[{box.hub.address}]:29510"
        command = [sys.executable, "-m", "dilocox", "lighthouse", "--bind", bind]
        lighthouse = box.start_in(box.hub, command, env=environment)
        islands = [
            box.start_in(
                island,
                [script, "trial.yaml"],
                cwd=tmp_path,
                env=environment | {"ISLAND_ID": str(island), "LIGHTHOUSE": f"http://{bind}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for island in (0, 1)
        ]
        printed = [process.communicate(timeout=400)[0] for process in islands]
        assert [process.returncode for process in islands] == [0, 0], "\n".join(printed)
        assert box.tx_bytes(0) > 10_000
        lighthouse.terminate()
        assert lighthouse.wait(timeout=30) == 0
    summary = json.loads((tmp_path / "runs/trial/summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["anchors_identical"] is True
    assert f"interface wan0, address {box.islands[1].address} (ipv6)" in printed[1]
