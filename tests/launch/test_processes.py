"""Jobs: found as a whole, stopped as a whole, tied to the launcher's life."""

import os
import queue
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dilocox.launch.processes import JobSpec, LocalJob
from dilocox.pdeathsig import gpu_slice

DETACHED_CHILD = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('ready', flush=True)\n"
)


def start(code, *arguments, **options):
    lines = queue.Queue()
    return LocalJob(JobSpec("job", [sys.executable, "-c", code, *arguments], **options), lines), lines


def read_to_end(lines):
    read = []
    while (line := lines.get(timeout=60)).text is not None:
        read.append(line.text)
    return read


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


def test_output_environment_and_exit_code():
    job, lines = start(
        "import os, sys; print(os.environ['GREETING']); print('err', file=sys.stderr); sys.exit(3)",
        environment={"GREETING": "hello=world"},
    )
    assert sorted(read_to_end(lines)) == ["err", "hello=world"]
    wait_until(lambda: job.poll() is not None)
    assert job.poll() == 3
    job.kill()


def test_kill_finds_children_in_sessions_of_their_own_whose_parent_has_gone():
    job, lines = start(DETACHED_CHILD)
    assert lines.get(timeout=60).text == "ready"
    wait_until(lambda: job.poll() is not None)
    (child,) = job.processes()
    job.kill()
    job.kill()
    assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE
    assert job.processes() == []


def test_only_ranks_are_interrupted():
    rank = (
        "import signal, subprocess, sys, time\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"  # a helper
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    agent = (
        "import os, subprocess, sys\n"
        "os.environ['LOCAL_RANK'] = '0'\n"
        "rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "sys.exit(rank.wait() + 7)\n"
    )
    job, lines = start(agent, rank)
    try:
        assert lines.get(timeout=60).text == "ready"
        assert job.interrupt_ranks() == 2  # the rank and its helper, which gets no signal of its own
        assert lines.get(timeout=60).text == "saved"
        wait_until(lambda: job.poll() is not None)
        assert job.poll() == 7
        assert len(job.processes()) == 1
    finally:
        job.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_launcher_takes_its_jobs_along():
    launcher = (
        "import queue, sys, time\n"
        "from dilocox.launch.processes import LocalJob, JobSpec\n"
        "lines = queue.Queue()\n"
        "program = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "job = LocalJob(JobSpec('job', [sys.executable, '-c', program]), lines)\n"
        "print(lines.get().text, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert psutil.pid_exists(child)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_a_missing_command_says_so():
    lines = queue.Queue()
    job = LocalJob(JobSpec("job", ["no-such-command"]), lines)
    assert read_to_end(lines) == ["cannot start no-such-command: No such file or directory"]
    job.kill()


@pytest.mark.parametrize(
    "visible, expected", [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")]
)
def test_an_island_gets_its_slice_of_the_visible_gpus(visible, expected):
    assert gpu_slice(visible, 2, 4) == expected
