"""The command line: one line and exit code 2 for bad input, before anything starts."""

import subprocess
import sys

import pytest

from dilocox.cli import main
from tests.config.invalid_configs import INVALID

COMMANDS = ["launch", "train", "plan", "report", "doctor", "submit", "lighthouse", "preprocess"]


@pytest.mark.parametrize("case", INVALID[::40], ids=lambda case: case.name)
def test_an_invalid_configuration_is_one_line_and_exit_code_2(case, tmp_path, capsys, monkeypatch):
    def no_process(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    path = tmp_path / "config.yaml"
    path.write_text(case.text)
    overrides = [word for override in case.overrides for word in ("--set", override)]
    assert main(["launch", str(path), *overrides]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("dilocox: error: ")
    line = line.replace(str(path), "FILE")
    assert case.field in line and case.value in line and all(part in line for part in case.rule)
    assert captured.out == ""


def test_train_outside_torchrun_says_so(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    assert main(["train", str(path), "--island-id", "0"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "environment, arguments, field",
    [
        ({"WORLD_SIZE": "1"}, ["--island-id", "2"], "--island-id"),
        ({"WORLD_SIZE": "3"}, ["--island-id", "0"], "parallel.ranks_per_island"),
        ({"WORLD_SIZE": "1"}, ["--island-id", "0"], "wan.lighthouse"),
    ],
)
def test_train_checks_its_place(environment, arguments, field, tmp_path, capsys, monkeypatch):
    for name, value in ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | environment).items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    assert main(["train", str(path), *arguments]) == 2
    assert field in capsys.readouterr().err


def test_lighthouse_refuses_a_port_in_use(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["lighthouse", "--bind", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    assert "--bind" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"dilocox {command}" in capsys.readouterr().out


def test_plan_imports_no_torch(tmp_path):
    program = (
        "import sys; from dilocox.cli import main;"
        "code = main(['plan', 'configs/demo.yaml']);"
        "print(sorted(m for m in sys.modules if m == 'torch'), code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
