"""The interface to the WAN: sessions with members, and one collective. Level 2.

A sync is one *session*: `open_session` finds out who takes part and swaps their `Member` infos, messages
cross by `all_to_all`, and `commit` is the vote of this island's ranks. `membership.py` implements it on
torchft and gloo, `loopback.py` in one process for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

MemberKind = Literal["sync", "join", "observe"]
State = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """What an island tells the others when a session opens; equal on all ranks of the island.

    Attributes:
        island: island id.
        kind: `sync` = brings a pseudo-gradient; `join` = has just started; `observe` = has received another
            island's state in this very session and takes the result only.
        run_id, fingerprint: identity of the run, and of the settings that all islands must share.
        num_contributions: pseudo-gradients that are in its anchors, over all islands and fragments.
        outer_step, fragment: what it is about to average; outer steps count from 1.
        inner_step: inner steps done.
        weight: its weight in the mean; 0 = it abstains and takes the result only.
        num_tokens: tokens that it has trained since the start of the run.
        anchor_hash: hash over the anchors of all its ranks; empty where anchors may differ.
    """

    island: int
    kind: MemberKind
    run_id: str
    fingerprint: str
    num_contributions: int = 0
    outer_step: int = 0
    fragment: int = 0
    inner_step: int = 0
    weight: float = 1.0
    num_tokens: int = 0
    anchor_hash: str = ""

    @property
    def turn(self) -> tuple[int, int]:
        """(outer step, fragment): its place in the order of all syncs."""
        return self.outer_step, self.fragment


class Transport(Protocol):
    """The collective of one open session, for the ranks of one coordinate.

    Attributes:
        weights: weight of each member, in island order; 0 for one that abstains. The runner sets it when
            the roles of the members are known.
        index: position of this island in that order.
        bytes_sent: payload bytes that this rank has handed over in this session so far.
    """

    weights: Sequence[float]
    index: int
    bytes_sent: int

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """Sends messages[k] (uint8, 1-D, CPU) to member k and receives recv_bytes[k] bytes from it.

        The entry for this island itself is returned as it is and is not counted.

        Raises:
            WanError: a member failed or the timeout ran out.
        """


class QuorumSession(Protocol):
    """One open session.

    Attributes:
        members: of all islands in the session, in island order.
        transport: collective among the ranks of this coordinate.
    """

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def transport(self) -> Transport: ...

    def commit(self, ok: bool) -> bool:
        """Votes; called once per session.

        Collective: all ranks of this island.

        Returns: True only if every rank of this island said ok.
        """


class StateExchange(Protocol):
    """The owner of position and shared state, as the WAN sees it; `shared_state.SharedState` is one.

    Attributes:
        count: what membership compares: the island with a lower count receives the state of one with the
            highest. 0 asks for a state whatever the others' counts are.
        num_contributions: pseudo-gradients that are in the anchors.
        inner_step: inner steps done.
    """

    @property
    def count(self) -> int: ...

    @property
    def num_contributions(self) -> int: ...

    @property
    def inner_step(self) -> int: ...

    def serve(self) -> State:
        """Returns the state that an island with a lower count receives. Called in the sync thread."""

    def receive(self, state: State) -> None:
        """Takes over another island's state, even if the session fails later. Called in the sync thread."""


class Wan(Protocol):
    """Opens sessions with the other islands."""

    def bind(self, state: StateExchange) -> None:
        """Sets the owner whose state is served and received; before the first session."""

    def open_session(self, member: Member) -> QuorumSession:
        """Waits until the members are known, hands states over and swaps member infos.

        An island whose count was lower has received a state when this returns, and its own entry in
        `members` is of kind `observe`. A received state stays received if this raises afterwards.

        Collective: all ranks of this island.

        Raises:
            QuorumError: no quorum in time.
            WanError: a state or the member infos did not arrive.
        """

    def abort(self) -> None:
        """Breaks off the open session; may be called from any thread."""

    def shutdown(self) -> None:
        """Leaves the WAN; no session can be opened any more."""
