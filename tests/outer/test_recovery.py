"""After a fault all islands sync again: each delay mode, two and three islands, each kind of fault.

Every test ends with what follows the fault: the next syncs commit with all islands, anchors are equal, all
islands are at the same inner step, and the islands without a fault have lost two syncs at most.
"""

import threading
import time

import pytest
import torch

from dilocox.errors import WanError
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.islands import make_islands, on_islands, outer_config
from tests.outer.test_diloco import assert_equal_bits, drift

MODES = {
    "blocking": {"sync_interval": 4},
    "streaming": {"sync_interval": 8, "num_fragments": 2, "overlap_delay": 2, "mixing_alpha": 0.5},
    "delayed_keep": {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "delayed_keep"},
    "delayed_keep P=2": {
        "sync_interval": 8,
        "num_fragments": 2,
        "overlap_delay": 4,
        "delay_mode": "delayed_keep",
    },
    "eager": {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "eager"},
}
LOSSY = {"codec": "int4", "error_feedback": True, "codec_block_size": 8}
LOW_RANK = {"codec": "low_rank", "error_feedback": True, "codec_rank": 2, "adaptive_rank": True}
SHAPES = [(16, 24), (7,)]
STEPS = 48
FAULT_AT = 9  # inner step after which something happens to island 1
FAULTY = 1


class FaultyWan:
    """The WAN of one island, with a fault in the session with a given number after `FAULT_AT`."""

    def __init__(self, island):
        self.island, self.open_for_real = island, island.wan.open_session
        island.wan.open_session = self.open_session
        self.faults = []

    def open_session(self, member):
        session = self.open_for_real(member)
        if self.island.inner_step < FAULT_AT or not self.faults:
            return session
        return self.faults.pop(0)(session)


def votes_no(session):
    real = session.commit
    return Session(session, commit=lambda ok: real(False) and False)


def broken_on_one_side(session):
    """This island has sent everything, and what it should receive is lost; its connections close."""
    real, close = session.transport.all_to_all, session.transport._meeting.barrier.abort

    def lose(messages, recv_bytes):
        real(messages, recv_bytes)
        time.sleep(0.05)  # the others have what they wait for in this shot
        close()
        raise WanError("connection reset")

    session.transport.all_to_all = lose
    return session


def member_info_lost(session):
    session.transport._meeting.barrier.abort()
    raise WanError("the member infos did not get through")


class Session:
    """A session with another vote."""

    def __init__(self, session, commit):
        self.members, self.transport, self.commit = session.members, session.transport, commit


FAULTS = {
    "one rank votes no": [votes_no],
    "broken on one side": [broken_on_one_side],
    "member info lost after a heal": [votes_no, member_info_lost],
}


def run(num_islands, settings, *, faults=(), interrupt=lambda island, islands: None):
    """Trains all islands; `interrupt` is called on the faulty one after step FAULT_AT."""
    hub = LoopbackHub(num_islands, timeout_s=2.0, grace_s=0.4)
    islands = make_islands(num_islands, outer_config(**settings), hub=hub, shapes=SHAPES)
    FaultyWan(islands[FAULTY]).faults = list(faults)
    interrupted = threading.Event()

    def move(island, step):
        drift(island, step)
        if island.number == FAULTY and step >= FAULT_AT and not interrupted.is_set():
            interrupted.set()
            interrupt(island, islands)

    def train(island):
        island.loop.join(0)
        island.train(STEPS, move)
        island.loop.drain()
        return island.anchors()

    return islands, on_islands(islands, train)


def assert_recovered(islands, anchors, *, most_lost=2):
    first, *others = anchors
    for other in others:
        assert_equal_bits(first, other)
    assert {island.inner_step for island in islands} == {STEPS}
    assert len({island.loop.position for island in islands}) == 1
    for island in islands:
        last = island.log.syncs[-4:]
        assert all(s.committed and s.num_participants == len(islands) for s in last), last
        if island.number != FAULTY:
            assert len(island.log.named("discard")) <= most_lost, island.log.named("discard")
        assert all(torch.isfinite(tensor).all() for tensor in island.tensors)


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sync_that_failed_on_one_island(fault, mode, num_islands):
    islands, anchors = run(num_islands, MODES[mode] | LOSSY, faults=FAULTS[fault])
    assert_recovered(islands, anchors)
    assert islands[FAULTY].log.named("discard")
    if fault != "broken on one side":  # of three islands none commits a sync that broke in its first half
        assert islands[FAULTY].log.named("heal")


def pause_for(num_syncs):
    def pause(island, islands):
        own = island.loop.position.num_syncs + (island.loop._pending is not None)
        deadline = time.monotonic() + 20
        while islands[0].loop.position.num_syncs < own + num_syncs and time.monotonic() < deadline:
            time.sleep(0.01)

    return pause


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_syncs", [1, 3])
def test_an_island_that_missed_syncs_follows(num_syncs, mode, num_islands):
    islands, anchors = run(num_islands, MODES[mode] | LOSSY, interrupt=pause_for(num_syncs))
    assert_recovered(islands, anchors)
    assert len(islands[FAULTY].log.named("heal")) == 1
    assert not any(islands[0].log.named("discard")), "the others do not lose a sync for it"


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
def test_the_minority_takes_the_state_of_the_majority(mode, num_islands):
    """Of two islands the one with the higher id gives way: both have trained the same tokens."""

    def change_anchor(island, islands):
        for tensor in island.loop.anchors():
            tensor.add_(1e-3)

    islands, anchors = run(num_islands, MODES[mode] | LOSSY, interrupt=change_anchor)
    assert_recovered(islands, anchors, most_lost=0)
    (event, *_) = islands[FAULTY].log.named("discard")
    assert "anchor" in event[2]["reason"] and "island 0" in event[2]["reason"]
    assert len(islands[FAULTY].log.named("heal")) == 1


@pytest.mark.parametrize("mode", ["blocking", "streaming", "delayed_keep"])
def test_low_rank_recovers_with_the_bases_of_the_others(mode):
    """The bases of low-rank passes are shared state: with other bases a mean would be garbage."""
    islands, anchors = run(3, MODES[mode] | LOW_RANK, faults=[votes_no])
    assert_recovered(islands, anchors)
    states = [island.fragments.all[0].reducer.shared_state() for island in islands]
    for state in states[1:]:
        assert state["common"] == states[0]["common"]
        bases, others = states[0]["layout_bound"], state["layout_bound"]
        assert bases.keys() == others.keys() != set()
        assert all(torch.equal(bases[name], others[name]) for name in bases)
