"""The recorder: who writes what, log lines, and steps that stay unique after a resume."""

import json
import math
import re
from dataclasses import replace

import pytest

from dilocox.config.schema import Config
from dilocox.metrics.jsonl import JsonlTail, JsonlWriter, read_records, truncate_after
from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord
from tests.metrics.test_records import EVENT, SYNC

CONFIG = Config.model_validate(
    {"inner": {"train_iters": 5, "global_batch_size": 4}, "logging": {"log_interval": 2}}
)


def inner(step, loss=2.0):
    return InnerRecord(
        inner_step=step, lm_loss=loss, grad_norm=1.0, lr=1e-3, tokens=512, step_time_s=step / 10
    )


@pytest.fixture
def make(tmp_path):
    made = []

    def recorder(**options):
        made.append(Recorder(tmp_path, **{"island_id": 1, "rank": 0, "config": CONFIG, **options}))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def steps(path):
    return [record.inner_step for record in read_records(path) if isinstance(record, InnerRecord)]


def test_only_rank_0_writes_metrics_and_every_rank_has_a_log(make, tmp_path):
    for rank in (1, 0):
        recorder = make(rank=rank)
        recorder.inner(inner(2))
        recorder.sync(SYNC)
        recorder.close()
    island = tmp_path / "island_1"
    assert [r.kind for r in read_records(island / "metrics.jsonl")] == ["inner", "sync"]
    assert "[island 1 rank 1]" in (island / "rank_1.log").read_text()
    assert "[island 1] " in (island / "rank_0.log").read_text()


def test_records_behind_a_step_without_its_loss_wait_for_it(make, tmp_path):
    path = tmp_path / "island_1" / "metrics.jsonl"
    recorder = make()
    recorder.sync(SYNC)
    recorder.queue_inner(inner(1, math.nan))
    recorder.event("skipped_step", 1)
    recorder.queue_inner(inner(2, math.nan))
    recorder.event("discard", 2)
    assert [record.kind for record in read_records(path)] == ["sync"]
    recorder.settle([4.0, 3.0])
    recorder.eval(EvalRecord(2, 3.5))
    kept = read_records(path)
    assert [r.kind for r in kept] == ["sync", "inner", "event", "inner", "event", "eval"]
    assert [r.lm_loss for r in kept if isinstance(r, InnerRecord)] == [4.0, 3.0]
    assert recorder.totals.inner_steps == 2 and recorder.totals.last_lm_loss == 3.0
    times = [json.loads(line)["time_s"] for line in path.read_text().splitlines()]
    assert times == sorted(times), "a record has the time at which it happened"


def test_a_recorder_that_closes_keeps_what_is_known(make, tmp_path):
    recorder = make()
    recorder.queue_inner(inner(1, math.nan))
    recorder.event("discard", 1)
    recorder.close()
    assert read_records(tmp_path / "island_1" / "metrics.jsonl") == [EventRecord(1, "discard")]
    with pytest.raises(ValueError, match="do not fit"):
        recorder.settle([1.0])


def test_iteration_line_is_megatrons(make, capfd):
    recorder = make()
    for step in range(1, 6):
        recorder.inner(inner(step))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3  # steps 2, 4 and the last one
    assert re.fullmatch(
        r"\[island 1\] iteration +2/ +5 \| consumed samples: +8 \| "
        r"elapsed time per iteration \(ms\): 150\.0 \| "
        r"learning rate: 1\.000000E-03 \| global batch size: +4 \| lm loss: 2\.000000E\+00 "
        r"\| grad norm: 1\.000 \|",
        lines[0],
    )
    assert "(ms): 350.0" in lines[1]  # the mean of the steps since the last line


def test_sync_line_and_silent_other_ranks(make, capfd):
    make(rank=1).sync(SYNC)
    assert capfd.readouterr().err == ""
    make(rank=0).sync(SYNC)
    assert (
        "outer step 1 | fragment 2 | participants 2 | pseudo-gradient norm 0.500 | cosine 0.800 | "
        "sent 0.001 MB | exchange 2.000 s | waiting 0.010 s | blocked 0.500 s |" in capfd.readouterr().err
    )


