"""What level 2 keeps on one rank: fragments, how they cross the WAN, and the schedule. Level 2.

Two views of it: `shared_state` must be equal on all islands and goes to an island that is behind;
`state_dict` is everything of this rank and goes to its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.hashing import hash_tensors
from dilocox.outer.fragment import FragmentState
from dilocox.outer.optimizer import build_outer_optimizer
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.schedule import Phase, Schedule
from dilocox.param_shard import ParamShard

State = dict[str, Any]


class OuterState:
    """Level 2 of one rank, without anything that is in flight.

    Args:
        config: resolved `outer` section.
        shards: fp32 shards that this rank owns.
        indices: into shards, one list a fragment.
        island: id of this island.

    Attributes:
        device: where the shards live.
    """

    def __init__(
        self,
        config: OuterConfig,
        shards: Sequence[ParamShard],
        indices: Sequence[Sequence[int]],
        *,
        island: int,
    ) -> None:
        optimizer = build_outer_optimizer(config)
        owned = [[shards[i] for i in fragment] for fragment in indices]
        self.schedule = Schedule.from_config(config)
        self.fragments = [FragmentState(config, p, own, optimizer) for p, own in enumerate(owned)]
        self.averaging = [FragmentReducer(config, p, own, island=island) for p, own in enumerate(owned)]
        self.device = shards[0].tensor.device if shards else torch.device("cpu")
        self._indices = [list(fragment) for fragment in indices]
        self._island = island

    @property
    def num_outer_steps(self) -> int:
        """Outer steps completed: committed syncs of every fragment."""
        return min(fragment.num_syncs for fragment in self.fragments)

    def anchors(self) -> list[Tensor]:
        """The anchors in the order of the shards; not copies."""
        anchors: dict[int, Tensor] = {}
        for indices, fragment in zip(self._indices, self.fragments, strict=True):
            anchors.update(zip(indices, fragment.anchor, strict=True))
        return [anchors[i] for i in range(len(anchors))]

    def anchor_hash(self) -> str:
        """Hash of this rank's anchors; equal on all islands."""
        return hash_tensors(self.anchors())

    def add_tokens(self, num_tokens: int) -> None:
        """Counts the island's tokens, for weights by tokens."""
        for fragment in self.fragments:
            fragment.num_tokens += num_tokens

    def predicted_bytes(self, num_islands: int) -> int:
        """Payload bytes of this rank that the formula gives for the syncs done, all islands taking part."""
        return sum(
            fragment.num_syncs * averaging.predicted_bytes(num_islands, self._island)
            for fragment, averaging in zip(self.fragments, self.averaging, strict=True)
        )

    def adapt_interval(self, sync_interval: float, inner_step: int) -> int | None:
        """Changes H from the next round on; returns the new one, or None if it stays.

        Args:
            sync_interval: wanted; the next one that the schedule can have is taken.
            inner_step: 0-based index of the step just done.
        """
        fitting = self.schedule.fitting_interval(sync_interval)
        if fitting == self.schedule.sync_interval(inner_step):
            return None
        self.schedule = self.schedule.with_interval(fitting, inner_step)
        return fitting

    def shared_state(self) -> State:
        """What must be equal on all islands. Not copies."""
        return {
            "fragments": [fragment.shared_state() for fragment in self.fragments],
            "averaging": [averaging.shared_state() for averaging in self.averaging],
            "phases": self._phases(),
        }

    def adopt(self, state: State) -> None:
        """Takes over another island's `shared_state`; local weights go to the anchor.

        In place: anchors, momentum, shards.
        """
        for fragment, theirs in zip(self.fragments, state["fragments"], strict=True):
            fragment.adopt(theirs)
            fragment.reset()
        for averaging, theirs in zip(self.averaging, state["averaging"], strict=True):
            averaging.adopt(theirs)
        self._set_phases(state["phases"])

    def state_dict(self) -> State:
        """Everything of this rank. Not copies."""
        return {
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "averaging": [averaging.state_dict() for averaging in self.averaging],
            "phases": self._phases(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continues from a `state_dict` of a rank with the same shards."""
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        for averaging, saved in zip(self.averaging, state["averaging"], strict=True):
            averaging.load_state_dict(saved)
        self._set_phases(state["phases"])

    def _phases(self) -> list[list[int]]:
        return [[p.begin, p.first_launch, p.sync_interval] for p in self.schedule.phases]

    def _set_phases(self, phases: Sequence[Sequence[int]]) -> None:
        self.schedule = replace(self.schedule, phases=tuple(Phase(*phase) for phase in phases))
