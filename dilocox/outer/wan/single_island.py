"""The WAN of a run with one island: there is nobody, so nothing is sent. Level 2.

The outer optimizer still steps: a single island with Nesterov is SNOO / Lookahead (2510.15830).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dilocox.outer.wan.base import Member


class SingleIslandTransport:
    """`Transport` of one member."""

    weights: Sequence[float] = (1.0,)
    index = 0
    bytes_sent = 0

    def __init__(self, weight: float) -> None:
        self.weights = (weight,)

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        return list(messages)


class SingleIslandSession:
    """`QuorumSession` of one member."""

    healed: dict[str, Any] | None = None

    def __init__(self, wan: SingleIslandWan, hello: Member) -> None:
        self.members = [hello]
        self.transport = SingleIslandTransport(hello.weight)
        self._wan = wan

    def commit(self, ok: bool) -> bool:
        self._wan.step += int(ok)
        return ok


class SingleIslandWan:
    """`Wan` of one island."""

    def __init__(self) -> None:
        self.step = 0

    def set_step(self, step: int) -> None:
        self.step = step

    def serve_state(self, get_state: Callable[[], dict[str, Any]]) -> None:
        """Nobody asks."""

    def open_session(self, hello: Member) -> SingleIslandSession:
        return SingleIslandSession(self, hello)

    def abort(self) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Nobody to leave."""
