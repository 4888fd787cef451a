"""A WAN inside one process: islands are threads that meet in memory. Level 2, for tests and trials.

It keeps the promises of `base.py`: island order, timeouts on every wait, counted bytes, and an island that
is behind is handed the state of one that is ahead. One rank an island.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dilocox.errors import QuorumError, WanError
from dilocox.outer.wan.base import Member

State = dict[str, Any]


@dataclass
class _Arrival:
    """An island that waits for a round."""

    hello: Member
    step: int
    meeting: _Meeting | None = None


@dataclass
class _Meeting:
    """What the members of one round share.

    Attributes:
        hellos: by island, in island order.
        steps: committed rounds by island.
        slots: for each member the messages it sends.
        state: what the island that is ahead hands over.
    """

    hellos: dict[int, Member]
    steps: dict[int, int]
    barrier: threading.Barrier
    slots: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    state: State | None = None

    def wait(self, timeout_s: float) -> None:
        """Until all members are here.

        Raises:
            WanError: one of them is gone or late.
        """
        try:
            self.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise WanError(f"an island left the round or did not answer within {timeout_s} s") from None


class LoopbackHub:
    """Where the islands meet: a round opens when every island that is in has asked for it.

    Args:
        num_islands: islands 0 .. num_islands - 1 are in from the start.
        timeout_s: longest wait.
    """

    def __init__(self, num_islands: int, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._islands = set(range(num_islands))
        self._arrivals: dict[int, _Arrival] = {}
        self._changed = threading.Condition()

    def wan(self, island: int) -> LoopbackWan:
        """The WAN as an island sees it."""
        return LoopbackWan(self, island)

    def join(self, island: int) -> None:
        """From now on rounds wait for this island too."""
        with self._changed:
            self._islands.add(island)

    def leave(self, island: int) -> None:
        """Rounds no longer wait for this island."""
        with self._changed:
            self._islands.discard(island)
            self._arrivals.pop(island, None)
            self._open_if_complete()

    def meet(self, hello: Member, step: int) -> _Meeting:
        """Waits for the other islands.

        Raises:
            QuorumError: they did not come in time.
        """
        arrival = _Arrival(hello, step)
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            self._arrivals[hello.island] = arrival
            self._open_if_complete()
            while arrival.meeting is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = sorted(self._islands - set(self._arrivals))
                    self._arrivals.pop(hello.island, None)
                    raise QuorumError(f"no quorum within {self.timeout_s} s: waiting for islands {missing}")
            return arrival.meeting

    def _open_if_complete(self) -> None:
        if not self._arrivals or self._islands - set(self._arrivals):
            return
        arrivals = [self._arrivals[island] for island in sorted(self._arrivals)]
        meeting = _Meeting(
            {a.hello.island: a.hello for a in arrivals},
            {a.hello.island: a.step for a in arrivals},
            threading.Barrier(len(arrivals)),
        )
        for arrival in arrivals:
            arrival.meeting = meeting
        self._arrivals = {}
        self._changed.notify_all()


class LoopbackTransport:
    """`Transport` among the threads of one meeting."""

    def __init__(self, meeting: _Meeting, island: int, timeout_s: float) -> None:
        self.weights: Sequence[float] = [hello.weight for hello in meeting.hellos.values()]
        self.index = list(meeting.hellos).index(island)
        self.bytes_sent = 0
        self._meeting = meeting
        self._timeout_s = timeout_s

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """See `Transport.all_to_all`; what is received are copies."""
        self.bytes_sent += sum(m.numel() for k, m in enumerate(messages) if k != self.index)
        self._meeting.slots[self.index] = messages
        self._meeting.wait(self._timeout_s)
        received = [self._meeting.slots[k][self.index].clone() for k in range(len(messages))]
        self._meeting.wait(self._timeout_s)  # slots are free for the next call
        received[self.index] = messages[self.index]
        for member, (message, size) in enumerate(zip(received, recv_bytes, strict=True)):
            if member != self.index and message.numel() != size:
                raise WanError(f"{message.numel()} bytes from member {member}, expected {size}")
        return received


@dataclass(frozen=True)
class LoopbackSession:
    """`QuorumSession` of one meeting."""

    wan: LoopbackWan
    members: Sequence[Member]
    transport: LoopbackTransport
    healed: State | None

    def commit(self, ok: bool) -> bool:
        """The vote of the island's only rank."""
        self.wan.step += int(ok)
        return ok


class LoopbackWan:
    """`Wan` of one island in a hub."""

    def __init__(self, hub: LoopbackHub, island: int) -> None:
        self.step = 0
        self._hub = hub
        self._island = island
        self._meeting: _Meeting | None = None
        self._get_state: Callable[[], State] = dict

    def set_step(self, step: int) -> None:
        """See `Wan.set_step`."""
        self.step = step

    def serve_state(self, get_state: Callable[[], State]) -> None:
        """See `Wan.serve_state`."""
        self._get_state = get_state

    def open_session(self, hello: Member) -> LoopbackSession:
        """See `Wan.open_session`. An island that is behind listens only: its weight becomes 0."""
        meeting = self._meeting = self._hub.meet(hello, self.step)
        newest = max(meeting.steps.values())
        ahead = next(island for island, step in meeting.steps.items() if step == newest)
        healed = None
        if min(meeting.steps.values()) < newest:
            if self._island == ahead:
                meeting.state = self._get_state()
            meeting.wait(self._hub.timeout_s)
            if self.step < newest:
                healed = copy.deepcopy(meeting.state)
                self.step = newest
                meeting.hellos[self._island] = replace(hello, kind="join", weight=0.0)
            meeting.wait(self._hub.timeout_s)
        transport = LoopbackTransport(meeting, self._island, self._hub.timeout_s)
        return LoopbackSession(self, list(meeting.hellos.values()), transport, healed)

    def abort(self) -> None:
        """Breaks the meeting that is open, for all its members."""
        if self._meeting is not None:
            self._meeting.barrier.abort()

    def shutdown(self) -> None:
        """Leaves the hub."""
        self._hub.leave(self._island)
