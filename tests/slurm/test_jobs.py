"""What the shipped job scripts do with nodes, signals, time limits and restarts, with a stand-in trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
LAUNCH = Path(__file__).parents[2] / "launch"
STAND_IN = Path(__file__).parent / "stand_in"


class Run:
    """A run folder and the jobs of a test."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder / "runs/trial"
        self._settings = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(STAND_IN),
            "LAUNCH_DIR": str(LAUNCH),
            "CONFIG": "trial.yaml",
            "OUTPUT_DIR": str(folder / "runs"),
            "RANKS_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",
            "STAND_IN_STEPS": "10",
            "LIGHTHOUSE": "http://127.0.0.1:29510",
        }
        self._log = folder / "job.log"
        # The folder of the job must not be the repository, whose package Python would find first.
        self.options = [f"--output={self._log}", "--open-mode=append", f"--chdir={folder}"]

    def environment(self, **settings: object) -> dict[str, str]:
        return self._settings | {name: str(value) for name, value in settings.items()}

    def submit(self, script: str, *options: str, **settings: object) -> int:
        return self.cluster.submit(
            *self.options, *options, str(LAUNCH / "slurm" / script), env=self.environment(**settings)
        )

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def starts(self, island: int = 0) -> list[dict[str, object]]:
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [start for start in map(json.loads, lines) if start["island"] == island]

    def status(self, island: int = 0) -> str | None:
        path = self.folder / f"island_{island}/summary.json"
        return json.loads(path.read_text())["status"] if path.exists() else None

    def finish(self, job: int) -> None:
        try:
            self.cluster.wait_for(job, {"COMPLETED"}, timeout_s=120)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error

    def near_the_limit(self) -> None:
        """What `#SBATCH --signal=B:USR1@S` does; `scancel --batch` of this SLURM cannot do it to an array."""
        shells = [p for p in self.cluster.processes() if Path(p.cmdline()[-1]).name == "slurm_script"]
        pids = {shell.pid for shell in shells}
        # no subshell, and not one that an earlier test's job has not left yet
        shell = max((p for p in shells if p.ppid() not in pids), key=lambda p: p.create_time())
        shell.send_signal(signal.SIGUSR1)

    def wait_until(self, what: str, condition, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.log()}\n{self.cluster.logs()}"
            time.sleep(0.2)


@pytest.fixture
def run(cluster, tmp_path):
    return Run(cluster, tmp_path)


def test_one_allocation_deals_out_nodes_to_islands(run):
    job = run.submit("islands.sbatch", "--nodes=4", NUM_ISLANDS=2, LIGHTHOUSE_PORT=29777)
    run.finish(job)
    nodes = [{start["slurmd_nodename"] for start in run.starts(island)} for island in (0, 1)]
    assert [len(names) for names in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]
    assert {start["world_size"] for start in run.starts()} == {"2"}
    assert {start["lighthouse"] for start in run.starts(1)} == {"http://127.0.0.1:29777"}
    assert run.status(0) == run.status(1) == "completed"
    assert "'--bind', '[::]:29777', '--min-islands', '1'" in run.log()
    printed = list(run.folder.glob(f"logs/island_1/job_{job}/n*/**/stdout.log"))
    assert len(printed) == 2
    # submitted again: nothing is left to do
    run.finish(run.submit("islands.sbatch", "--nodes=4", NUM_ISLANDS=2, LIGHTHOUSE_PORT=29777))
    assert "are complete already" in run.log()
    assert len(run.starts()) == 2


def test_nodes_that_cannot_be_dealt_out_are_refused(run):
    job = run.submit("islands.sbatch", "--nodes=3", NUM_ISLANDS=2)
    run.cluster.wait_for(job, {"FAILED"}, timeout_s=60)
    assert "3 nodes cannot be dealt out to NUM_ISLANDS=2" in run.log()
    assert run.starts() == []


def test_near_the_time_limit_the_island_saves_and_the_job_runs_again(run):
    job = run.submit("island.sbatch", "--nodes=2", "--time=2", "--signal=B:USR1@110", STAND_IN_STEPS=100_000)
    run.finish(job)
    steps = [start["step"] for start in run.starts() if start["rank"] == "0"]
    assert len(steps) == 2
    assert 0 == steps[0] < steps[1]
    assert run.status() == "completed"
    assert "time limit is near" in run.log()
    assert "requeued; it will resume" in run.log()
    assert int(run.cluster.details(job)["Restarts"]) == len(steps) - 1


def test_a_requeue_by_the_site_saves_and_resumes(run):
    job = run.submit("island.sbatch", "--nodes=2", STAND_IN_STEPS=100_000)
    run.wait_until("both ranks", lambda: len(run.starts()) == 2)
    run.cluster.run("scontrol", "requeue", str(job))
    run.finish(job)
    steps = [start["step"] for start in run.starts() if start["rank"] == "0"]
    assert len(steps) == 2
    assert steps[1] > 0


