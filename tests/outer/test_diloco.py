"""What level 2 does when something is not as planned; the arithmetic is in tests/golden."""

import copy

import pytest
import torch

from dilocox.errors import WanError
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.islands import ThreadIsland, make_islands, on_islands, outer_config

STREAMING = {"sync_interval": 8, "num_fragments": 2, "overlap_delay": 2, "mixing_alpha": 0.5}
INT4 = {"codec": "int4", "error_feedback": True}
SHAPES = [(5, 33), (7,)]


def drift(island, step):
    """Island- and step-dependent moves, a function of both alone."""
    generator = torch.Generator().manual_seed(1000 * island.number + step)
    for tensor in island.tensors:
        tensor.sub_(torch.rand(tensor.shape, generator=generator))


def anchors(island):
    return [tensor.clone() for tensor in island.loop.anchors()]


def assert_equal_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("settings", [{"sync_interval": 5}, STREAMING, STREAMING | INT4])
def test_anchors_have_equal_bits_on_all_islands(num_islands, settings):
    islands = make_islands(num_islands, outer_config(**settings), shapes=SHAPES)

    def train(island):
        assert island.loop.join(0) == 0
        island.train(40, drift)
        island.loop.drain()
        return anchors(island)

    first, *others = on_islands(islands, train)
    for other in others:
        assert_equal_bits(first, other)
    assert islands[0].loop.num_outer_steps == 40 // settings["sync_interval"]


def test_an_island_with_nan_abstains_and_takes_the_anchor():
    islands = make_islands(2, outer_config(sync_interval=4), shapes=SHAPES)

    def poison(island, step):
        drift(island, step)
        if island.number == 1 and step == 5:
            island.weights[0][0][2, 3] = float("nan")

    def train(island):
        island.train(12, poison)
        return anchors(island)

    first, second = on_islands(islands, train)
    assert_equal_bits(first, second)
    assert all(torch.isfinite(tensor).all() for tensor in islands[1].tensors)
    ((_, step, details),) = islands[1].log.named("abstain")
    assert step == 8 and "fragment0.0" in details["reason"] and "not finite" in details["reason"]
    assert [record.num_participants for record in islands[0].log.syncs] == [2, 1, 2]
    assert islands[0].log.named("abstain") == []


def test_an_outlier_abstains():
    islands = make_islands(2, outer_config(sync_interval=2, outlier_factor=10.0), shapes=SHAPES)

    def jump(island, step):
        drift(island, step)
        if island.number == 1 and step == 12:
            for tensor in island.tensors:
                tensor.add_(1000.0)

    on_islands(islands, lambda island: island.train(16, jump))
    ((_, step, details),) = islands[1].log.named("abstain")
    assert step == 14 and "running median" in details["reason"]


class FailingTransport:
    """Fails the collective of chosen sessions on all islands, as a broken link does."""

    def __init__(self, wan, numbers):
        self.wan, self.numbers, self.number = wan, numbers, -1
        self.open_for_real = wan.open_session
        wan.open_session = self.open_session

    def open_session(self, member):
        session = self.open_for_real(member)
        self.number += 1
        if self.number in self.numbers:

            def fail(messages, recv_bytes):
                raise WanError("link down")

            session.transport.all_to_all = fail
        return session


