"""All fragments of one rank and their schedule, without what is in flight. Level 2.

Two views of it: the shared state must be equal on all islands and goes to an island that is behind;
`state_dict` is everything of this rank and goes to its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer.fragment import Fragment
from dilocox.outer.interval import build_interval
from dilocox.outer.modes.base import EventKind
from dilocox.outer.schedule import Event, Phase, Schedule
from dilocox.outer.sync.request import PendingSync, SyncResult
from dilocox.param_shard import ParamShard, ShardState

State = dict[str, Any]


class FragmentSet:
    """All fragments of one rank.

    Args:
        config: resolved `outer` section.
        shards: fp32 shards that this rank owns.
        indices: into shards, one list per fragment.
        island: id of this island.

    Attributes:
        all: in the order of their numbers.
        device: where the shards live.
        total_tokens: tokens that this island has trained since the start of the run.
    """

    def __init__(
        self,
        config: OuterConfig,
        shards: Sequence[ParamShard],
        indices: Sequence[Sequence[int]],
        *,
        island: int,
    ) -> None:
        self.config = config
        self.schedule = Schedule.from_config(config)
        self.all = [
            Fragment(config, number, [shards[i] for i in own], island=island)
            for number, own in enumerate(indices)
        ]
        self.device = shards[0].tensor.device if shards else torch.device("cpu")
        self.total_tokens = 0
        self._interval = build_interval(config)
        self._indices = [list(own) for own in indices]
        self._island = island

    @property
    def anchors_are_shared(self) -> bool:
        """See `DelayMode.anchors_are_shared`."""
        return self.schedule.mode.anchors_are_shared

    @property
    def num_syncs(self) -> int:
        """Committed syncs, over all fragments."""
        return sum(fragment.num_syncs for fragment in self.all)

    @property
    def num_contributions(self) -> int:
        """Pseudo-gradients that are in the anchors, over all fragments: what membership compares."""
        return sum(fragment.num_contributions for fragment in self.all)

    @property
    def num_outer_steps(self) -> int:
        """Outer steps completed: committed syncs of every fragment."""
        return min(fragment.num_syncs for fragment in self.all)

    def anchors(self) -> list[Tensor]:
        """The anchors in the order of the shards; not copies."""
        anchors: dict[int, Tensor] = {}
        for indices, fragment in zip(self._indices, self.all, strict=True):
            anchors.update(zip(indices, fragment.anchor, strict=True))
        return [anchors[i] for i in range(len(anchors))]

    def add_tokens(self, num_tokens: int) -> None:
        """Counts the tokens of one inner step of this island."""
        self.total_tokens += num_tokens
        for fragment in self.all:
            fragment.num_tokens += num_tokens

    def predicted_bytes(self, num_islands: int) -> int:
        """Payload bytes of this rank that the formula gives for the syncs done, all islands taking part."""
        return sum(f.num_syncs * f.reducer.predicted_bytes(num_islands, self._island) for f in self.all)

    def adapt_interval(self, result: SyncResult, inner_step: int) -> int | None:
        """Changes H from the next sync interval on; returns the new one, or None if it stays.

        Args:
            result: of the last fragment's sync.
            inner_step: inner steps done.
        """
        wanted = self._interval.wanted(result)
        if wanted is None:
            return None
        fitting = self.schedule.fitting_interval(wanted)
        if fitting == self.schedule.sync_interval(inner_step):
            return None
        self.schedule = self.schedule.with_interval(fitting, inner_step)
        return fitting

    # -- state that all islands share ------------------------------------------------------------

    def shared_state(self) -> State:
        """What must be equal on all islands. Not copies."""
        return {"fragments": [fragment.shared_state() for fragment in self.all], "phases": self._phases()}

    def load_shared_state(self, state: State, *, reducer_loaded: int | None) -> None:
        """Continues from another island's `shared_state`; local weights go to the anchor.

        In place: anchors, outer optimizers, shards.

        Args:
            reducer_loaded: fragment whose reducer the sync thread has loaded already; None = none.
        """
        for fragment, theirs in zip(self.all, state["fragments"], strict=True):
            fragment.load_shared_state(theirs, reducer_is_loaded=fragment.number == reducer_loaded)
        self._set_phases(state["phases"])

    # -- state of a checkpoint -------------------------------------------------------------------

    def state_dict(self, pending: PendingSync | None) -> ShardState:
        """Everything of this rank. Not copies.

        Args:
            pending: sync in flight; its measurement is kept, so that resuming starts it again.
        """
        states = [fragment.state_dict() for fragment in self.all]
        tensors: dict[str, dict[str, Tensor]] = {}
        for state in states:
            for kind, by_name in state.tensors.items():
                tensors.setdefault(kind, {}).update(by_name)
        common: State = {
            "fragments": [state.common for state in states],
            "phases": self._phases(),
            "total_tokens": self.total_tokens,
            "pending": None,
        }
        if pending is not None:
            common["pending"] = {
                "fragment": pending.event.fragment,
                "outer_step": pending.event.outer_step,
                "inner_step": pending.inner_step,
                "num_tokens": pending.num_tokens,
            }
            names = [shard.name for shard in self.all[pending.event.fragment].shards]
            tensors["pending_deltas"] = dict(zip(names, pending.deltas, strict=True))
            if pending.payload is not pending.deltas:
                tensors["pending_payload"] = dict(zip(names, pending.payload, strict=True))
        bound = {"fragments": [state.layout_bound for state in states]}
        return ShardState(tensors=tensors, common=common, layout_bound=bound)

    def load_state_dict(self, state: ShardState) -> PendingSync | None:
        """Continues from a `state_dict` of any layout; returns what was in flight, see `holds`."""
        common = state.common
        bound = state.layout_bound.get("fragments", [{}] * len(self.all))
        for fragment, saved, layout_bound in zip(self.all, common["fragments"], bound, strict=True):
            fragment.load_state_dict(ShardState(state.tensors, saved, layout_bound))
        self._set_phases(common["phases"])
        self.total_tokens = common["total_tokens"]
        saved = common["pending"]
        if saved is None:
            return None
        fragment = self.all[saved["fragment"]]
        deltas = fragment.in_order(state.tensors.get("pending_deltas", {}))
        payload = state.tensors.get("pending_payload")
        return PendingSync(
            Event(EventKind.START, saved["fragment"], saved["outer_step"]),
            saved["inner_step"],
            deltas,
            saved["num_tokens"],
            deltas if payload is None else fragment.in_order(payload),
        )

    def holds(self, state: ShardState) -> bool:
        """Whether the sync in flight of a `state_dict` is one of a fragment as this rank has it.

        Fragments take layers of every pipeline stage, so they are others with another number of stages.
        """
        pending = state.common["pending"]
        if pending is None:
            return True
        names = {shard.name for shard in self.all[pending["fragment"]].shards}
        return names == state.tensors.get("pending_deltas", {}).keys()

    def measure_again(self, state: ShardState) -> None:
        """The sync in flight of a `state_dict` is not sent: its progress is in the next measurements."""
        deltas = state.tensors.get("pending_deltas", {})
        for fragment in self.all:
            own = fragment.number == state.common["pending"]["fragment"]
            num_tokens = state.common["pending"]["num_tokens"] if own else 0
            fragment.discard(fragment.in_order(deltas), None, share=1.0, num_tokens=num_tokens)

    def _phases(self) -> list[list[int]]:
        return [[p.begin, p.first_launch, p.sync_interval] for p in self.schedule.phases]

    def _set_phases(self, phases: Sequence[Sequence[int]]) -> None:
        self.schedule = replace(self.schedule, phases=tuple(Phase(*phase) for phase in phases))
