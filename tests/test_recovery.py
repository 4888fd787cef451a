"""Real islands over torchft after a fault: processes, sockets and a lighthouse; the matrix is in tests/outer.

Every test ends with what follows the fault: the next syncs commit with all islands, anchors are equal, and
status and exit code tell the truth.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dilocox.errors import WanError
from dilocox.metrics.jsonl import read_records
from dilocox.metrics.records import EventRecord, SyncRecord
from tests.distributed.forkserver import run_islands
from tests.training import lighthouse, train_rank, write_run

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]
FAULTY = 1
LAST_SYNCS = 3


def train_with_fault(island, rank, path, overrides, fault, step_s):
    """Trains one rank; `fault` has what happens to the faulty island, by the number of its sync."""
    from dilocox.inner.step import Inner
    from dilocox.outer.wan.membership import TorchftWan

    (path.parent / f"pid_{island}").write_text(str(os.getpid()))
    real_open, real_step, opened = TorchftWan.open_session, Inner.step, [0]

    def open_session(wan, member):
        session = real_open(wan, member)
        opened[0] += member.kind == "sync"
        if island == FAULTY and fault is not None and member.kind == "sync" and opened[0] in fault:
            return fault[opened[0]](session)
        return session

    def slow_step(inner, *args):
        time.sleep(step_s)
        return real_step(inner, *args)

    TorchftWan.open_session, Inner.step = open_session, slow_step
    return train_rank(island, rank, path, overrides, None, False)


def votes_no(session):
    real = session.commit
    session.commit = lambda ok: real(False) and False
    return session


def broken_on_one_side(session):
    real = session.transport.all_to_all

    def lose(messages, recv_bytes):
        real(messages, recv_bytes)
        raise WanError("connection reset")

    session.transport.all_to_all = lose
    return session


def member_info_lost(session):
    session.commit(False)
    raise WanError("the member infos did not get through")


FAULTS = {
    "one rank votes no": {3: votes_no},
    "broken on one side": {3: broken_on_one_side},
    "member info lost after a heal": {3: votes_no, 4: member_info_lost},
}
MODES = {
    "blocking": {"sync_interval": 5},
    "streaming": {"sync_interval": 10, "num_fragments": 2, "overlap_delay": 2, "codec": "int4"},
}


def run(tmp_path, outer, *, num_islands=3, steps=80, fault=None, step_s=0.01, timeout_s=8.0, watch=None):
    path = write_run(
        tmp_path,
        parallel={"num_islands": num_islands},
        inner={"train_iters": steps},
        outer=outer,
        wan={"timeout_s": timeout_s, "grace_s": 2.0},
    )
    with lighthouse() as address:
        settings = [f"wan.lighthouse={address}"]
        helper = threading.Thread(target=watch, args=(tmp_path,), daemon=True) if watch else None
        if helper is not None:
            helper.start()
        arguments = (train_with_fault, num_islands, 1, path, settings, fault, step_s)
        run_islands(*arguments, timeout_s=250.0)
    folder = tmp_path / "runs" / "test"
    records = [read_records(folder / f"island_{i}" / "metrics.jsonl") for i in range(num_islands)]
    return json.loads((folder / "summary.json").read_text()), records


def assert_recovered(summary, records, *, most_lost=2):
    assert summary["status"] == "completed" and summary["anchors_identical"], summary["failures"]
    for island, of_island in enumerate(records):
        syncs = [record for record in of_island if isinstance(record, SyncRecord)]
        last = syncs[-LAST_SYNCS:]
        assert all(s.committed and s.num_participants == len(records) for s in last), last
        lost = [r for r in of_island if isinstance(r, EventRecord) and r.event == "discard"]
        if island != FAULTY:
            assert len(lost) <= most_lost, [record.details for record in lost]


def num_heals(records):
    return sum(isinstance(record, EventRecord) and record.event == "heal" for record in records[FAULTY])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_everybody_syncs_again(mode, fault, tmp_path):
    summary, records = run(tmp_path, MODES[mode], fault=FAULTS[fault])
    assert_recovered(summary, records)
    if fault != "broken on one side":  # of three islands none commits a sync that broke in its first half
        assert num_heals(records) >= 1


def stop_for_30_s(folder: Path):
    """SIGSTOP to the faulty island when it has synced for a while, SIGCONT 30 s later."""
    metrics = folder / "runs" / "test" / f"island_{FAULTY}" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"kind": "sync"') >= 3):
        time.sleep(0.2)
    process = int((folder / f"pid_{FAULTY}").read_text())
    os.kill(process, signal.SIGSTOP)
    time.sleep(30)
    os.kill(process, signal.SIGCONT)


def test_an_island_that_was_stopped_for_30_s_follows(tmp_path):
    """Case A of the faults that users met: from then on no island synced any more, and the run completed."""
    summary, records = run(tmp_path, {"sync_interval": 10}, steps=600, step_s=0.1, watch=stop_for_30_s)
    assert_recovered(summary, records)
    assert num_heals(records) >= 1
