"""Who contributes to a session, who only takes its result, and whose anchor is wrong. Level 2, no torch.

Pure functions of the member infos, so all ranks of all islands compute the same roles. Islands are aligned by
(outer step, fragment) and by their anchors, never by inner steps:

* Ahead = more contributions: pseudo-gradients that are in the anchors, counted over all islands. After a
  partition that is the side that more islands were on. Islands with fewer have received a state before the
  roles are assigned.
* Among equally many the latest (outer step, fragment) is synced. An island that asks for an earlier one
  takes the result of the later one: it has the same anchors, so nothing is handed over.
* Among those the anchors must be equal. Where they differ the largest group is right (ties: more tokens,
  then the lower island id). The others take part with weight 0, vote against their own result and ask for
  a state in the next session.

The islands that are right never wait for the others: they sync in this very session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dilocox.outer.wan.base import Member


class Role(Enum):
    """What this island does in a session."""

    CONTRIBUTE = "contribute"
    OBSERVE = "observe"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Roles:
    """Roles of a session.

    Attributes:
        leader: member whose (outer step, fragment) is synced.
        contributors: ids of the islands whose payload goes into the mean.
        diverged: ids of the islands whose anchor differs.
    """

    leader: Member
    contributors: frozenset[int]
    diverged: frozenset[int]

    def of(self, island: int) -> Role:
        """Returns the role of an island."""
        if island in self.contributors:
            return Role.CONTRIBUTE
        return Role.DIVERGED if island in self.diverged else Role.OBSERVE

    def weights(self, members: Sequence[Member]) -> list[float]:
        """Returns the weight of each member in the mean."""
        return [member.weight if member.island in self.contributors else 0.0 for member in members]


def assign_roles(members: Sequence[Member]) -> Roles | None:
    """Returns the roles of a session; None if no island brings a pseudo-gradient."""
    syncing = [member for member in members if member.kind == "sync"]
    if not syncing:
        return None
    latest = max((member.num_contributions, member.turn) for member in syncing)
    candidates = [member for member in syncing if (member.num_contributions, member.turn) == latest]
    right = largest_group(candidates)
    leader = min(right, key=lambda member: member.island)
    others = [member for member in candidates if member not in right]
    # A joining island that has received no state is not behind; its anchors may differ all the same.
    others += [m for m in members if m.kind == "join" and not _may_fit(m, leader)]
    return Roles(
        leader=leader,
        contributors=frozenset(member.island for member in right),
        diverged=frozenset(member.island for member in others),
    )


def largest_group(members: Sequence[Member]) -> list[Member]:
    """Returns the largest group with equal anchors; ties: more tokens, then the lower island id."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.anchor_hash, []).append(member)

    def rank(group: list[Member]) -> tuple[int, int, int]:
        return len(group), max(m.num_tokens for m in group), -min(m.island for m in group)

    return max(groups.values(), key=rank)


def _may_fit(joining: Member, leader: Member) -> bool:
    """Whether a joining island's anchor is the leader's, as far as the digits that it has sent say.

    It sends the first digits for all fragments, separated by commas; none if there is nothing to compare.
    """
    hashes = joining.anchor_hash.split(",")
    digits = hashes[leader.fragment] if leader.fragment < len(hashes) else ""
    return leader.anchor_hash.startswith(digits)
