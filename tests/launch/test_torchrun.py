"""The torchrun scripts: one island over one agent and over two gives the same losses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.launch.trial import REPOSITORY, write_trial

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
SCRIPTS = REPOSITORY / "launch/torchrun"
SECTIONS = """\
parallel: {num_islands: 1, ranks_per_island: 2, pipeline_model_parallel_size: 2}
inner: {train_iters: 8, micro_batch_size: 2, global_batch_size: 4}
outer: {sync_interval: 4}
"""


@pytest.fixture
def folder(tmp_path):
    write_trial(tmp_path, SECTIONS)
    return tmp_path


def start(folder, script, output_dir, *arguments, **settings):
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "ISLAND_ID": "0",
        **settings,
    }
    command = [str(SCRIPTS / script), "trial.yaml", "--set", f"run.output_dir={output_dir}", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes):
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)


def records(folder, output_dir, kind):
    lines = (folder / output_dir / "trial/island_0/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(folder, output_dir):
    return [record["lm_loss"] for record in records(folder, output_dir, "inner")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_agents_and_one_give_the_same_losses(folder):
    finish(start(folder, "one_node.sh", "one", RANKS_PER_NODE="2"))
    two = {"NUM_NODES": "2", "RANKS_PER_NODE": "1", "HEAD_ADDRESS": "127.0.0.1", "HEAD_PORT": free_port()}
    logs = [{"LOG_DIR": str(folder / f"logs/{node}")} for node in "ab"]
    layout = ("--set", "parallel.nodes_per_island=2")
    finish(*(start(folder, "several_nodes.sh", "two", *layout, **two, **log) for log in logs))
    assert len(losses(folder, "one")) == 8
    assert losses(folder, "one") == losses(folder, "two")
    assert records(folder, "one", "eval")[-1]["val_loss"] == records(folder, "two", "eval")[-1]["val_loss"]
    assert len(list(folder.glob("logs/*/*/attempt_0/0/stdout.log"))) == 2


def test_sigterm_saves_and_the_next_start_goes_on(folder):
    long = ("--set", "inner.train_iters=100000")
    first = start(folder, "one_node.sh", "runs", *long, RANKS_PER_NODE="2")
    path = folder / "runs/trial/island_0/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (path.exists() and '"kind": "inner"' in path.read_text()):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    printed = first.communicate(timeout=120)[0]
    saved = folder / "runs/trial/checkpoints/island_0/latest_checkpointed_iteration.txt"
    assert saved.exists(), printed
    stopped_at = int(saved.read_text())
    finish(
        start(
            folder,
            "one_node.sh",
            "runs",
            *long,
            "--set",
            f"run.exit_interval={stopped_at + 2}",
            RANKS_PER_NODE="2",
        )
    )
    steps = [record["inner_step"] for record in records(folder, "runs", "inner")]
    assert steps == list(range(1, stopped_at + 3))


@pytest.mark.parametrize(
    ("script", "settings", "said"),
    [
        ("one_node.sh", {}, "set RANKS_PER_NODE"),
        ("several_nodes.sh", {"RANKS_PER_NODE": "1"}, "set NUM_NODES"),
        ("several_nodes.sh", {"NUM_NODES": "2", "RANKS_PER_NODE": "1"}, "set HEAD_ADDRESS"),
    ],
)
def test_a_missing_setting_is_said(folder, script, settings, said):
    process = start(folder, script, "runs", **settings)
    assert said in process.communicate(timeout=60)[0]
    assert process.returncode != 0