def test_resume_drops_what_will_be_repeated_and_keeps_events(make, tmp_path):
    first = make()
    for step in range(1, 5):
        first.inner(inner(step))
    first.eval(EvalRecord(inner_step=4, val_loss=1.0))
    first.event("leave", 4, island=0)
    first.close()
    second = make(resumed_step=2)
    assert second.totals.inner_steps == 2 and second.totals.tokens == 1024
    second.inner(inner(3, loss=9.0))
    path = tmp_path / "island_1" / "metrics.jsonl"
    assert steps(path) == [1, 2, 3]
    assert [r.kind for r in read_records(path)] == ["inner", "inner", "event", "inner"]
    assert second.totals.failures["leave"] == 1


@pytest.mark.parametrize("event_was_written", [True, False])
def test_a_sync_in_flight_at_the_checkpoint_is_there_once_after_the_resume(make, tmp_path, event_was_written):
    first = make()
    first.sync(replace(SYNC, inner_step=1, fragment=0))
    first.inner(inner(1))
    first.inner(inner(2))
    first.eval(EvalRecord(inner_step=2, val_loss=1.0))
    if event_was_written:
        first.event("checkpoint", 2)
    first.sync(replace(SYNC, inner_step=2, fragment=1))  # started at step 2, applied in step 3
    first.inner(inner(3))
    first.close()
    second = make(resumed_step=2)
    assert second.totals.payload_bytes_sent == SYNC.payload_bytes_sent
    assert second.totals.val_loss == 1.0
    second.sync(replace(SYNC, inner_step=2, fragment=1))
    records = read_records(tmp_path / "island_1" / "metrics.jsonl")
    assert [r.fragment for r in records if isinstance(r, SyncRecord)] == [0, 1]


def test_a_sync_drained_before_the_last_checkpoint_stays(make):
    first = make()
    first.inner(inner(5))
    first.sync(replace(SYNC, inner_step=5))
    first.event("checkpoint", 5)
    first.close()
    assert make(resumed_step=5).totals.payload_bytes_sent == SYNC.payload_bytes_sent


def test_failures_are_warnings_and_the_baselines_syncs_are_not_a_line_each(make, capfd):
    settings = {**CONFIG.model_dump(), "outer": {"method": "data_parallel"}}
    recorder = make(config=Config.model_validate(settings))
    for step in (1, 2):
        recorder.sync(replace(SYNC, inner_step=step, outer_step=step))
    recorder.event("discard", 2, reason="timeout")
    assert capfd.readouterr().err.splitlines() == [
        "[island 1] outer step 2 | fragment 2 | participants 2 | pseudo-gradient norm 0.500 | cosine 0.800 | "
        "sent 0.001 MB | exchange 2.000 s | waiting 0.010 s | blocked 0.500 s |",
        "[island 1] WARNING: event at iteration 2 | discard | reason timeout |",
    ]


def test_a_fresh_start_forgets_an_older_run(make, tmp_path):
    make().inner(inner(1))
    (tmp_path / "island_1" / "summary.json").write_text("{}")
    make()
    assert read_records(tmp_path / "island_1" / "metrics.jsonl") == []
    assert not (tmp_path / "island_1" / "summary.json").exists()


def test_a_torn_line_is_not_glued_to_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(inner(1))
    writer.close()
    with path.open("a") as file:
        file.write('{"kind": "inner", "inn')
    writer = JsonlWriter(path)
    writer.write(inner(2))
    writer.close()
    assert steps(path) == [1, 2]
    with path.open("a") as file:
        file.write("{")
    truncate_after(path, 1)
    assert steps(path) == [1]


def test_tail_waits_for_whole_lines_and_notices_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.read_new() == []
    writer = JsonlWriter(path)
    writer.write(inner(1))
    writer.write(EVENT)
    assert tail.read_new() == [inner(1), EVENT]
    line = json.dumps({"kind": "eval", "inner_step": 1, "val_loss": 2.0})
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert tail.read_new() == []
        file.write(line[20:] + "\n")
    assert tail.read_new() == [EvalRecord(inner_step=1, val_loss=2.0)]
    writer.close()
    truncate_after(path, 0)
    assert tail.read_new() == [EventRecord(inner_step=30, event="leave", details={"island": 1})]
