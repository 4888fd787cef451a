"""`tools/preprocess_data.py` as a program: exit codes, and nothing left behind when it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def start(tmp_path: Path, source: Path, *flags: str) -> subprocess.Popen[str]:
    program = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    files = ["--input", str(source), "--output-prefix", str(tmp_path / "out" / "x")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*program, *files, *tokenizer, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def running_in_group(group: int) -> list[psutil.Process]:
    """Processes of a group, without dead ones that nobody has collected yet."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def test_a_bad_line_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "1"}\n{bad\n')
    process = start(tmp_path, source)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {source}:2 = 'broken JSON")
    assert "Traceback" not in err and "Warning" not in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_half_way_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(('{"text": "' + "1 " * 2000 + '"}\n') * 20_000)
    process = start(tmp_path, source, "--workers", "2", "--log-interval", "100")
    folder = tmp_path / "out"
    deadline = time.monotonic() + 120
    while not (folder.exists() and any(path.stat().st_size for path in folder.iterdir())):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    # Ctrl-C reaches the whole group, a scheduler's SIGTERM the program alone
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; nothing was written" and "Traceback" not in err
    assert list(folder.iterdir()) == []
    while members := running_in_group(process.pid):
        assert time.monotonic() < deadline, members
        time.sleep(0.02)
