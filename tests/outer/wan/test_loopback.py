"""The loopback WAN keeps what `wan/base.py` promises."""

from __future__ import annotations

import threading

import pytest
import torch

from dilocox.errors import QuorumError, WanError
from dilocox.outer.wan.base import QuorumSession, Wan
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.wan.islands import member_of, run_islands, state_of


def text(data: str) -> torch.Tensor:
    return torch.tensor(list(data.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everybody_gets_what_was_meant_for_them_in_island_order(count):
    hub = LoopbackHub(count)

    def work(island):
        session = hub.wan(island).open_session(member_of(island, weight=island + 1.0))
        transport = session.transport
        assert transport.index == island
        assert list(transport.weights) == [k + 1.0 for k in range(count)]
        for call in range(3):
            messages = [text(f"{call}:{island}->{k}") for k in range(count)]
            received = transport.all_to_all(messages, [len(f"{call}:{k}->{island}") for k in range(count)])
            assert [bytes(m.tolist()).decode() for m in received] == [
                f"{call}:{k}->{island}" for k in range(count)
            ]
        assert transport.bytes_sent == 3 * (count - 1) * len("0:0->0")
        return [member.island for member in session.members], session.commit(True), session.commit(False)

    assert run_islands(work, range(count)) == [(list(range(count)), True, False)] * count


def test_a_missing_island_ends_the_wait_and_is_named():
    hub = LoopbackHub(2, timeout_s=0.05)
    with pytest.raises(QuorumError, match=r"islands \[1\]"):
        hub.wan(0).open_session(member_of(0))


def test_an_island_that_goes_silent_in_a_session_ends_the_wait():
    hub = LoopbackHub(2, timeout_s=0.2)

    def work(island):
        session = hub.wan(island).open_session(member_of(island))
        if island == 0:
            with pytest.raises(WanError, match=r"0\.2 s"):
                session.transport.all_to_all([text("a"), text("b")], [1, 1])

    run_islands(work, [0, 1])


def test_a_wrong_length_is_an_error():
    hub = LoopbackHub(2)

    def work(island):
        transport = hub.wan(island).open_session(member_of(island)).transport
        with pytest.raises(WanError, match="expected 5"):
            transport.all_to_all([text("abc")] * 2, [5, 5])

    run_islands(work, [0, 1])


def test_islands_leave_and_come_back():
    hub = LoopbackHub(3)
    wans = [hub.wan(island) for island in range(3)]

    def members(island):
        return [member.island for member in wans[island].open_session(member_of(island)).members]

    assert run_islands(members, [0, 1, 2]) == [[0, 1, 2]] * 3
    wans[1].shutdown()
    assert run_islands(members, [0, 2]) == [[0, 2]] * 2
    hub.join(1)
    assert run_islands(members, [0, 1, 2]) == [[0, 1, 2]] * 3


def test_leaving_opens_the_session_that_waited():
    hub = LoopbackHub(2)
    waiting = threading.Thread(target=lambda: hub.wan(0).open_session(member_of(0)))
    waiting.start()
    hub.leave(1)
    waiting.join(10)
    assert not waiting.is_alive()


def test_an_island_that_is_behind_receives_the_state_and_observes():
    hub = LoopbackHub(3)
    wans = [hub.wan(island) for island in range(3)]
    anchor = torch.ones(3)
    states = [state_of(count, {"anchor": anchor}) for count in (7, 4, 7)]
    for wan, state in zip(wans, states, strict=True):
        wan.bind(state)

    sessions = run_islands(lambda island: wans[island].open_session(member_of(island)), [0, 1, 2])
    assert [state.is_received for state in states] == [False, True, False]
    received = states[1].take_received()
    assert torch.equal(received["anchor"], anchor) and received["anchor"] is not anchor
    assert received["num_contributions"] == 7
    for session in sessions:
        assert [member.kind for member in session.members] == ["sync", "observe", "sync"]
        assert [member.weight for member in session.members] == [1.0, 0.0, 1.0]


def test_an_island_that_asks_for_a_state_receives_it_from_one_that_is_not_ahead():
    hub = LoopbackHub(2)
    wans, states = [hub.wan(0), hub.wan(1)], [state_of(5, {"whose": 0}), state_of(5, {"whose": 1})]
    for wan, state in zip(wans, states, strict=True):
        wan.bind(state)
    states[0].want_state()
    run_islands(lambda island: wans[island].open_session(member_of(island)), [0, 1])
    assert states[0].take_received()["whose"] == 1 and states[0].count == 6


def test_a_session_does_not_wait_for_a_late_island_longer_than_the_grace_time():
    hub = LoopbackHub(3, timeout_s=30.0, grace_s=0.1, min_islands=2)

    def members(island):
        return [member.island for member in hub.wan(island).open_session(member_of(island)).members]

    assert run_islands(members, [0, 2]) == [[0, 2]] * 2


def test_abort_ends_a_wait_at_once():
    hub = LoopbackHub(2, timeout_s=60)
    wans = [hub.wan(0), hub.wan(1)]
    opened = threading.Barrier(2)

    def work(island):
        session = wans[island].open_session(member_of(island))
        opened.wait()
        if island == 1:
            wans[1].abort()
        else:
            with pytest.raises(WanError):
                session.transport.all_to_all([text("a")] * 2, [1, 1])

    run_islands(work, [0, 1])


def test_it_is_a_wan():
    wan: Wan = LoopbackHub(1).wan(0)
    session: QuorumSession = wan.open_session(member_of(0))
    assert session.commit(True)
