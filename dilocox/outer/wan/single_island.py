"""The WAN of a run with one island: there is nobody, so nothing is sent. Level 2.

The outer optimizer still steps: a single island with Nesterov is SNOO / Lookahead (2510.15830).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dilocox.outer.wan.base import Hello


class SoloTransport:
    """`Transport` of one member."""

    weights: Sequence[float] = (1.0,)
    index = 0
    bytes_sent = 0

    def __init__(self, weight: float) -> None:
        self.weights = (weight,)

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        return list(messages)


class SoloRound:
    """`Round` of one member."""

    healed: dict[str, Any] | None = None

    def __init__(self, wan: SoloWan, hello: Hello) -> None:
        self.members = [hello]
        self.transport = SoloTransport(hello.weight)
        self._wan = wan

    def commit(self, ok: bool) -> bool:
        self._wan.step += int(ok)
        return ok


class SoloWan:
    """`Wan` of one island."""

    def __init__(self) -> None:
        self.step = 0

    def set_step(self, step: int) -> None:
        self.step = step

    def serve_state(self, get_state: Callable[[], dict[str, Any]]) -> None:
        """Nobody asks."""

    def open_round(self, hello: Hello) -> SoloRound:
        return SoloRound(self, hello)

    def abort(self) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Nobody to leave."""
