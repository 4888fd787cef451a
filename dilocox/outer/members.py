"""Member infos: what this island tells the others when a session opens. Level 2."""

from __future__ import annotations

from dataclasses import replace

from dilocox.config.schema import OuterConfig
from dilocox.hashing import combine, hash_tensors
from dilocox.outer.control_group import ControlGroup
from dilocox.outer.fragment import Fragment
from dilocox.outer.fragment_set import FragmentSet
from dilocox.outer.shared_state import SharedState
from dilocox.outer.sync.request import PendingSync
from dilocox.outer.wan.base import Member

JOIN_DIGITS = 8
"""Hex digits of each fragment's hash in the info of a joining island, which has room for 200 of them."""


class MemberInfo:
    """Makes member infos.

    Args:
        identity: of this island: id, run and fingerprint; the numbers are filled in here.
        control: for hashes over all ranks of the island.
    """

    def __init__(
        self,
        config: OuterConfig,
        identity: Member,
        *,
        fragments: FragmentSet,
        state: SharedState,
        control: ControlGroup,
    ) -> None:
        self.island = identity.island
        self._by_tokens = config.island_weights == "by_tokens"
        self._identity = identity
        self._fragments = fragments
        self._state = state
        self._control = control
        self._join_hashes: str | None = None

    def to_join(self, inner_step: int) -> Member:
        """Asks to be let in, having done `inner_step` inner steps.

        Collective: all ranks of the island. The hashes of all fragments' anchors stand in one text, separated
        by commas. They are left out where anchors differ by design, and for a state that has been
        received and is not loaded yet: it is its owner's.
        """
        comparable = inner_step == 0 or self._fragments.anchors_are_shared
        hashes = ""
        if comparable and not self._state.is_received:
            # Anchors stay as they are until this island is in, so they are hashed for the first session only.
            self._join_hashes = hashes = self._join_hashes or self._hash_fragments()
        return replace(
            self._identity,
            kind="join",
            num_contributions=self._state.num_contributions,
            inner_step=self._state.inner_step,
            weight=0.0,
            num_tokens=self._fragments.total_tokens,
            anchor_hash=hashes,
        )

    def _hash_fragments(self) -> str:
        own = [hash_tensors(fragment.anchor) for fragment in self._fragments.all]
        ranks = [text.split(",") for text in self._control.gather(",".join(own))]
        return ",".join(combine(of_fragment)[:JOIN_DIGITS] for of_fragment in zip(*ranks, strict=True))

    def to_sync(self, pending: PendingSync, fragment: Fragment) -> Member:
        """Returns the info for a sync. An island that has trained nothing since its last one abstains."""
        weight = float(pending.num_tokens) if self._by_tokens else float(pending.num_tokens > 0)
        return replace(
            self._identity,
            kind="sync",
            outer_step=pending.event.outer_step,
            fragment=fragment.number,
            inner_step=pending.inner_step,
            weight=weight,
            num_tokens=self._fragments.total_tokens,
        )

    def to_average_anchors(self, inner_step: int, fragment: Fragment) -> Member:
        """Returns the info for averaging the anchors, at the end of a run in which islands have their own."""
        return replace(
            self._identity,
            kind="sync",
            outer_step=fragment.num_syncs + 1,
            fragment=fragment.number,
            inner_step=inner_step,
            weight=1.0,
            num_tokens=self._fragments.total_tokens,
        )
