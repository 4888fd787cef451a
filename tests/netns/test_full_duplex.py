"""A swap uses both directions of the link at once, also when one island is a little late."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.launch.trial import REPOSITORY
from tests.netns.wan_box import WanBox, missing_requirement

REASON = missing_requirement()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
NUM_BYTES = 3_000_000


@pytest.mark.parametrize("late", [0, 1])
def test_both_directions_flow_at_once(late):
    with WanBox(2, rate_mbit=12) as box:
        islands = []
        for me in (0, 1):
            delay_s = 0.3 if me == late else 0.0
            command = [
                sys.executable,
                "-m",
                "tests.netns.swap",
                me,
                box.islands[0].address,
                NUM_BYTES,
                delay_s,
            ]
            process = box.start_in(
                me,
                list(map(str, command)),
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            islands.append(process)
        port = islands[0].stdout.readline()
        islands[1].stdin.write(port)
        islands[1].stdin.flush()
        # When one direction is through, the other must be on its way.
        while max(sent := [box.tx_bytes(0), box.tx_bytes(1)]) < 0.9 * NUM_BYTES:
            assert [process.poll() for process in islands] == [None, None]
            time.sleep(0.01)
        assert min(sent) > 0.4 * NUM_BYTES, f"bytes each way: {sent}"
        for process in islands:
            assert process.communicate(timeout=60)[0].endswith("done\n")
