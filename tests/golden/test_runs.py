"""Whole runs against the recorded ones, bit for bit: each delay mode once, over different codecs and layouts.

`python -m tests.golden.record tests/golden/runs.json --compare` compares all 76.
"""

import json
from pathlib import Path

import pytest

from tests.golden.record import MODES, cases, differences, run

RUNS = Path(__file__).with_name("runs.json")
NAMES = [
    "blocking int4 TP2",
    "streaming fp32 PP2",
    "delayed_keep low_rank DP2",
    "delayed_reset int4 DP2",
    "eager low_rank TP1",
]
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def rows():
    kept = json.loads(RUNS.read_text())
    if different := differences(kept):
        pytest.skip(f"bits may differ: {'; '.join(different)}")
    return kept["rows"]


def test_every_case_is_recorded():
    assert json.loads(RUNS.read_text())["rows"].keys() == cases().keys()
    assert {name.split()[0] for name in NAMES} == MODES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_the_recorded_bits(name, rows):
    assert run(cases()[name]) == rows[name]
