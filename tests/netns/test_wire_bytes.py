"""Bits on the wire as the kernel counts them, against what the formulas promise."""

import pytest

from tests.netns.islands import run_in_box
from tests.netns.wan_box import WanBox, missing_requirement
from tests.training import write_run

REASON = missing_requirement()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_query_groups": 4,
}  # 0.9 M parameters
OUTER = {"sync_interval": 4, "num_fragments": 4, "codec": "int4", "error_feedback": True, "overlap_delay": 0}
MOST_BITS = 4.5 * 1.05
"""int4 with block scales, plus 5 % for TCP/IP, message headers, member infos and heartbeats."""


@pytest.mark.parametrize("num_islands", [2, 3, 4])
def test_bits_per_parameter_and_outer_step(num_islands, tmp_path):
    path = write_run(
        tmp_path,
        model=MODEL,
        parallel={"num_islands": num_islands},
        inner={"train_iters": 80, "micro_batch_size": 1, "global_batch_size": 1},
        outer=OUTER,
    )
    with WanBox(num_islands) as box:
        before = [box.tx_bytes(island) for island in range(num_islands)]
        summary = run_in_box(box, path)
        counted = [box.tx_bytes(island) - start for island, start in enumerate(before)]
    assert summary["outer_steps"] == 20 and summary["anchors_identical"]
    factor = 2 * (num_islands - 1) / num_islands
    for sent in counted:
        bits = 8 * sent / summary["parameters"] / summary["outer_steps"]
        assert 4.0 * factor < bits <= MOST_BITS * factor
    wan = summary["wan"]
    assert wan["payload_bytes_sent"] == wan["predicted_bytes"]
    assert wan["payload_bytes_sent"] < wan["socket_bytes_sent"] <= sum(counted)
