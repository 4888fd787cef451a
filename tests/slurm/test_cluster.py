"""The virtual SLURM itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import FOLDER, SlurmCluster, remove_stale

pytestmark = pytest.mark.slurm


def test_four_idle_nodes(cluster):
    assert cluster.run("sinfo", "--noheader", "--format=%D %t").split() == ["4", "idle"]


def test_a_job_runs_on_two_nodes(cluster, tmp_path):
    command = "srun --ntasks-per-node=1 bash -c 'echo $SLURMD_NODENAME $SLURM_NODEID'"
    output = tmp_path / "out"
    job = cluster.submit("--nodes=2", f"--output={output}", f"--wrap={command}")
    cluster.wait_for(job, {"COMPLETED"}, timeout_s=60)
    names = sorted(line.split() for line in output.read_text().splitlines())
    assert [number for _, number in names] == ["0", "1"]
    assert len({name for name, _ in names}) == 2


def test_cancel_all_ends_processes(cluster):
    job = cluster.submit("--nodes=2", "--output=/dev/null", "--wrap=srun sleep 1000")
    cluster.wait_for(job, {"RUNNING"}, timeout_s=60)
    deadline = time.monotonic() + 30
    while len(cluster.processes(job)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.processes(job)
    cluster.cancel_all()
    deadline = time.monotonic() + 30
    while cluster.processes(job) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.processes(job) == []


def test_wait_for_reports_a_job_that_ended_otherwise(cluster):
    job = cluster.submit("--output=/dev/null", "--wrap=exit 3")
    with pytest.raises(RuntimeError, match=r"is FAILED(.|\n)*ExitCode=3:0"):
        cluster.wait_for(job, {"COMPLETED"}, timeout_s=60)


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(monkeypatch):
    def planted(self):
        raise TimeoutError("waited 30 s for munged")

    monkeypatch.setattr(SlurmCluster, "_start_munge", planted)
    broken = SlurmCluster(num_nodes=1)
    with pytest.raises(RuntimeError, match="SLURM did not come up: waited 30 s for munged"), broken:
        pass
    assert not broken.root.exists()


def test_what_a_killed_session_left_is_removed(cluster):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{dead.pid}-", dir="/tmp"))
    environment = os.environ | {"SLURM_CONF": str(left / "slurm.conf")}
    with subprocess.Popen(["sleep", "1000"], env=environment) as orphan:
        assert remove_stale() == [left]
        assert orphan.wait(timeout=10) != 0
    assert not left.exists()
    assert cluster.idle_nodes() == 4  # the running one is left alone
