"""Sessions on the real torchft: lighthouse, managers and gloo in this process, islands as threads."""

import contextlib
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dilocox.config.schema import WanConfig
from dilocox.errors import IdentityError, QuorumError, WanError
from dilocox.outer.control_group import SingleRankControl
from dilocox.outer.wan.address import resolve_address
from dilocox.outer.wan.membership import TorchftWan, serve_lighthouse
from tests.outer.wan.islands import member_of, state_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
IDENTITY = {"run_id": "run", "fingerprint": "f", "layout": "one rank"}


@contextlib.contextmanager
def lighthouse(port=0):
    server = serve_lighthouse(f"127.0.0.1:{port}", min_islands=2, grace_s=3.0)
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


def wan(address, island, *, identity=IDENTITY, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TorchftWan(
            WanConfig(**{"lighthouse": address, "timeout_s": 10.0, "grace_s": 3.0} | settings),
            address=resolve_address("lo", None, None),
            island_id=island,
            control=SingleRankControl(),
            identity=identity,
        )


def on_islands(wans, job):
    with ThreadPoolExecutor(len(wans)) as pool:
        return list(pool.map(job, range(len(wans)), wans))


def swap(island, w):
    """One session: each island sends its id to every other; returns (members, received, committed)."""
    session = w.open_session(member_of(island))
    messages = [torch.full((4 + island,), island, dtype=torch.uint8) for _ in session.members]
    received = session.transport.all_to_all(messages, [4 + member.island for member in session.members])
    assert session.transport.bytes_sent == (len(messages) - 1) * (4 + island)
    return [m.island for m in session.members], [r.tolist() for r in received], session.commit(True)


@pytest.mark.parametrize("streams", [1, 3])
def test_members_stand_in_island_order(streams):
    with lighthouse() as address:
        # more than nine islands would sort 10 before 2 by name; the order must be that of the numbers
        wans = [wan(address, island, streams=streams) for island in (2, 10)]
        results = on_islands(wans, lambda _, w: swap((2, 10)[wans.index(w)], w))
        for members, received, committed in results:
            assert members == [2, 10] and committed
            assert received == [[2] * 6, [10] * 14]
        for w in wans:
            w.shutdown()


def test_an_island_that_is_behind_receives_a_state():
    with lighthouse() as address:
        wans = [wan(address, island) for island in range(2)]
        states = [state_of(0, {"anchor": torch.zeros(5)}), state_of(7, {"anchor": torch.arange(5.0)})]
        for w, state in zip(wans, states, strict=True):
            w.bind(state)

        def meet(island, w):
            session = w.open_session(member_of(island))
            session.commit(True)
            return session

        behind, ahead = on_islands(wans, meet)
        assert not states[1].is_received and states[0].count == 8
        assert torch.equal(states[0].take_received()["anchor"], torch.arange(5.0))
        for session in (behind, ahead):
            assert [m.kind for m in session.members] == ["observe", "sync"]
            assert list(session.transport.weights) == [0.0, 1.0]
        for w in wans:
            w.shutdown()


def test_a_state_that_was_received_stays_when_the_member_infos_are_lost(monkeypatch):
    with lighthouse() as address:
        wans, states = [wan(address, island) for island in range(2)], [state_of(3), state_of(0)]
        for w, state in zip(wans, states, strict=True):
            w.bind(state)
        monkeypatch.setattr(wans[1], "_swap_members", _lose)

        def meet(island, w):
            with contextlib.suppress(WanError):
                w.open_session(member_of(island)).commit(True)

        on_islands(wans, meet)
        assert states[1].is_received and states[1].count == 4
        for w in wans:
            w.shutdown()


def _lose(member):
    raise WanError("the member infos did not get through")


@pytest.mark.parametrize("field, other", [("run_id", "another"), ("fingerprint", "g"), ("layout", "TP 2")])
def test_islands_of_another_run_are_refused_with_both_values(field, other):
    with lighthouse() as address:
        wans = [wan(address, 0), wan(address, 1, identity=IDENTITY | {field: other})]

        def meet(island, w):
            with pytest.raises(IdentityError, match=field) as caught:
                w.open_session(member_of(island))
            return str(caught.value)

        for text in on_islands(wans, meet):
            assert repr(other) in text and repr(IDENTITY[field]) in text
        for w in wans:
            w.shutdown()


def test_equal_island_ids_are_refused():
    with lighthouse() as address:
        wans = [wan(address, 0), wan(address, 0)]

        def meet(_, w):
            with pytest.raises(IdentityError, match="same id"):
                w.open_session(member_of(0))

        on_islands(wans, meet)
        for w in wans:
            w.shutdown()


def test_one_vote_against_discards_and_the_next_session_works():
    with lighthouse() as address:
        wans = [wan(address, island) for island in range(2)]

        def against(island, w):
            return w.open_session(member_of(island)).commit(island != 1)

        assert on_islands(wans, against)[1] is False
        results = on_islands(wans, swap)
        assert all(members == [0, 1] for members, _, _ in results)
        for w in wans:
            w.shutdown()


def test_a_lighthouse_that_stops_is_waited_for():
    """Sessions fail on time while it is away, and work again when it is back on the same address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with lighthouse(port) as address:
        wans = [wan(address, island, timeout_s=2.0, grace_s=1.0) for island in range(2)]
        on_islands(wans, swap)

    def fail(island, w):
        with pytest.raises(QuorumError, match="no quorum"):
            w.open_session(member_of(island))

    on_islands(wans, fail)
    with lighthouse(port):

        def again(island, w):
            for _ in range(40):
                time.sleep(0.25)
                with contextlib.suppress(WanError):
                    members, _, committed = swap(island, w)
                    if members == [0, 1] and committed:
                        return True
            return False

        assert on_islands(wans, again) == [True, True]
        for w in wans:
            w.shutdown()
