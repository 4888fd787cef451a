"""A real SLURM of several virtual nodes on this host, private to one test session.

One munged, one slurmctld and one slurmd a node, all from the distribution's packages, with every file and
socket in a temporary folder and ports of their own: a SLURM that is installed on the host is not touched.

    with SlurmCluster() as cluster:
        job = cluster.submit("job.sbatch")
        cluster.wait_for(job, {"COMPLETED"}, timeout_s=120)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
FOLDER = "dilocox-slurm-"
REQUEUE_DELAY_S = 5
"""How long a requeued job waits; SLURM's default is 120."""

CONFIG = """\
ClusterName=testbed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire={requeue_delay_s}
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5
ReturnToService=2
MessageTimeout=60
SlurmdTimeout=300
KillWait=30
MinJobAge=3600
JobRequeue=1
MailProg=/bin/true
NodeName=n[1-{num_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] \
CPUs={cpus_per_node} State=UNKNOWN
PartitionName=main Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def missing_requirement() -> str | None:
    """Why a cluster cannot be had on this host, None if it can."""
    if os.geteuid() != 0:
        return "starting SLURM daemons needs root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"{', '.join(missing)} missing; apt-get install {PACKAGES}" if missing else None


def remove_stale() -> list[Path]:
    """Ends and removes clusters whose test session was killed; returns their folders."""
    removed = []
    for root in Path("/tmp").glob(f"{FOLDER}*"):
        owner = root.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(root)
            removed.append(root)
    return removed


class SlurmCluster:
    """Context manager; every node can run several jobs' steps, CPUs are only counted, not pinned."""

    def __init__(self, *, num_nodes: int = 4, cpus_per_node: int = 4) -> None:
        self.num_nodes = num_nodes
        self._cpus_per_node = cpus_per_node
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.root = Path()

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which the SLURM commands talk to this cluster."""
        return os.environ | {"SLURM_CONF": str(self.root / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        remove_stale()
        self.root = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir="/tmp"))
        self.root.chmod(0o755)
        try:
            self._start()
        except BaseException as error:
            logs = self.logs()
            self.close()
            raise RuntimeError(f"SLURM did not come up: {error}\n{logs}") from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Runs a SLURM command; returns its output.

        Raises:
            RuntimeError: it failed (with `check`); holds what it printed.
        """
        done = subprocess.run(
            command,
            env=self.environment | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> int:
        """`sbatch --parsable ARGUMENTS`; returns the job id (of the first component of a het job)."""
        return int(self.run("sbatch", "--parsable", *arguments, env=env).strip().split(";")[0])

    def details(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()[0]
        return dict(re.findall(r"(\w[\w:/]*)=(\S*)", shown))

    def state(self, job: int) -> str:
        return self.details(job)["JobState"]

    def wait_for(self, job: int, states: set[str], *, timeout_s: float) -> str:
        """Waits until the job is in one of the states.

        Raises:
            RuntimeError: it ended in another one, or the time is over; holds the daemons' logs.
        """
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline or state in ENDED:
                details = self.run("scontrol", "show", "job", str(job), check=False)
                raise RuntimeError(f"job {job} is {state}, not {states}\n{details}\n{self.logs()}")
            time.sleep(0.5)
        return state

    def processes(self, job: int | None = None) -> list[psutil.Process]:
        """Processes of a job (of all jobs of this cluster for None), found by their environment."""
        return [
            process
            for process, environment in _processes_of(self.root)
            if "SLURM_JOB_ID" in environment and job in (None, int(environment["SLURM_JOB_ID"]))
        ]

    def cancel_all(self, *, timeout_s: float = 60) -> None:
        """Cancels every job and waits until the nodes are free."""
        self.run("scancel", "--user=root", check=False)
        _wait(lambda: not self.run("squeue", "--noheader").strip(), timeout_s, "jobs to end")

    def logs(self, *, lines: int = 8) -> str:
        """The ends of the daemons' logs."""
        paths = [*sorted(self.root.glob("*.log")), *self.root.glob("munged.out")]
        texts = {path.name: path.read_text(errors="replace").splitlines()[-lines:] for path in paths}
        return "\n".join(line for name, text in texts.items() for line in (f"--- {name}", *text))

    def close(self) -> None:
        """Ends jobs and daemons and removes the folder."""
        if any(daemon.poll() is None for daemon in self._daemons):
            # It may be half started and not answer; the processes are ended below in any case.
            with contextlib.suppress(RuntimeError, TimeoutError, subprocess.SubprocessError, OSError):
                self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _remove(self.root)

    def _start(self) -> None:
        for name in ("state", *(f"spool.n{n}" for n in range(1, self.num_nodes + 1))):
            (self.root / name).mkdir()
        self._write_config()
        self._start_munge()
        configuration = str(self.root / "slurm.conf")
        self._daemon("slurmctld", "-D", "-c", "-f", configuration)
        _wait(lambda: "UP" in self.run("scontrol", "ping", check=False), 60, "slurmctld")
        for n in range(1, self.num_nodes + 1):
            self._daemon("slurmd", "-D", "-f", configuration, "-N", f"n{n}", log=f"slurmd.n{n}")
        _wait(lambda: self.idle_nodes() == self.num_nodes, 90, f"{self.num_nodes} idle nodes")

    def idle_nodes(self) -> int:
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()
        return shown.count("idle")

    def _write_config(self) -> None:
        controller_port, first_port = _free_ports(self.num_nodes)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            root=self.root,
            requeue_delay_s=REQUEUE_DELAY_S,
            controller_port=controller_port,
            num_nodes=self.num_nodes,
            first_port=first_port,
            last_port=first_port + self.num_nodes - 1,
            cpus_per_node=self._cpus_per_node,
        )
        (self.root / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        """An authentication daemon with a key of its own, as root, so that no account is needed."""
        private = self.root / "munge"
        private.mkdir(mode=0o700)
        key = private / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"pid": private / "pid", "log": private / "log", "seed": private / "seed"}
        options = [f"--{name}-file={path}" for name, path in files.items()]
        socket_path = self.root / "munge.socket"
        # --force: a socket in a folder below /tmp counts as insecure.
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}", *options
        )
        _wait(socket_path.exists, 30, "munged")

    def _daemon(self, name: str, *arguments: str, log: str | None = None) -> None:
        program = _program(name)
        assert program is not None
        environment = {
            key: value for key, value in self.environment.items() if not key.startswith("SLURM_JOB")
        }
        with (self.root / f"{log or name}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            )


def _remove(root: Path) -> None:
    for process, _ in _processes_of(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(root, ignore_errors=True)


def _processes_of(root: Path) -> list[tuple[psutil.Process, dict[str, str]]]:
    """Daemons and jobs of a cluster, each with its environment.

    They have its configuration in the environment; slurmstepd empties that, but keeps a log open.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            is_ours = environment.get("SLURM_CONF") == str(root / "slurm.conf")
            if process.name() == "slurmstepd":
                is_ours |= any(file.path.startswith(f"{root}/") for file in process.open_files())
        except (psutil.Error, OSError):
            continue  # it has ended, or is a kernel thread
        if is_ours:
            found.append((process, environment))
    return found


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(num_nodes: int) -> tuple[int, int]:
    """A port for the controller and the first of a row of free ones for the nodes."""
    for first in range(17001 + os.getpid() % 500 * 20, 32000, num_nodes + 1):
        if all(_is_free(port) for port in range(first, first + num_nodes + 1)):
            return first + num_nodes, first
    raise RuntimeError("no free ports below 32000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _wait(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.2)
