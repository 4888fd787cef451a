"""One line of metrics.jsonl: the contract's names, and there and back again."""

import json
import math

import pytest

from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord, from_line, to_line

INNER = InnerRecord(inner_step=3, lm_loss=2.5, grad_norm=1.0, lr=1e-3, tokens=512, step_time_s=0.25)
SYNC = SyncRecord(
    inner_step=30,
    outer_step=1,
    fragment=2,
    num_participants=2,
    pseudo_gradient_norm=0.5,
    cosine_to_mean=0.8,
    payload_bytes_sent=1000,
    exchange_s=2.0,
    waiting_s=0.01,
    blocked_s=0.5,
    codec="int4",
    committed=True,
)
EVAL = EvalRecord(inner_step=30, val_loss=3.0)
EVENT = EventRecord(inner_step=30, event="leave", details={"island": 1})


@pytest.mark.parametrize("record", [INNER, SYNC, EVAL, EVENT])
def test_a_line_reads_back_as_the_record(record):
    line = to_line(record, time_s=12.3456)
    assert line.endswith("\n") and line.count("\n") == 1
    assert from_line(line) == record
    assert json.loads(line)["time_s"] == 12.346


@pytest.mark.parametrize(
    "record, names",
    [
        (INNER, "inner_step lm_loss grad_norm lr tokens step_time_s"),
        (
            SYNC,
            "outer_step fragment num_participants pseudo_gradient_norm cosine_to_mean payload_bytes_sent "
            "exchange_s waiting_s blocked_s codec committed inner_step",
        ),
        (EVAL, "inner_step val_loss"),
        (EVENT, "inner_step event details"),
    ],
)
def test_names_are_the_contract(record, names):
    assert set(json.loads(to_line(record, time_s=0))) == {"kind", "time_s", *names.split()}


def test_nan_is_null_in_the_file_and_nan_in_the_record():
    line = to_line(
        InnerRecord(inner_step=1, lm_loss=math.nan, grad_norm=math.inf, lr=0.1, tokens=1, step_time_s=1.0),
        time_s=0,
    )
    assert json.loads(line)["lm_loss"] is None
    back = from_line(line)
    assert math.isnan(back.lm_loss) and math.isnan(back.grad_norm)


def test_no_cosine_stays_none():
    line = to_line(SYNC, time_s=0).replace('"cosine_to_mean": 0.8', '"cosine_to_mean": null')
    assert from_line(line).cosine_to_mean is None


@pytest.mark.parametrize("line", ["[]", '{"kind": "other"}', '{"kind": "inner", "inner_step": 1}', "{"])
def test_anything_else_is_refused(line):
    with pytest.raises(ValueError):
        from_line(line)
