"""The owner of position and shared state."""

from dilocox.outer.shared_state import SharedState
from dilocox.position import Position


class Source:
    num_syncs = 3
    num_contributions = 6

    def shared_state(self):
        return {"fragments": ["own"]}


def test_counts_from_one_so_that_zero_can_ask_for_a_state():
    state = SharedState(Source())
    assert state.count == 7
    state.want_state()
    assert state.count == 0


def test_a_received_state_counts_and_is_served_before_it_is_loaded():
    state = SharedState(Source())
    state.want_state()
    received = {"fragments": ["theirs"], "num_contributions": 9, "inner_step": 50}
    state.receive(received)
    assert (state.count, state.num_contributions, state.inner_step) == (10, 9, 50)
    assert state.serve() is received and state.is_received
    assert state.take_received() is received
    assert state.take_received() is None and not state.is_received
    assert state.serve()["fragments"] == ["own"]


def test_what_is_served_says_where_the_sync_in_flight_was_measured():
    """The others are at the same place relative to it, however many steps this island has done since."""
    state = SharedState(Source())
    state.move_to(40)
    state.launch(40)
    for _ in range(3):
        state.step_done()
    assert state.position == Position(inner_step=43, num_syncs=3)
    assert state.serve() == {"fragments": ["own"], "num_contributions": 6, "inner_step": 40}
