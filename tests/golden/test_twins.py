"""The twins against the numbers of `numbers.json`, which change only with a reason.

`python -m tests.golden.test_twins` writes them again.
"""

import json
from pathlib import Path

import pytest

from tests.golden.cases import CASES

NUMBERS = Path(__file__).with_name("numbers.json")
KEPT_STEPS = (3, 7, 11, 12, 15, 30, -1)


def numbers(case):
    """[anchors, locals] of each fragment after some steps and after the drain."""
    return [[case.twin(fragment)[step] for step in KEPT_STEPS] for fragment in range(case.num_fragments)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twin_gives_the_golden_numbers(case):
    golden = json.loads(NUMBERS.read_text())[case.name]
    for ours, kept in zip(numbers(case), golden, strict=True):
        for (anchors, local), (kept_anchors, kept_local) in zip(ours, kept, strict=True):
            assert anchors == pytest.approx(kept_anchors, abs=1e-5)
            assert local == pytest.approx(kept_local, abs=1e-5)


def test_first_blocking_sync_by_hand():
    """Means of 4 steps: (4 + 1 + 12) / 3; the first outer step has size 0.7 * (1 + 0.9)."""
    anchors, local = CASES[0].twin(0)[3]
    assert anchors == local == pytest.approx([-17 / 3 * 1.33] * 3)


def test_first_streaming_apply_by_hand():
    """Launched after 4 steps, applied after 5: the anchor as above, the local value half way to it."""
    case = next(case for case in CASES if case.name == "streaming-P1-tau1-alpha0.5")
    anchors, local = case.twin(0)[4]
    assert anchors == pytest.approx([-17 / 3 * 1.33] * 3)
    assert local == pytest.approx([(-5 * speed - 17 / 3 * 1.33) / 2 for speed in (1.0, 0.25, 3.0)])


if __name__ == "__main__":
    rounded = {
        case.name: [
            [[[round(x, 6) for x in values] for values in step] for step in fragment]
            for fragment in numbers(case)
        ]
        for case in CASES
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in rounded.items())
    NUMBERS.write_text("{\n" + lines + "\n}\n")
