"""`data_parallel` between islands as threads: the mean of the gradients, or an error."""

import pytest
import torch

from dilocox.config.schema import OuterConfig
from dilocox.errors import WanError
from dilocox.outer.control_group import SingleRankControl
from dilocox.outer.data_parallel import Gradients, WanDataParallel
from dilocox.outer.shared_state import SharedState
from dilocox.outer.sync.join import JoinRules
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.wan.base import Member
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.islands import Log, on_islands


class Island:
    """Gradients that a test sets by hand, and their `WanDataParallel`."""

    def __init__(self, number, hub, *, num_islands=2, weights="uniform"):
        self.number = number
        self.buffers = [torch.zeros(6), torch.zeros(3)]
        self.log = Log()
        gradients = Gradients(lambda: self.buffers, island=number)
        self.wan = hub.wan(number)
        runner = SyncRunner(self.wan, SingleRankControl(), SharedState(gradients), targets=[gradients])
        self.loop = WanDataParallel(
            OuterConfig(method="data_parallel", island_weights=weights),
            runner,
            gradients=gradients,
            rules=JoinRules(num_islands, 1, timeout_s=5.0),
            identity=Member(number, "sync", "run", "print"),
            report=self.log,
        )

    def step(self, value, num_tokens=1):
        for buffer in self.buffers:
            buffer.fill_(value)
        self.loop.reduce_gradients()
        self.loop.step_done(num_tokens)
        return [float(buffer[0]) for buffer in self.buffers]


def test_gradients_become_the_mean_in_every_step():
    hub = LoopbackHub(2, timeout_s=10.0)
    islands = [Island(i, hub) for i in range(2)]

    def train(island):
        assert island.loop.join(0) == 0
        means = [island.step(float(step + 2 * island.number)) for step in range(3)]
        return means, island.loop.position.inner_step, island.loop.num_outer_steps

    wanted = ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], 3, 3)
    assert on_islands(islands, train) == [wanted, wanted]
    sent = sum(stats.payload_bytes_sent for stats in islands[0].log.syncs)
    assert sent == islands[0].loop.predicted_bytes() > 0


def test_a_late_island_is_refused_and_hurts_nobody():
    hub = LoopbackHub(1, timeout_s=5.0)
    early = Island(0, hub, num_islands=1)
    early.loop.join(0)
    early.step(1.0)
    hub.join(1)
    late = Island(1, hub)

    def go(island):
        if island is late:
            with pytest.raises(WanError, match="cannot join it later"):
                island.loop.join(0)
            island.loop.close()
            return None
        return [island.step(4.0) for _ in range(3)]

    results, _ = on_islands([early, late], go)
    assert results == [[4.0, 4.0]] * 3
    assert early.loop.num_outer_steps == 4


def test_a_step_that_was_not_averaged_is_an_error():
    hub = LoopbackHub(2, timeout_s=0.3)
    islands = [Island(i, hub) for i in range(2)]

    def go(island):
        island.loop.join(0)
        island.step(1.0)
        if island.number == 0:
            with pytest.raises(WanError, match="gradients of inner step 2"):
                island.step(1.0)

    on_islands(islands, go)


def test_islands_start_at_one_inner_step():
    hub = LoopbackHub(2, timeout_s=5.0)
    islands = [Island(i, hub) for i in range(2)]

    def go(island):
        if island.number == 0:
            with pytest.raises(WanError, match="same inner step"):
                island.loop.join(3)
        else:
            island.loop.join(5)

    on_islands(islands, go)
