"""A WAN inside one process: islands are threads that meet in memory. Level 2, for tests and trials.

It behaves as `base.py` says: island order, timeouts on every wait, counted bytes, and an island with a
lower count receives the state of one with the highest. One rank per island.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from dilocox.errors import QuorumError, WanError
from dilocox.outer.wan.base import Member, State, StateExchange


@dataclass
class _Arrival:
    """An island that waits for a session."""

    member: Member
    count: int
    meeting: _Meeting | None = None


@dataclass
class _Meeting:
    """What the members of one session share.

    Attributes:
        members: by island, in island order.
        counts: `StateExchange.count` of each island when it arrives.
        messages: by position, what each member sends.
        state: served by the island with the highest count.
    """

    members: dict[int, Member]
    counts: dict[int, int]
    barrier: threading.Barrier
    messages: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    state: State | None = None

    def wait(self, timeout_s: float) -> None:
        """Waits until all members are here.

        Raises:
            WanError: one of them has left or is late.
        """
        try:
            self.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise WanError(f"an island left the session or did not answer within {timeout_s} s") from None


class LoopbackHub:
    """Where the islands meet.

    A session opens when every island in the hub has asked for it, or after `grace_s` with those that have.

    Args:
        num_islands: islands 0 .. num_islands - 1 are in the hub from the start.
        timeout_s: longest wait.
        grace_s: how long a session waits for late islands; None = `timeout_s`.
        min_islands: fewest islands of a session that opens without all.
    """

    def __init__(
        self, num_islands: int, timeout_s: float = 30.0, *, grace_s: float | None = None, min_islands: int = 1
    ) -> None:
        self.timeout_s = timeout_s
        self._grace_s = grace_s
        self._min_islands = min_islands
        self._islands = set(range(num_islands))
        self._arrivals: dict[int, _Arrival] = {}
        self._changed = threading.Condition()

    def wan(self, island: int) -> LoopbackWan:
        """Returns the WAN of one island."""
        return LoopbackWan(self, island)

    def join(self, island: int) -> None:
        """Adds an island: sessions wait for it from now on."""
        with self._changed:
            self._islands.add(island)

    def leave(self, island: int) -> None:
        """Sessions no longer wait for this island."""
        with self._changed:
            self._islands.discard(island)
            self._arrivals.pop(island, None)
            self._open_if_complete()

    def meet(self, member: Member, count: int) -> _Meeting:
        """Waits for the other islands.

        Raises:
            QuorumError: they did not come in time.
        """
        arrival = _Arrival(member, count)
        started = time.monotonic()
        with self._changed:
            self._arrivals[member.island] = arrival
            self._open_if_complete()
            while arrival.meeting is None:
                waited = time.monotonic() - started
                if self._grace_s is not None and waited > self._grace_s:
                    self._open_if_enough()
                elif waited > self.timeout_s:
                    missing = sorted(self._islands - set(self._arrivals))
                    self._arrivals.pop(member.island, None)
                    raise QuorumError(f"no quorum within {self.timeout_s} s: waiting for islands {missing}")
                if arrival.meeting is None:
                    self._changed.wait(0.02)
            return arrival.meeting

    def _open_if_complete(self) -> None:
        if self._arrivals and not self._islands - set(self._arrivals):
            self._open()

    def _open_if_enough(self) -> None:
        if len(self._arrivals) >= self._min_islands:
            self._open()

    def _open(self) -> None:
        arrivals = [self._arrivals[island] for island in sorted(self._arrivals)]
        meeting = _Meeting(
            {a.member.island: a.member for a in arrivals},
            {a.member.island: a.count for a in arrivals},
            threading.Barrier(len(arrivals)),
        )
        for arrival in arrivals:
            arrival.meeting = meeting
        self._arrivals = {}
        self._changed.notify_all()


class LoopbackTransport:
    """`Transport` among the threads of one meeting."""

    def __init__(self, meeting: _Meeting, island: int, timeout_s: float) -> None:
        self.weights: Sequence[float] = [member.weight for member in meeting.members.values()]
        self.index = list(meeting.members).index(island)
        self.bytes_sent = 0
        self._meeting = meeting
        self._timeout_s = timeout_s

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """See `Transport.all_to_all`; what is received are copies."""
        self.bytes_sent += sum(m.numel() for k, m in enumerate(messages) if k != self.index)
        self._meeting.messages[self.index] = messages
        self._meeting.wait(self._timeout_s)
        received = [self._meeting.messages[k][self.index].clone() for k in range(len(messages))]
        self._meeting.wait(self._timeout_s)  # nothing is overwritten before all have read
        received[self.index] = messages[self.index]
        for member, (message, size) in enumerate(zip(received, recv_bytes, strict=True)):
            if member != self.index and message.numel() != size:
                raise WanError(f"{message.numel()} bytes from member {member}, expected {size}")
        return received


@dataclass(frozen=True)
class LoopbackSession:
    """`QuorumSession` of one meeting."""

    members: Sequence[Member]
    transport: LoopbackTransport

    def commit(self, ok: bool) -> bool:
        """Returns the vote of the island's only rank."""
        return ok


class LoopbackWan:
    """`Wan` of one island in a hub."""

    def __init__(self, hub: LoopbackHub, island: int) -> None:
        self._hub = hub
        self._island = island
        self._meeting: _Meeting | None = None
        self._state: StateExchange | None = None

    def bind(self, state: StateExchange) -> None:
        """See `Wan.bind`."""
        self._state = state

    def open_session(self, member: Member) -> LoopbackSession:
        """See `Wan.open_session`."""
        count = 1 if self._state is None else self._state.count
        meeting = self._meeting = self._hub.meet(member, count)
        highest = max(meeting.counts.values())
        if self._state is not None and min(meeting.counts.values()) < highest:
            self._hand_over(meeting, self._state, highest)
        self._swap_members(meeting)
        transport = LoopbackTransport(meeting, self._island, self._hub.timeout_s)
        return LoopbackSession(list(meeting.members.values()), transport)

    def abort(self) -> None:
        """Breaks the meeting that is open, for all its members."""
        if self._meeting is not None:
            self._meeting.barrier.abort()

    def shutdown(self) -> None:
        """Leaves the hub."""
        self._hub.leave(self._island)

    def _hand_over(self, meeting: _Meeting, state: StateExchange, highest: int) -> None:
        # The first of the highest, as every member computes it.
        source = next(island for island, count in meeting.counts.items() if count == highest)
        if self._island == source:
            meeting.state = state.serve()
        meeting.wait(self._hub.timeout_s)
        if meeting.counts[self._island] < highest:
            assert meeting.state is not None
            state.receive(copy.deepcopy(meeting.state))
            mine = meeting.members[self._island]
            meeting.members[self._island] = replace(
                mine, kind="observe", weight=0.0, anchor_hash="", num_contributions=state.num_contributions
            )

    def _swap_members(self, meeting: _Meeting) -> None:
        """Waits until all entries are final."""
        meeting.wait(self._hub.timeout_s)
