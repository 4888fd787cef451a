"""What level 2 keeps for one fragment on this rank, and the weight updates of each delay mode. Level 2.

Memory: anchor and outer momentum (fp32, the size of the shards); residual with error feedback, reference
with `delayed_keep`, each once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer import pseudo_gradient
from dilocox.outer.guards import OutlierGuard
from dilocox.outer.optimizer import OuterOptimizer
from dilocox.outer.sync.runner import SyncResult
from dilocox.param_shard import ParamShard

State = dict[str, Any]


class FragmentState:
    """Anchors and everything that belongs to them.

    Attributes:
        number: which fragment.
        shards: this rank's part of it.
        anchor: fp32, one tensor a shard; equal on all islands (`eager`: only after the drain).
        num_syncs: committed syncs.
        num_tokens: tokens the island trained since the last committed sync.
    """

    def __init__(
        self, config: OuterConfig, number: int, shards: Sequence[ParamShard], optimizer: OuterOptimizer
    ) -> None:
        self.number = number
        self.shards = list(shards)
        self.anchor = [shard.tensor.detach().clone() for shard in shards]
        self.num_syncs = 0
        self.num_tokens = 0
        self.guard = OutlierGuard(config.outlier_factor)
        self._mode = config.delay_mode
        self._alpha = config.mixing_alpha
        self._optimizer = optimizer
        self._reference = [a.clone() for a in self.anchor] if self._mode == "delayed_keep" else None
        # eager: own part of the message in flight, its share in the mean, and what a discarded sync left over
        self._sent_own: list[Tensor] | None = None
        self._own_share = 1.0
        self._carry: list[Tensor] | None = None

    @property
    def local(self) -> list[Tensor]:
        """The island's weights: views of the masters."""
        return [shard.tensor for shard in self.shards]

    def measure(self) -> list[Tensor]:
        """The pseudo-gradient: progress since the anchor (`delayed_keep`: since the last measurement)."""
        deltas = pseudo_gradient.measure(self._reference or self.anchor, self.local)
        if self._reference is not None:
            pseudo_gradient.advance_reference(self._reference, self.local)
        return deltas

    def message(self, deltas: list[Tensor]) -> list[Tensor]:
        """What crosses the WAN for a measured pseudo-gradient."""
        if self._mode != "eager":
            return deltas
        if self._carry is not None:
            deltas = list(torch._foreach_add(deltas, self._carry))
        self._sent_own = deltas
        return deltas

    def update(
        self, mean: Sequence[Tensor], *, pending: Sequence[Sequence[Tensor]], take_anchor: bool
    ) -> None:
        """A committed mean: outer step, then the weights by delay mode.

        Args:
            mean: weighted mean over the islands.
            pending: own pseudo-gradients, measured and neither applied nor given back.
            take_anchor: drop the local weights: they were not in this mean.

        In place: anchor, momentum, shards.
        """
        self._optimizer.step(self.number, self.anchor, mean)
        self.num_syncs += 1
        self.num_tokens = 0
        if take_anchor:
            self.reset()
        elif self._mode == "streaming":
            pseudo_gradient.mix(self.local, self.anchor, alpha=self._alpha)
        elif self._reference is not None:
            pseudo_gradient.keep_private(self.local, self._reference, self.anchor, pending=pending)
        else:
            pseudo_gradient.reset(self.local, self.anchor)

    def update_eagerly(self, outcome: SyncResult | None, fresh: list[Tensor] | None, *, share: float) -> None:
        """`eager`: own fresh pseudo-gradient and what the others sent one round ago.

        Args:
            outcome: of the last round; None in the first.
            fresh: own pseudo-gradient of this round; None in the drain.
            share: this island's share in the mean of the round that `fresh` goes into.
        """
        average = outcome.average if outcome is not None else None
        self._carry = self._sent_own if outcome is not None and average is None else None
        if average is None and fresh is None:
            return
        gradient = pseudo_gradient.eager_share(
            fresh,
            average.mean if average is not None else None,
            self._sent_own if average is not None else None,
            fresh_share=share,
            previous_share=self._own_share,
        )
        self._own_share = share
        self._optimizer.step(self.number, self.anchor, gradient)
        if average is not None:
            self.num_syncs += 1
            self.num_tokens = 0
        self.reset()

    def take_anchor(self, anchor: Sequence[Tensor]) -> None:
        """Replaces the anchor by given values, and the weights with it."""
        pseudo_gradient.reset(self.anchor, anchor)
        self.reset()

    def give_back(self, deltas: Sequence[Tensor]) -> None:
        """A discarded sync: the next measurement contains its progress again."""
        if self._reference is not None:
            pseudo_gradient.give_back(self._reference, deltas)

    def reset(self) -> None:
        """The island goes on from the anchor; everything private is dropped."""
        pseudo_gradient.reset(self.local, self.anchor)
        if self._reference is not None:
            pseudo_gradient.reset(self._reference, self.anchor)

    def shared_state(self) -> State:
        """What must be equal on all islands: handed to an island that is behind. Not copies."""
        momentum = self._optimizer.momentum_of(self.number)
        return {"anchor": self.anchor, "momentum": momentum or [], "num_syncs": self.num_syncs}

    def adopt(self, state: State) -> None:
        """Takes over another island's `shared_state`; the weights follow by `reset`."""
        for mine, theirs in zip(self.anchor, state["anchor"], strict=True):
            mine.copy_(theirs)
        if state["momentum"]:
            buffers = [t.to(a.device) for t, a in zip(state["momentum"], self.anchor, strict=True)]
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), self.number: buffers})
        self.num_syncs = state["num_syncs"]

    def state_dict(self) -> State:
        """All of it but what crosses the WAN in the next message (see `averaging`)."""
        return {
            **self.shared_state(),
            "reference": self._reference,
            "norms": self.guard.state_dict(),
            "num_tokens": self.num_tokens,
            "eager": [self._sent_own, self._own_share, self._carry],
        }

    def load_state_dict(self, state: State) -> None:
        self.adopt(state)
        if self._reference is not None:
            for mine, saved in zip(self._reference, state["reference"], strict=True):
                mine.copy_(saved)
        self.guard.load_state_dict(state["norms"])
        self.num_tokens = state["num_tokens"]
        self._sent_own, self._own_share, self._carry = state["eager"]
