"""`dilocox launch` as a process: endings, exit codes, and nothing left behind.

torchrun is real; what it starts is `launcher/fake_train.py`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dilocox import cli

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from dilocox.config.load import load_config
from dilocox.launch.command import LaunchOptions, launch
config = load_config(sys.argv[1])
train = ("-m", "tests.launch.fake_train", "--behaviour", sys.argv[3])
options = LaunchOptions(start=sys.argv[2], train=train)
sys.exit(launch(config, options))
"""
SETTINGS = """
run: {{name: t, output_dir: {folder}, device: cpu}}
parallel: {{num_islands: 2, ranks_per_island: 2, tensor_model_parallel_size: 2}}
inner: {{train_iters: 20}}
outer: {{sync_interval: 10}}
wan: {{lighthouse: 'http://127.0.0.1:1'}}
"""


class Launched:
    """A launcher that runs, and the marks by which its processes are known."""

    def __init__(self, folder, behaviour, start):
        self.run_dir = folder / "t"
        self.output = folder / "output.txt"
        settings = folder / "settings.yaml"
        settings.write_text(SETTINGS.format(folder=folder))
        with self.output.open("w") as output:
            command = [sys.executable, "-c", PROGRAM, str(settings), start, behaviour]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPOSITORY)

    def descendants(self):
        """Processes of this run: their command lines name its folder."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            words = process.info["cmdline"] or []
            mine = any(str(self.run_dir) in word for word in words) and process.pid != self.process.pid
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def wait_for_steps(self):
        metrics = [self.run_dir / f"island_{i}" / "metrics.jsonl" for i in range(2)]
        while not all(path.exists() and path.read_text().count("inner") > 3 for path in metrics):
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)

    def end(self):
        code = self.process.wait(timeout=120)
        assert self.descendants() == [], self.output.read_text()
        return code, self.output.read_text()

    def summary(self):
        return json.loads((self.run_dir / "summary.json").read_text())


@contextmanager
def launched(folder, behaviour, start="new"):
    launcher = Launched(folder, behaviour, start)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.wait()


def test_a_run_that_completes(tmp_path):
    with launched(tmp_path, "fine") as run:
        code, output = run.end()
    assert code == 0, output
    summary = run.summary()
    assert summary["status"] == "completed" and summary["anchors_identical"] is True
    for text in ("iteration       20/      20", "8.000 -> 3.000", "times as much", "    return 1 < 2"):
        assert text in output
    assert "rank 1]" not in output
    for name in ("config.yaml", "loss.png", "report.html", "launch.log", "island_1/rank_1.log"):
        assert (run.run_dir / name).stat().st_size > 0
    with launched(tmp_path, "fine") as again:
        code, output = again.end()
    assert code == 1 and "run.name = 't'" in output  # ConfigError, which the command line turns into 2


@pytest.mark.heavy
def test_a_refused_island_ends_the_wait_of_the_others(tmp_path):
    with launched(tmp_path, "refused") as run:
        code, output = run.end()
    assert code == 2, output
    assert "a planted fault; correct it" in output
    assert "stopping island 0: the refused island will not come" in output


def test_bad_settings_end_with_2_and_one_line(tmp_path, capsys):
    settings = tmp_path / "settings.yaml"
    settings.write_text(SETTINGS.format(folder=tmp_path))
    assert cli.main(["launch", str(settings), "--islands", "0"]) == 2
    assert "parallel.num_islands = 0" in capsys.readouterr().err
    (tmp_path / "t" / "island_0").mkdir(parents=True)
    (tmp_path / "t" / "island_0" / "metrics.jsonl").touch()
    assert cli.main(["launch", str(settings)]) == 2
    captured = capsys.readouterr()
    assert "run.name = 't'" in captured.err and "preparing data" not in captured.out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["launch", str(settings), "--resume", "--overwrite"])


@pytest.mark.heavy
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_with_a_checkpoint_and_the_run_goes_on_from_it(tmp_path, number, code):
    with launched(tmp_path, "forever") as run:
        run.wait_for_steps()
        os.kill(run.process.pid, number)
        assert run.end()[0] == code
    assert run.summary()["status"] == "interrupted"
    assert len(list(run.run_dir.glob("checkpoints/*/latest_checkpointed_iteration.txt"))) == 2
    with launched(tmp_path, "fine", start="resume") as resumed:
        assert resumed.end()[0] == 0
    steps = [json.loads(line) for line in (run.run_dir / "island_0/metrics.jsonl").read_text().splitlines()]
    assert resumed.summary()["status"] == "completed"
    assert any(record.get("event") == "checkpoint" for record in steps)


@pytest.mark.heavy
def test_a_second_signal_stops_ranks_that_do_not_listen(tmp_path):
    with launched(tmp_path, "ignores_sigterm") as run:
        run.wait_for_steps()
        os.kill(run.process.pid, signal.SIGINT)
        while "stopping: all ranks" not in run.output.read_text():
            time.sleep(0.1)
        os.kill(run.process.pid, signal.SIGINT)
        code, output = run.end()
    assert code == 130 and "by force" in output


@pytest.mark.heavy
@pytest.mark.parametrize(
    "behaviour, reason", [("crash", "RuntimeError: a planted fault"), ("killed", "killed by SIGKILL")]
)
def test_an_island_that_dies_is_reported_and_the_other_finishes(tmp_path, behaviour, reason):
    with launched(tmp_path, behaviour) as run:
        code, output = run.end()
    assert code == 1
    assert reason in output, output
    assert "island 1 failed: rank 1" in output, output
    summary = run.summary()
    assert summary["status"] == "failed" and summary["failures"]["failed_islands"] == [1]
    assert summary["islands"][0]["status"] == "completed"


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_nothing_outlives_a_killed_launcher(tmp_path):
    with launched(tmp_path, "forever") as run:
        run.wait_for_steps()
        assert len(run.descendants()) >= 6
        run.process.kill()
        run.process.wait()
        while run.descendants():
            time.sleep(0.1)


@pytest.mark.heavy
def test_a_killed_torchrun_takes_its_ranks_and_their_helpers_along(tmp_path):
    with launched(tmp_path, "orphan") as run:
        run.wait_for_steps()
        agents = [p for p in run.descendants() if "torch.distributed.run" in p.cmdline()]
        assert len(agents) == 2
        helpers = []
        while len(helpers) < 4:  # only the first rank of each island writes steps; the others may be behind
            assert run.process.poll() is None
            time.sleep(0.1)
            children = [child for agent in agents for child in agent.children(recursive=True)]
            helpers = [child for child in children if "sleep" in str(child.cmdline())]
        for agent in agents:
            agent.kill()
        code, output = run.end()
        assert code == 1 and "island 0 failed" in output
    assert not any(helper.is_running() for helper in helpers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "parallel.nodes_per_island=2",
            "parallel.nodes_per_island = 2: `dilocox launch` runs every island",
        ),
        ("run.output_dir=/proc/nowhere", "run.output_dir = '/proc/nowhere': cannot be written"),
        ("checkpoint.save=/proc/nowhere", "checkpoint.save = '/proc/nowhere': cannot be written"),
        ("checkpoint.save=/etc/passwd", "checkpoint.save = '/etc/passwd': /etc/passwd is a file"),
        ("data.data_cache_path=/proc/nowhere", "data.data_cache_path = '/proc/nowhere'"),
        (f"run.output_dir=/tmp/{'n' * 300}", "cannot be written (File name too long)"),
        (f"run.name={'n' * 300}", "run.name = 'nnn"),
        ("model.seq_length=100000000", "data.data_path = "),
        ("data.split=999999999,1,0", "logging.eval_iters: 0"),
    ],
)
def test_what_can_be_known_is_known_before_start(tmp_path, settings, message, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.format(folder=tmp_path))
    assert cli.main(["launch", str(path), "--set", settings]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed and len(printed.splitlines()) == 1
    assert not (tmp_path / "t").exists()


def test_auto_without_gpu_is_refused_what_a_cpu_cannot_do(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.format(folder=tmp_path).replace("device: cpu", "device: auto"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["launch", str(path), "--set", "model.params_dtype=bf16"]) == 2
    assert "run.device auto found no GPU" in capsys.readouterr().err
