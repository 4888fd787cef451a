"""summary.json: the contract's keys, sums and means over islands, verdicts."""

import json
import math
from dataclasses import replace

import pytest

from dilocox.atomic import write_json
from dilocox.config.schema import Config
from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.records import EvalRecord, EventRecord
from dilocox.metrics.summary import (
    RunOutcome,
    data_parallel_bytes,
    island_summary,
    merge,
    write_island_summary,
)
from dilocox.metrics.throughput import Throughput
from dilocox.metrics.totals import Totals
from tests.metrics.test_records import INNER, SYNC

CONFIG = Config.model_validate(
    {"parallel": {"ranks_per_island": 2, "tensor_model_parallel_size": 2}, "outer": {"codec": "int4"}}
)


def make(island_id, *, config=CONFIG, events=(), interface=None, **changes):
    totals, throughput = Totals(), Throughput()
    for record in (EvalRecord(0, 8.0), replace(INNER, inner_step=30), SYNC, EvalRecord(30, 3.0), *events):
        totals.add(record)
    throughput.load_state_dict({"wall_s": 10.0, "compute_s": 9.0, "tokens": 512})
    outcome = RunOutcome(
        status="completed",
        run_id="r",
        parameters=500,
        outer_steps=2,
        anchor_hash="h",
        predicted_bytes=990,
        sample="def f",
    )
    summary = island_summary(
        config,
        island_id=island_id,
        outcome=outcome,
        totals=totals,
        throughput=throughput,
        interface=interface or InterfaceBytes("lo"),
    )
    return replace(summary, **changes)


def merged(tmp_path, *islands, **options):
    for island in islands:
        write_island_summary(tmp_path, island)
    result = merge(tmp_path, **options)
    assert json.loads((tmp_path / "summary.json").read_text()) == result
    return result


def test_keys_of_the_contract(tmp_path):
    result = merged(tmp_path, make(0), make(1))
    names = (
        "run_id status num_islands layout parameters inner_steps outer_steps tokens wall_s tokens_per_s "
        "val_loss val_perplexity compute_utilisation overlap_efficiency wan anchors_identical anchor_hash "
        "failures"
    )
    assert set(names.split()) <= set(result)
    wan = "codec payload_bytes_sent predicted_bytes socket_bytes_sent bits_per_parameter_per_outer_step"
    assert set(wan.split()) <= set(result["wan"])
    assert result["layout"] == {"tp": 2, "pp": 1, "dp": 1}


def test_figures(tmp_path):
    result = merged(tmp_path, make(0), make(1, wall_s=20.0))
    assert result["status"] == "completed" and result["anchors_identical"] is True
    assert result["tokens"] == 1024 and result["tokens_per_s"] == 1024 / 20
    assert result["first_val_loss"] == 8.0 and result["val_loss"] == 3.0
    assert result["val_perplexity"] == pytest.approx(math.exp(3.0))
    assert result["compute_utilisation"] == pytest.approx((0.9 + 0.45) / 2)
    assert result["overlap_efficiency"] == 0.75
    wan = result["wan"]
    assert wan["payload_bytes_sent"] == 2000 and wan["predicted_bytes"] == 1980
    assert wan["bits_per_parameter_per_outer_step"] == 8 * 1000 / (500 * 2)
    assert wan["socket_bytes_sent"] is None and "loopback" in wan["socket_bytes_note"]
    assert wan["data_parallel_bytes"] == 2 * 4 * 500 * 30
    assert result["failures"]["discard"] == 0


def test_socket_bytes_add_up_only_if_every_island_counted(tmp_path):
    assert (
        merged(tmp_path, make(0, socket_bytes_sent=5), make(1, socket_bytes_sent=6))["wan"][
            "socket_bytes_sent"
        ]
        == 11
    )
    assert merged(tmp_path, make(0, socket_bytes_sent=5), make(1))["wan"]["socket_bytes_sent"] is None


@pytest.mark.parametrize(
    "nodes, events, reason",
    [(1, [], None), (2, [], "several hosts"), (1, [EventRecord(5, "resume")], "resumed")],
)
def test_socket_bytes_only_where_the_counter_saw_all_of_them(tmp_path, nodes, events, reason):
    statistics = tmp_path / "eth7" / "statistics"
    statistics.mkdir(parents=True)
    for name in ("tx_bytes", "rx_bytes"):
        (statistics / name).write_text("100")
    interface = InterfaceBytes("eth7", sysfs=tmp_path)
    (statistics / "tx_bytes").write_text("142")
    config = Config.model_validate({"parallel": {"nodes_per_island": nodes}})
    island = make(0, config=config, events=events, interface=interface)
    assert island.socket_bytes_sent == (42 if reason is None else None)
    assert reason is None or reason in island.socket_bytes_note


@pytest.mark.parametrize("changes", [{"anchor_hash": "x"}, {"outer_steps": 3}])
def test_anchors_differ(tmp_path, changes):
    assert merged(tmp_path, make(0), make(1, **changes))["anchors_identical"] is False


@pytest.mark.parametrize(
    "statuses, options, expected",
    [
        (["completed", "completed"], {}, "completed"),
        (["completed", "interrupted"], {}, "interrupted"),
        (["completed", "failed"], {}, "failed"),
        (["completed"], {}, "running"),
        (["completed"], {"missing_status": "failed"}, "failed"),
        (["completed"], {"missing_status": "interrupted"}, "interrupted"),
        (["completed", "interrupted"], {"failed_islands": [1]}, "failed"),
    ],
)
def test_status(tmp_path, statuses, options, expected):
    islands = [make(i, status=status) for i, status in enumerate(statuses)]
    result = merged(tmp_path, *islands, **options)
    assert result["status"] == expected
    assert result["failures"]["missing_islands"] == list(range(len(statuses), 2))
    assert result["failures"]["failed_islands"] == options.get("failed_islands", [])
    if len(statuses) == 1:
        assert result["anchors_identical"] is False


def test_a_diverged_loss_is_null_not_nan(tmp_path):
    result = merged(tmp_path, make(0, val_loss=None), make(1, val_loss=None))
    assert result["val_loss"] is None and result["val_perplexity"] is None


def test_an_island_that_ends_while_another_merges_is_not_lost(tmp_path, monkeypatch):
    """Island 0 has read its own summary only, and writes after island 1 has written the full picture."""
    written = []

    def write_late(path, value):
        if not written:
            written.append(value)
            merged(tmp_path, make(1))
        write_json(path, value)

    write_island_summary(tmp_path, make(0))
    monkeypatch.setattr("dilocox.metrics.summary.write_json", write_late)
    result = merge(tmp_path)
    assert written[0]["failures"]["missing_islands"] == [1]
    assert result["failures"]["missing_islands"] == [] and result["anchors_identical"]
    assert json.loads((tmp_path / "summary.json").read_text()) == result


def test_nothing_to_merge(tmp_path):
    with pytest.raises(FileNotFoundError):
        merge(tmp_path)


@pytest.mark.parametrize("islands, expected", [(1, 0), (2, 4 * 10 * 7), (4, 4 * 10 * 7 * 3 // 2)])
def test_data_parallel_baseline(islands, expected):
    assert data_parallel_bytes(10, num_islands=islands, inner_steps=7) == expected
