"""What level 2 asks of the WAN: rounds with members, and one collective. Level 2.

A sync is one *round*: `open_session` finds out who takes part and swaps a `Member` among them, the messages
cross by `all_to_all`, and `commit` is the vote of this island's ranks. `membership.py` implements it on
torchft and gloo, `loopback.py` in one process for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Member:
    """What an island says about itself when a round opens; equal on all ranks of the island.

    Attributes:
        island: island id.
        kind: `sync` = brings a pseudo-gradient; `join` = has just started or been healed.
        run_id, fingerprint: identity of the run, and of the settings and layout all islands must share.
        outer_step, fragment: what this island is about to average.
        inner_step: inner steps done.
        weight: its weight in the average; 0 = it abstains and only takes the result.
        anchor_hash: hash of its anchors, to be compared among the members.
    """

    island: int
    kind: Literal["sync", "join"]
    run_id: str
    fingerprint: str
    outer_step: int
    fragment: int
    inner_step: int
    weight: float
    anchor_hash: str


class Transport(Protocol):
    """The collective of one open round, for the ranks of one coordinate.

    Attributes:
        weights: weight of each member, in island order; 0 for one that abstains.
        index: position of this island in that order.
        bytes_sent: payload bytes handed over by this rank in this round so far.
    """

    weights: Sequence[float]
    index: int
    bytes_sent: int

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """Sends messages[k] (uint8, 1-D, CPU) to member k and receives recv_bytes[k] bytes from it.

        The entry for this island itself is handed back as it is and not counted.

        Raises:
            WanError: a member failed or the timeout ran out.
        """


class QuorumSession(Protocol):
    """One open round.

    Attributes:
        members: hello of each member, in island order.
        transport: collective among the ranks of this coordinate.
        healed: state that another island handed over because this one was behind, else None.
    """

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def healed(self) -> dict[str, Any] | None: ...

    def commit(self, ok: bool) -> bool:
        """Votes; called once a round.

        Collective: all ranks of this island.

        Returns: True only if every rank of this island said ok.
        """


class Wan(Protocol):
    """Opens rounds with the other islands.

    Attributes:
        step: committed rounds; an island with fewer of them is healed by one with more.
    """

    @property
    def step(self) -> int: ...

    def set_step(self, step: int) -> None:
        """Continues the count of a checkpoint."""

    def serve_state(self, get_state: Callable[[], dict[str, Any]]) -> None:
        """Sets what an island that is behind receives."""

    def open_session(self, hello: Member) -> QuorumSession:
        """Waits until the members are known and swaps hellos.

        Collective: all ranks of this island.

        Raises:
            QuorumError: not in time.
            WanError: the hellos did not get through.
        """

    def abort(self) -> None:
        """Breaks off the round that is open; from any thread."""

    def shutdown(self) -> None:
        """Leaves for good."""
