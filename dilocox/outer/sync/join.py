"""How a starting island joins: all start together, or it takes part in a sync that is under way. Level 2.

`join` runs in the sync thread and changes nothing but the received state. The training thread then loads
that state and, where a sync is under way, hands the open session back to `SyncRunner.observe`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dilocox.errors import QuorumError, WanError
from dilocox.outer.sync.roles import Role, Roles, assign_roles, largest_group
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.wan.base import Member, QuorumSession

_PAUSE_S = 1.0


@dataclass(frozen=True)
class JoinRules:
    """When a starting island may begin.

    Attributes:
        num_islands: begin when all of them are there.
        min_islands: begin with these when the timeout has passed.
        timeout_s: how long to wait for all.
    """

    num_islands: int
    min_islands: int
    timeout_s: float


@dataclass(frozen=True)
class Offer:
    """How an island may begin.

    Attributes:
        inner_step: inner steps done, as the other islands count them.
        num_islands: islands in the session.
        session, roles: of a sync that is under way and waits for this island; None at a common start.
    """

    inner_step: int
    num_islands: int
    session: QuorumSession | None = None
    roles: Roles | None = None


class Joiner:
    """Meets the other islands at start.

    Collective: `join`, by all ranks of this island, in the sync thread.

    Args:
        island: id of this island.
        member: makes the info of this island, of kind `join`; called before each session.
        waiting: called with who is missing, while islands are missing.
    """

    def __init__(
        self,
        runner: SyncRunner,
        rules: JoinRules,
        *,
        island: int,
        member: Callable[[], Member],
        waiting: Callable[..., None],
    ) -> None:
        self._runner = runner
        self._rules = rules
        self._island = island
        self._member = member
        self._waiting = waiting
        self._seen = -1

    def join(self) -> Offer:
        """Opens sessions until this island may begin.

        Raises:
            WanError: too few islands until the timeout, or one that does not fit.
        """
        deadline = time.monotonic() + self._rules.timeout_s
        control = self._runner.control
        while True:
            if self._runner.is_stopping():
                raise QuorumError("stopped while waiting for the other islands")
            # Clocks differ a little, so the ranks vote: all of them must leave the loop in the same session.
            late = control.sum([float(time.monotonic() > deadline)])[0] > 0
            try:
                session = self._runner.wan.open_session(self._member())
            except QuorumError as error:
                if late:
                    raise
                self._waiting(reason=str(error))
                time.sleep(_PAUSE_S)
                continue
            offer = self._offer(session, late)
            if offer is not None:
                return offer

    def _offer(self, session: QuorumSession, late: bool) -> Offer | None:
        members = session.members
        # A sync under way comes first: its islands are inside the collective and wait for this one in it.
        roles = assign_roles(members)
        if roles is not None:
            return self._running(session, roles)
        enough = len(members) >= (self._rules.min_islands if late else self._rules.num_islands)
        if not enough:
            session.commit(False)
            self._wait_for_more(members, late)
            return None
        comparable = [m for m in members if m.kind == "join" and m.anchor_hash]
        right = largest_group(comparable) if comparable else []
        if len(right) < len(comparable):
            self._settle(session, comparable, right)
            return None
        session.commit(True)
        started = [member for member in members if member.kind == "join"]
        return Offer(max(member.inner_step for member in started), len(members))

    def _running(self, session: QuorumSession, roles: Roles) -> Offer | None:
        if roles.of(self._island) is Role.DIVERGED:
            # The others are in the collective and need this island in it. `observe` votes no and asks for
            # their state, which the next session brings.
            result = self._runner.observe(session, roles, self._island)
            self._waiting(reason=str(result.error))
            return None
        return Offer(roles.leader.inner_step, len(session.members), session, roles)

    def _settle(self, session: QuorumSession, comparable: Sequence[Member], right: Sequence[Member]) -> None:
        """Votes no where anchors differ; islands outside the largest group ask for its state.

        Raises:
            WanError: none of them has trained, so their initial weights differ.
        """
        # No island may begin in this session: the others of the run would train on other anchors.
        session.commit(False)
        hashes = {member.island: member.anchor_hash for member in comparable}
        if all(member.inner_step == 0 for member in comparable):
            raise WanError(f"the islands' anchors differ at the start, island -> hash: {hashes}")
        if self._island not in {member.island for member in right}:
            self._runner.state.want_state()
            self._waiting(
                reason=f"the anchors differ from those of island {right[0].island}; taking over its state"
            )
        time.sleep(_PAUSE_S)

    def _wait_for_more(self, members: Sequence[Member], late: bool) -> None:
        rules = self._rules
        if late:
            raise QuorumError(
                f"{len(members)} of {rules.num_islands} islands after {rules.timeout_s:.0f} s "
                f"(wan.join_timeout_s), and wan.min_islands is {rules.min_islands}"
            )
        if len(members) != self._seen:
            self._seen = len(members)
            missing = sorted(set(range(rules.num_islands)) - {member.island for member in members})
            self._waiting(
                missing=f"island {', '.join(map(str, missing))}", here=f"{self._seen} of {rules.num_islands}"
            )
        time.sleep(_PAUSE_S)
