"""The WAN of a run with one island: there are no others, so nothing is sent. Level 2.

The outer optimizer still steps: a single island with Nesterov is SNOO / Lookahead (2510.15830).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilocox.outer.wan.base import Member, StateExchange


class SingleIslandTransport:
    """`Transport` of one member."""

    def __init__(self) -> None:
        self.weights: Sequence[float] = (1.0,)
        self.index = 0
        self.bytes_sent = 0

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """Returns the messages."""
        return list(messages)


class SingleIslandSession:
    """`QuorumSession` of one member."""

    def __init__(self, member: Member) -> None:
        self.members = [member]
        self.transport = SingleIslandTransport()

    def commit(self, ok: bool) -> bool:
        """Returns the vote of this island."""
        return ok


class SingleIslandWan:
    """`Wan` of one island."""

    def bind(self, state: StateExchange) -> None:
        """No-op: no state is handed over."""

    def open_session(self, member: Member) -> SingleIslandSession:
        """See `Wan.open_session`."""
        return SingleIslandSession(member)

    def abort(self) -> None:
        """No-op."""

    def shutdown(self) -> None:
        """No-op."""
