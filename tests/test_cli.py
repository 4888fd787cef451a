"""The command line: one line and exit code 2 for bad input, before anything starts."""

import argparse
import subprocess
import sys

import pytest

from dilocox.cli import _parser, main
from tests.config.invalid_configs import INVALID

COMMANDS = {
    "launch": {
        "CONFIG", "--islands", "--lighthouse-bind", "--no-progress", "--overwrite", "--resume", "--set",
        "--wrap"
    },
    "train": {"CONFIG", "--island-id", "--resume", "--set"},
    "plan": {"CONFIG", "--set", "--step-time", "--tflops"},
    "report": {"FOLDER"},
    "doctor": {"CONFIG", "--listen", "--peer", "--set"},
    "submit": {"CONFIG", "--dry-run", "--islands", "--set", "--site"},
    "lighthouse": {"--advertise-address", "--bind", "--grace-s", "--min-islands"},
    "preprocess": {
        "--append-eod", "--input", "--json-keys", "--log-interval", "--output-prefix", "--skip-bad-lines",
        "--tokenizer-model", "--tokenizer-type", "--train-tokenizer", "--vocab-size", "--workers"
    },
}  # fmt: skip
"""The command line is a contract: scripts at other sites call it."""
CPU = ["--island-id", "0", "--set", "run.device=cpu", "--set"]
MEETING = ["--island-id", "0", "--set", "wan.lighthouse=http://127.0.0.1:1", "--set"]


def commands_of(*arguments):
    """The parsers of all commands."""
    (action,) = (a for a in _parser(arguments)._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_the_names_of_commands_are_pinned():
    assert set(commands_of()) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_command_are_pinned(command):
    actions = commands_of(command)[command]._actions
    names = {name for action in actions for name in action.option_strings or [action.dest.upper()]}
    assert names - {"-h", "--help"} == COMMANDS[command]


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
        # found before the process group exists: without MASTER_ADDR it could not be made
        ({"WORLD_SIZE": "1"}, [*CPU, "model.transformer_impl=transformer_engine"], "model.transformer_impl"),
        ({"WORLD_SIZE": "1"}, [*MEETING, "wan.interface=none0"], "wan.interface"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "99"}, [*CPU, "run.device=cuda"], "run.device"),
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
