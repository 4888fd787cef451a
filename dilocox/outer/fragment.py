"""Everything of one fragment on one rank, from its shards to its outer optimizer. Level 2.

Memory: anchor and outer momentum (fp32, the size of the shards); residual with error feedback, reference
with `delayed_keep`, each once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer.anchor_store import AnchorStore
from dilocox.outer.codec.base import MeanResult
from dilocox.outer.guards import OutlierGuard
from dilocox.outer.modes.registry import MODES
from dilocox.outer.optimizer import OuterOptimizer
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.param_shard import ParamShard, ShardState

State = dict[str, Any]


class Fragment:
    """One fragment.

    Args:
        config: resolved `outer` section.
        number: which fragment.
        shards: this rank's part of it; may be empty.
        island: id of this island.

    Attributes:
        num_syncs: committed syncs.
        num_contributions: pseudo-gradients that are in the anchor: the participants of all committed syncs.
        num_tokens: tokens that the island has trained since the last measurement.
        reducer: how its pseudo-gradients are averaged.
        guard: compares their norms with earlier ones.
        mode: what APPLY does to the weights.
    """

    def __init__(
        self, config: OuterConfig, number: int, shards: Sequence[ParamShard], *, island: int
    ) -> None:
        assert config.delay_mode is not None
        self.number = number
        self.shards = list(shards)
        self.num_syncs = 0
        self.num_contributions = 0
        self.num_tokens = 0
        self.guard = OutlierGuard(config.outlier_factor)
        self.reducer = FragmentReducer(config, self.shards, island=island)
        self._store = AnchorStore(self.local)
        self._optimizer = OuterOptimizer(config, self._store.values)
        self.mode = MODES[config.delay_mode](self, alpha=config.mixing_alpha)

    @property
    def local(self) -> list[Tensor]:
        """The island's weights: fp32 views of the masters, one per shard."""
        return [shard.tensor for shard in self.shards]

    @property
    def anchor(self) -> list[Tensor]:
        """fp32, one per shard; equal on all islands (`eager`: only after the drain). Not copies."""
        return self._store.values

    def outer_step(self, gradient: Sequence[Tensor]) -> None:
        """One step of the outer optimizer. In place: anchor."""
        self._optimizer.step(gradient)

    def measure(self) -> tuple[list[Tensor], int]:
        """Returns: pseudo-gradient, and the tokens trained since the last measurement."""
        num_tokens, self.num_tokens = self.num_tokens, 0
        return self.mode.measure(), num_tokens

    def discard(
        self, deltas: Sequence[Tensor], fresh: list[Tensor] | None, *, share: float, num_tokens: int
    ) -> None:
        """Handles a failed sync: its progress and its tokens are in the next measurement.

        Args:
            deltas, fresh, share: see `DelayMode.discarded`.
            num_tokens: that were in the sync.
        """
        self.mode.discarded(deltas, fresh, share=share)
        self.num_tokens += num_tokens

    def apply(
        self, result: MeanResult, fresh: list[Tensor] | None, *, num_participants: int, contributed: bool
    ) -> None:
        """Applies a committed sync: outer step, then the weights by delay mode.

        In place: anchor, outer optimizer, local.

        Args:
            fresh: see `DelayMode.committed`.
            num_participants: islands whose pseudo-gradient is in the mean.
            contributed: False = the local progress is not in this mean and is dropped.
        """
        self.mode.committed(result, fresh, share=1.0 / num_participants, contributed=contributed)
        self.num_syncs += 1
        self.num_contributions += num_participants
        if not contributed:
            self.reset()

    def set_anchor(self, anchor: Sequence[Tensor]) -> None:
        """Replaces the anchor, and the weights with it. In place: anchor, local."""
        self._store.set(anchor)
        self.reset()

    def reset(self) -> None:
        """Restarts from the anchor and drops everything private. In place: local."""
        self.mode.reset()
        self.num_tokens = 0

    # -- state that all islands share ------------------------------------------------------------

    def shared_state(self) -> State:
        """What must be equal on all islands: handed to an island that is behind. Not copies."""
        return {
            "anchor": self.anchor,
            "optimizer": self._optimizer.tensors(),
            "optimizer_plain": self._optimizer.plain(),
            "num_syncs": self.num_syncs,
            "num_contributions": self.num_contributions,
            "reducer": self.reducer.shared_state(),
        }

    def load_shared_state(self, state: State, *, reducer_is_loaded: bool) -> None:
        """Continues from another island's `shared_state`; the weights go to the anchor.

        In place: anchor, outer optimizer, local, residuals.

        Args:
            reducer_is_loaded: the sync thread has loaded the reducer's part, and has used it in a sync.
        """
        self._store.set(state["anchor"])
        self._optimizer.load(state["optimizer"], state["optimizer_plain"])
        self.num_syncs, self.num_contributions = state["num_syncs"], state["num_contributions"]
        if not reducer_is_loaded:
            self.reducer.load_shared_state(state["reducer"])
        self.reset()

    # -- state of a checkpoint -------------------------------------------------------------------

    def state_dict(self) -> ShardState:
        """Everything of this fragment on this rank. Not copies.

        Kinds of tensors: `anchor`, `optimizer_*`, `mode_*`, and those of the reducer.
        """
        kinds = {
            "anchor": self.anchor,
            **_prefixed("optimizer_", self._optimizer.tensors()),
            **_prefixed("mode_", self.mode.tensors()),
        }
        reducer = self.reducer.state_dict()
        return ShardState(
            tensors={kind: self._by_name(values) for kind, values in kinds.items()} | reducer.tensors,
            common={
                "num_syncs": self.num_syncs,
                "num_contributions": self.num_contributions,
                "num_tokens": self.num_tokens,
                "norms": self.guard.state_dict(),
                "optimizer": self._optimizer.plain(),
                "mode": self.mode.plain(),
                "reducer": reducer.common,
            },
            layout_bound=reducer.layout_bound,
        )

    def load_state_dict(self, state: ShardState) -> None:
        """Continues from a `state_dict` of a rank that holds the same shards."""
        common = state.common
        self.num_syncs, self.num_contributions = common["num_syncs"], common["num_contributions"]
        self.num_tokens = common["num_tokens"]
        self.guard.load_state_dict(common["norms"])
        tensors = self._own(state.tensors)
        self.reducer.load_state_dict(ShardState(tensors, common["reducer"], state.layout_bound))
        if not self.shards:
            return
        self._store.set(self.in_order(tensors["anchor"]))
        self._optimizer.load(self._with_prefix("optimizer_", tensors), common["optimizer"])
        self.mode.load(self._with_prefix("mode_", tensors), common["mode"])

    def in_order(self, by_name: Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors of this fragment in the order of its shards; zeros for those that are not there.

        Only a checkpoint of another number of pipeline stages lacks some: its fragments were others, and one
        of them may not have had a sync yet. Zero is what a momentum or a difference starts from.
        """
        return [
            by_name[shard.name].to(shard.tensor.device)
            if shard.name in by_name
            else shard.tensor.new_zeros(shard.tensor.shape)
            for shard in self.shards
        ]

    def _by_name(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        names = [shard.name for shard in self.shards]
        return dict(zip(names, values, strict=True))

    def _own(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """What belongs to this fragment; another one may have more kinds, such as a momentum."""
        names = {shard.name for shard in self.shards}
        own = {
            kind: {name: tensor for name, tensor in by_name.items() if name in names}
            for kind, by_name in tensors.items()
        }
        return {kind: by_name for kind, by_name in own.items() if by_name}

    def _with_prefix(
        self, prefix: str, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, list[Tensor]]:
        """Kinds with a prefix, without it; one tensor per shard."""
        return {
            kind.removeprefix(prefix): self.in_order(by_name)
            for kind, by_name in tensors.items()
            if kind.startswith(prefix)
        }


def _prefixed(prefix: str, kinds: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {prefix + kind: values for kind, values in kinds.items()}
