"""The real trainer on a real SLURM: islands of two nodes with tensor parallel ranks across them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.trial import REPOSITORY, write_trial
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SECTIONS = """\
parallel: {num_islands: 2, ranks_per_island: 2, nodes_per_island: 2, tensor_model_parallel_size: 2}
inner: {train_iters: 60, micro_batch_size: 4, global_batch_size: 4}
outer: {sync_interval: 10, num_fragments: 2, overlap_delay: 2, codec: int4, error_feedback: true}
checkpoint: {save_interval: 50}
wan: {timeout_s: 60, join_timeout_s: 600}
"""

DEMO_SIZE = ("model.num_layers=4", "model.hidden_size=128", "model.seq_length=128", "data.vocab_size=2048")
"""The model of configs/demo.yaml: 1.1 M parameters."""
NUM_LONG_STEPS = 220
LONG = (f"inner.train_iters={NUM_LONG_STEPS}", "inner.global_batch_size=8")
"""Long enough that an island can be away and come back."""


class Site:
    """A folder with config and corpus, and `dilocox submit` in it."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.run_dir = folder / "runs/trial"
        write_trial(folder, SECTIONS)

    def submit(self, site: str, *arguments: str, settings: Sequence[str] = ()) -> list[int]:
        """Returns the job ids in the order of submission."""
        (self.folder / "here.yaml").write_text(site)
        command = [sys.executable, "-m", "dilocox", "submit", "trial.yaml", "--site", "here.yaml", *arguments]
        for override in (*DEMO_SIZE, *settings):
            command += ["--set", override]
        environment = self.cluster.environment | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [int(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if ": job " in line]

    def log(self, job: int) -> str:
        return "".join(path.read_text() for path in self.run_dir.glob(f"logs/*-{job}.log"))

    def metrics(self, island: int, kind: str) -> list[dict[str, object]]:
        path = self.run_dir / f"island_{island}/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def inner_step(self, island: int) -> int:
        steps = self.metrics(island, "inner")
        return int(steps[-1]["inner_step"]) if steps else 0

    def events(self, island: int) -> list[str]:
        return [str(record["event"]) for record in self.metrics(island, "event")]

    def wait_until(self, what, condition, *jobs: int, timeout_s: float = 400) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(self.log(job)[-4000:] for job in jobs)
            assert time.monotonic() < deadline, f"waited for {what}\n{logs}\n{self.cluster.logs()}"
            time.sleep(0.5)

    def finish(self, *jobs: int) -> dict[str, object]:
        for job in jobs:
            try:
                self.cluster.wait_for(job, {"COMPLETED"}, timeout_s=500)
            except RuntimeError as error:
                raise AssertionError(f"{error}\n{self.log(job)[-6000:]}") from error
        return json.loads((self.run_dir / "summary.json").read_text())


@contextlib.contextmanager
def started_lighthouse(port: int):
    """A lighthouse outside of SLURM, as on a service node."""
    command = [sys.executable, "-m", "dilocox", "lighthouse", "--bind", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"lighthouse http://127.0.0.1:{port}\n"
            yield
        finally:
            process.terminate()


@pytest.fixture
def site(cluster, tmp_path):
    return Site(cluster, tmp_path)


def test_one_allocation_trains_two_islands_of_two_nodes(site):
    (job,) = site.submit("layout: one_allocation\nlighthouse_port: 29811\n")
    summary = site.finish(job)
    assert summary["status"] == "completed"
    assert summary["layout"] == {"tp": 2, "pp": 1, "dp": 1}
    assert summary["anchors_identical"] is True
    assert summary["outer_steps"] == 6
    assert summary["val_loss"] < summary["first_val_loss"]
    assert all(record["num_participants"] == 2 for record in site.metrics(0, "sync"))
    # submitted again: nothing is left to do
    (again,) = site.submit("layout: one_allocation\nlighthouse_port: 29811\n")
    site.finish(again)
    assert "starts on" not in site.log(again)


def test_an_island_requeued_in_mid_run_comes_back_while_the_other_goes_on(site):
    here = "lighthouse: job\nlighthouse_port: 29812\n"
    lighthouse, stays, leaves = site.submit(here, settings=LONG)
    site.wait_until("training", lambda: site.inner_step(1) >= 20, stays, leaves)
    site.cluster.run("scontrol", "requeue", str(leaves))
    site.wait_until("its return", lambda: site.events(1).count("join") >= 2, stays, leaves)
    assert site.inner_step(0) < NUM_LONG_STEPS, "the run was too short for this test"
    summary = site.finish(stays, leaves)
    assert summary["status"] == "completed"
    assert summary["anchors_identical"] is True
    # it resumed
    assert site.cluster.details(leaves)["Restarts"] == "1"
    assert "resume" in site.events(1)
    # the other never stopped: one start, every step once, and syncs without the one that was away (the sync
    # in which it left may be discarded)
    assert site.cluster.details(stays)["Restarts"] == "0"
    assert [record["inner_step"] for record in site.metrics(0, "inner")] == list(range(1, NUM_LONG_STEPS + 1))
    committed = [record for record in site.metrics(0, "sync") if record["committed"]]
    assert {record["num_participants"] for record in committed} == {1, 2}
    site.cluster.run("scancel", str(lighthouse))


def test_jobs_submitted_apart_meet_and_the_first_says_what_it_waits_for(site):
    here = "lighthouse: http://127.0.0.1:29813\n"
    with started_lighthouse(29813):
        (first,) = site.submit(here, "--islands", "0")
        message = "waiting | missing island 1 | here 1 of 2"
        site.wait_until("its message", lambda: message in site.log(first), first)
        assert site.inner_step(0) == 0
        (second,) = site.submit(here, "--islands", "1")
        summary = site.finish(first, second)
    assert summary["status"] == "completed"
    assert summary["anchors_identical"] is True


def test_scancel_ends_every_process_with_a_checkpoint(site):
    here = "layout: one_allocation\nlighthouse_port: 29814\n"
    (job,) = site.submit(here, settings=["inner.train_iters=100000"])
    site.wait_until("training", lambda: min(site.inner_step(0), site.inner_step(1)) >= 5, job)
    assert len(site.cluster.processes(job)) >= 4
    site.cluster.run("scancel", str(job))
    site.wait_until("the end of all processes", lambda: not site.cluster.processes(job), job)
    site.cluster.wait_for(job, {"CANCELLED"}, timeout_s=60)
    for island in (0, 1):
        saved = site.run_dir / f"checkpoints/island_{island}/latest_checkpointed_iteration.txt"
        assert int(saved.read_text()) == site.inner_step(island)
