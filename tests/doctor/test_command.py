"""The command on this very host: report, exit codes, measurements over a real connection."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from dilocox.cli import main
from dilocox.doctor import probe, warn
from dilocox.doctor.host import this_host
from dilocox.doctor.software import PACKAGES
from tests.doctor.hosts import config, healthy


@pytest.fixture
def server():
    stop = threading.Event()
    with probe.open_server("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=probe.serve, args=(listening, stop))
        thread.start()
        yield listening.getsockname()[1]
        stop.set()
        thread.join()


def free_port():
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return probe_socket.getsockname()[1]


def test_measures_clock_and_bandwidth(server):
    report = probe.measure("127.0.0.1", server, seconds=0.2)
    assert abs(report.clock_skew_s) < 0.5
    assert report.gbps > 0
    assert report.round_trip_s > 0


def test_the_server_survives_clients_that_break_off(server):
    for first_bytes in (b"", b"t", b"x"):
        with socket.create_connection(("127.0.0.1", server)) as client:
            client.sendall(first_bytes)
    assert probe.measure("127.0.0.1", server, seconds=0.1).gbps > 0


def test_peer_in_the_report(server, capsys):
    main(["doctor", "--peer", f"127.0.0.1:{server}"])
    printed = capsys.readouterr().out
    assert re.search(r"ok +peer: 127\.0\.0\.1:\d+: \d+\.\d+ Gbit/s", printed)
    assert re.search(r"ok +clock: within 5 s of 127\.0\.0\.1", printed)


def test_a_peer_that_does_not_listen_is_a_problem(capsys):
    port = free_port()
    assert main(["doctor", "--peer", f"127.0.0.1:{port}"]) == 1
    printed = capsys.readouterr().out
    assert f"run `dilocox doctor --listen 127.0.0.1:{port}` there" in printed


def test_a_dead_lighthouse_is_a_problem(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(f"wan: {{lighthouse: 'http://127.0.0.1:{free_port()}'}}\n")
    assert main(["doctor", str(path)]) == 1
    assert "does not answer (refused); nothing listens there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nonsense"], "--listen = 'nonsense'"),
        (["--listen", "203.0.113.9:4000"], "cannot listen there"),
        (["--peer", "nonsense"], "--peer = 'nonsense'"),
        (["--set", "inner.lr=1"], "give CONFIG as well"),
        (["missing.yaml"], "cannot be read"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_quick_checks_import_no_torch_and_answer_about_this_host():
    code = (
        "import sys; from dilocox.config.schema import Config; from dilocox.config.defaults import resolve;"
        "from dilocox.doctor import quick_checks; quick_checks(resolve(Config()));"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_this_host_answers_every_question(tmp_path):
    host = this_host()
    assert host.python_version >= (3, 11)
    assert host.package_version("torch")
    assert host.package_version("no-such-package") is None
    assert host.has_submodule("dilocox", "doctor")
    assert host.has_submodule("dilocox", "errors")
    assert not host.has_submodule("dilocox", "nothing")
    assert not host.has_submodule("no_such_package", "nothing")
    assert host.free_bytes(tmp_path / "not" / "there" / "yet") > 0
    assert host.file_system(tmp_path) != "unknown"
    assert host.open_file_limit()[0] != 0
    assert host.ephemeral_ports()[0] > 0
    assert host.reach("127.0.0.1", free_port(), 1.0) == "refused"
    assert host.clock_skew_s("127.0.0.1", free_port()) is None


def test_version_ranges_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", text)[0]: text.split(";")[0].strip() for text in project["dependencies"]}
    for name, (at_least, below) in PACKAGES.items():
        text = f"{name}>={'.'.join(map(str, at_least))}" + (f",<{'.'.join(map(str, below))}" if below else "")
        assert declared[name] == text


def test_a_run_starts_with_what_the_short_form_finds(tmp_path, monkeypatch, capsys):
    """`launch` and `train` call `warn`; neither is held up by it."""
    monkeypatch.setattr("dilocox.doctor.command.this_host", lambda: healthy(free_bytes=lambda path: 10**8))
    warn(config(tmp_path))
    said = capsys.readouterr().err
    assert re.fullmatch(r"dilocox: problem +disk: .* lower checkpoint\.save_retain\n", said)