@pytest.mark.parametrize(
    "settings",
    [{"sync_interval": 4}, STREAMING, {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "delayed_keep"}],
)
def test_a_discarded_sync_loses_nothing(settings):
    """With outer SGD lr 1 and momentum 0 the anchor is the mean of all progress that has been synced."""
    config = outer_config(**settings, outer_optimizer="sgd", outer_lr=1.0, outer_momentum=0.0)

    def finals(failing):
        islands = make_islands(2, config, shapes=SHAPES)
        for island in islands:
            FailingTransport(island.wan, failing)

        def train(island):
            island.train(24, lambda island, step: [t.sub_(1.0 + island.number) for t in island.tensors])
            island.loop.drain()
            return anchors(island)

        return islands, on_islands(islands, train)

    islands, (first, second) = finals({1, 2})
    _, (undisturbed, _) = finals(set())
    assert_equal_bits(first, second)
    assert len(islands[0].log.named("discard")) == 2
    assert sum(not record.committed for record in islands[0].log.syncs) == 2
    if config.delay_mode != "streaming":  # mixing forgets a part of what it keeps local, so sums differ there
        for got, wanted in zip(first, undisturbed, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("stop", range(7, 17))
@pytest.mark.parametrize(
    "settings",
    [
        {"sync_interval": 4},
        STREAMING | INT4,
        STREAMING | INT4 | {"rounding": "stochastic"},
        {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "delayed_keep"} | INT4,
        {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "eager"} | INT4,
    ],
    ids=["blocking", "streaming-int4", "streaming-stochastic", "delayed_keep-int4", "eager-int4"],
)
def test_resumed_equals_uninterrupted_from_every_step(settings, stop):
    """Before, in and after a sync interval and its delay window: the same bits."""
    config = outer_config(**settings)
    steps = 24

    def whole(island):
        island.train(steps, drift)
        island.loop.drain()
        return anchors(island) + [tensor.clone() for tensor in island.tensors]

    def first_half(island):
        island.loop.join(0)
        island.train(stop, drift)
        return copy.deepcopy((island.loop.state_dict(), island.tensors))

    saved = on_islands(make_islands(2, config, shapes=SHAPES), first_half)

    def second_half(island):
        state, tensors = saved[island.number]
        for tensor, kept in zip(island.tensors, tensors, strict=True):
            tensor.copy_(kept)
        island.loop.load_state_dict(state)
        assert island.loop.join(stop) == stop
        island.train(steps, drift)
        island.loop.drain()
        return anchors(island) + [tensor.clone() for tensor in island.tensors]

    resumed = on_islands(make_islands(2, config, shapes=SHAPES), second_half)
    uninterrupted = on_islands(make_islands(2, config, shapes=SHAPES), whole)
    for one, other in zip(resumed, uninterrupted, strict=True):
        assert_equal_bits(one, other)


@pytest.mark.parametrize("settings", [{"sync_interval": 4}, STREAMING | INT4])
def test_a_late_island_is_healed_and_steps_in(settings):
    config = outer_config(**settings)
    hub = LoopbackHub(1, timeout_s=10.0)
    early = ThreadIsland(0, hub, config, shapes=SHAPES, num_islands=1)
    early.loop.join(0)
    early.train(10, drift)
    hub.join(1)
    late = ThreadIsland(1, hub, config, shapes=SHAPES, seed=99)  # fresh weights, which must not count

    def go(island):
        first = 10 if island is early else island.loop.join(0)
        island.train(32, drift)
        island.loop.drain()
        return first, anchors(island)

    (_, anchors_early), (entered, anchors_late) = on_islands([early, late], go)
    assert 10 < entered <= 16
    assert late.log.named("heal") and not early.log.named("heal")
    assert_equal_bits(anchors_early, anchors_late)


def test_a_late_island_tries_again_when_the_first_sync_fails():
    config = outer_config(sync_interval=4)
    hub = LoopbackHub(1, timeout_s=10.0)
    early = ThreadIsland(0, hub, config, shapes=SHAPES, num_islands=1)
    early.loop.join(0)
    early.train(8, drift)
    hub.join(1)
    late = ThreadIsland(1, hub, config, shapes=SHAPES, seed=99)
    FailingTransport(early.wan, {0})
    FailingTransport(late.wan, {0})

    def go(island):
        island is early or island.loop.join(0)
        island.train(24, drift)
        return anchors(island)

    assert_equal_bits(*on_islands([early, late], go))
    assert len(late.log.named("discard")) == len(early.log.named("discard")) == 1
    assert late.log.named("heal") and all(stats.num_participants == 2 for stats in early.log.syncs[-2:])


def test_an_island_waits_for_the_others_at_start():
    config = outer_config(sync_interval=4)
    hub = LoopbackHub(1, timeout_s=10.0)
    island = ThreadIsland(0, hub, config, num_islands=2, min_islands=2)
    with pytest.raises(WanError, match="1 of 2 islands"):
        island.loop.join(0)
    ((_, _, details),) = island.log.named("waiting")
    assert details == {"missing": "island 1", "here": "1 of 2"}


def test_islands_with_different_weights_do_not_start():
    config = outer_config(sync_interval=4)
    hub = LoopbackHub(2, timeout_s=10.0)
    islands = [ThreadIsland(i, hub, config, seed=i + 1) for i in range(2)]

    def join(island):
        with pytest.raises(WanError, match="anchors differ"):
            island.loop.join(0)

    on_islands(islands, join)


def test_weights_by_tokens():
    config = outer_config(
        sync_interval=2, island_weights="by_tokens", outer_optimizer="sgd", outer_lr=1.0, outer_momentum=0.0
    )
    islands = make_islands(2, config)

    def train(island):
        island.fragments.add_tokens(6 * island.number)  # 2 and 8 tokens at the sync
        island.train(2, lambda island, step: [t.sub_(1.0 + island.number) for t in island.tensors])
        return anchors(island)

    first, _ = on_islands(islands, train)
    torch.testing.assert_close(first[0], torch.full_like(first[0], -(2 * 2 + 8 * 4) / 10))
