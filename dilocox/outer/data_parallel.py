"""The baseline: gradients averaged over the WAN at every inner step, in fp32 (`outer.method: data_parallel`).

It is what DiLoCo saves, so it runs over the same sessions and the same collective, only with H = 1, without
a codec and with nothing hidden. Level 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.errors import WanError
from dilocox.no_outer_loop import NoOuterLoop
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.reporter import Reporter
from dilocox.outer.sync.join import Joiner, JoinRules
from dilocox.outer.sync.request import SyncRequest, SyncResult, SyncStats
from dilocox.outer.sync.roles import Role
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.sync.thread import SyncThread
from dilocox.outer.wan.base import Member
from dilocox.param_shard import ParamShard, ShardState
from dilocox.position import Position


class Gradients:
    """What data parallel islands average, and how often they have; a `SyncTarget` and a `StateSource`.

    Args:
        buffers: gives the fp32 gradients of this rank.
        island: id of this island.

    Attributes:
        num_syncs: averaged steps.
        shards: the gradients of the step that is being taken.
    """

    def __init__(self, buffers: Callable[[], Sequence[Tensor]], *, island: int) -> None:
        self.buffers = buffers
        self.num_syncs = 0
        self.shards = self.measure()
        self.reducer = FragmentReducer.exact(self.shards, island=island)

    @property
    def num_contributions(self) -> int:
        """What membership compares: an island that is behind cannot continue."""
        return self.num_syncs

    def measure(self) -> list[ParamShard]:
        """Takes the gradients as they are now. Memory: one fp32 copy where they are not fp32."""
        self.shards = [
            ParamShard.whole(f"gradients[{i}]", buffer.detach().float())
            for i, buffer in enumerate(self.buffers())
        ]
        return self.shards

    def shared_state(self) -> dict[str, Any]:
        """Nothing: weights are not handed over, so an island that joins later cannot continue."""
        return {"fragments": []}


class WanDataParallel(NoOuterLoop):
    """Averages the island's gradient with the other islands' before the inner optimizer sees it.

    A step whose sync failed cannot continue: its gradient would be this island's alone.

    Args:
        gradients: what is averaged; the runner's state reads its count too.
        rules: when a starting island may begin.
        identity: of this island; the numbers are filled in here.
    """

    def __init__(
        self,
        config: OuterConfig,
        runner: SyncRunner,
        *,
        gradients: Gradients,
        rules: JoinRules,
        identity: Member,
        report: Reporter,
    ) -> None:
        self._by_tokens = config.island_weights == "by_tokens"
        self._gradients = gradients
        self._runner = runner
        self._rules = rules
        self._identity = identity
        self._report = report
        self._num_tokens = 1
        self._thread = SyncThread(torch.device("cpu"))
        self.reduce_gradients = self._reduce

    @property
    def position(self) -> Position:
        return self._runner.state.position

    @property
    def num_outer_steps(self) -> int:  # type: ignore[override]
        """Averaged steps."""
        return self._gradients.num_syncs

    def join(self, inner_step: int) -> int:
        state = self._runner.state
        state.move_to(inner_step)
        state.launch(inner_step)
        member = replace(self._identity, kind="join", weight=0.0, inner_step=inner_step)
        joiner = Joiner(
            self._runner,
            self._rules,
            island=self._identity.island,
            member=lambda: replace(member, num_contributions=state.num_contributions),
            waiting=partial(self._report.event, "waiting", inner_step),
        )
        offer = self._thread.result(self._thread.submit(joiner.join))
        if offer.session is not None and offer.roles is not None:
            # The others are in the collective of a step and need every member of the session in it.
            observe = partial(self._runner.observe, offer.session, offer.roles, self._identity.island)
            self._thread.result(self._thread.submit(observe))
        if offer.inner_step != inner_step or offer.session is not None or state.is_received:
            raise WanError(
                f"data_parallel islands must start at the same inner step: this one is at {inner_step}, the "
                f"run is at {offer.inner_step} already; an island cannot join it later"
            )
        self._report.event("join", inner_step, islands=offer.num_islands)
        return inner_step

    def step_done(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._runner.state.step_done()

    def predicted_bytes(self) -> int:
        reducer = self._gradients.reducer
        per_step = reducer.predicted_bytes(self._rules.num_islands, self._identity.island)
        return self.num_outer_steps * per_step

    def state_dict(self) -> ShardState:
        return ShardState(common={"num_syncs": self._gradients.num_syncs})

    def load_state_dict(self, state: ShardState) -> None:
        self._gradients.num_syncs = state.common["num_syncs"]

    def close(self) -> None:
        self._thread.close()
        self._runner.wan.abort()
        self._runner.wan.shutdown()

    def _reduce(self) -> None:
        """Averages the gradient buffers over the islands.

        In place: the buffers.

        Raises:
            WanError: the sync failed.
        """
        inner_step = self.position.inner_step
        member = replace(
            self._identity,
            inner_step=inner_step,
            outer_step=self.num_outer_steps + 1,
            weight=float(self._num_tokens) if self._by_tokens else 1.0,
        )
        payload = [shard.tensor for shard in self._gradients.measure()]
        request = SyncRequest(member, payload, self._gradients, abstain_reason=lambda norm: None)
        self._runner.state.launch(inner_step)
        result = self._thread.result(self._thread.submit(partial(self._runner.run, request)))
        if result.mean is None or result.role is not Role.CONTRIBUTE:
            reason = result.error or "the other islands have averaged this step without this one"
            raise WanError(f"gradients of inner step {inner_step + 1}: {reason}")
        for buffer, mean in zip(self._gradients.buffers(), result.mean.mean, strict=True):
            buffer.copy_(mean)
        self._gradients.num_syncs += 1
        self._record(inner_step + 1, result)

    def _record(self, inner_step: int, result: SyncResult) -> None:
        self._report.sync(
            SyncStats(
                inner_step=inner_step,
                outer_step=self.num_outer_steps,
                fragment=0,
                num_participants=result.num_participants,
                pseudo_gradient_norm=result.norm,
                cosine_to_mean=result.cosine,
                payload_bytes_sent=result.payload_bytes_sent,
                exchange_s=result.exchange_s,
                waiting_s=result.waiting_s,
                blocked_s=result.exchange_s,
                codec="none",
                committed=True,
            )
        )