def test_scancel_ends_every_process_and_nothing_comes_back(run):
    job = run.submit("islands.sbatch", "--nodes=4", NUM_ISLANDS=2, STAND_IN_STEPS=100_000)
    run.wait_until("all ranks", lambda: len(run.starts(0)) == len(run.starts(1)) == 2)
    assert run.cluster.processes(job)
    run.cluster.run("scancel", str(job))
    run.wait_until("the end of all processes", lambda: not run.cluster.processes(job))
    run.cluster.wait_for(job, {"CANCELLED"}, timeout_s=30)
    assert run.status(0) == run.status(1) == "interrupted"


def test_a_stop_on_request_takes_its_time_and_does_not_run_again(run):
    job = run.submit("island.sbatch", "--nodes=2", STAND_IN_STEPS=100_000)
    run.wait_until("both ranks", lambda: len(run.starts()) == 2)
    run.cluster.run("scancel", "--batch", "--signal=TERM", str(job))
    run.finish(job)
    assert run.status() == "interrupted"
    assert run.cluster.details(job)["Restarts"] == "0"


@pytest.mark.parametrize("kind", ["chain", "array"])
def test_a_run_longer_than_the_limit_goes_on_in_the_next_job(run, kind):
    if kind == "chain":
        command = [str(LAUNCH / "slurm/chain.sh"), "3", *run.options, "--nodes=1"]
    else:
        command = ["sbatch", "--array=1-3%1", *run.options, "--nodes=1"]
    script = str(LAUNCH / "slurm/island.sbatch")
    run.cluster.run(*command, script, env=run.environment(STAND_IN_STEPS=100_000))
    run.wait_until("the first job", lambda: len(run.starts()) == 1)
    run.near_the_limit()
    run.wait_until("the whole chain", lambda: not run.cluster.run("squeue", "--noheader").strip(), 120)
    steps = [start["step"] for start in run.starts()]
    assert len(steps) == 2  # the third job finds the run complete
    assert steps[1] > 0
    assert run.status() == "completed"
    # the agent survived the signal and waited for its ranks
    assert "User defined signal" not in run.log()
    assert "the next job of the chain resumes" in run.log()
    # squeue forgets a job a moment before its last line is on disk
    run.wait_until("the last job's line", lambda: "is complete already" in run.log())


def test_a_lighthouse_job_is_found_by_its_file(run, tmp_path):
    file = tmp_path / "meet/lighthouse"
    island = run.submit("island.sbatch", "--nodes=1", LIGHTHOUSE="", LIGHTHOUSE_FILE=file)
    run.wait_until(
        "the island's message", lambda: f"waiting for the lighthouse job to write {file}" in run.log()
    )
    job = run.submit("lighthouse.sbatch", LIGHTHOUSE_FILE=file, LIGHTHOUSE_PORT=29778)
    run.finish(island)
    assert run.starts()[0]["lighthouse"] == "http://127.0.0.1:29778"
    run.cluster.run("scancel", str(job))
    run.wait_until("the file to go", lambda: not file.exists())


@pytest.mark.parametrize(
    ("script", "options", "settings"),
    [
        ("island.sbatch", "--nodes=2", {}),
        ("islands.sbatch", "--nodes=4", {"NUM_ISLANDS": 2, "LIGHTHOUSE_PORT": 29779}),
    ],
)
def test_a_failing_rank_fails_the_job_and_ends_all_of_it(run, script, options, settings):
    job = run.submit(script, options, STAND_IN_STEPS="broken", **settings)
    run.cluster.wait_for(job, {"FAILED"}, timeout_s=90)
    assert "ended with code 1" in run.log()
    run.wait_until("the end of all processes", lambda: not run.cluster.processes(job))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CONTAINER": "docker"}, "must be apptainer, pyxis or empty"),
        ({"CONTAINER": "pyxis"}, "set CONTAINER_IMAGE"),
    ],
)
def test_a_wrong_container_setting_is_said(run, settings, said):
    job = run.submit("island.sbatch", "--nodes=1", **settings)
    run.cluster.wait_for(job, {"FAILED"}, timeout_s=60)
    assert said in run.log()


def test_modules_and_virtual_environment_are_used_on_the_nodes(run, tmp_path):
    """`module` is a shell function on real sites; here it is exported and records what it was asked."""
    venv = tmp_path / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"echo activated $SLURMD_NODENAME >> {tmp_path}/asked\n")
    function = {"BASH_FUNC_module%%": f'() {{ echo "module $*" >> {tmp_path}/asked; }}'}
    job = run.submit(
        "island.sbatch", "--nodes=1", MODULES="gcc/12 cuda/12", VENV=tmp_path / "venv", **function
    )
    run.finish(job)
    asked = (tmp_path / "asked").read_text()
    assert "module load gcc/12\nmodule load cuda/12\n" in asked
    assert "activated n1" in asked


def test_chain_says_its_usage():
    done = subprocess.run([str(LAUNCH / "slurm/chain.sh")], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage: chain.sh LENGTH" in done.stderr
