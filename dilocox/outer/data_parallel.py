"""The baseline: gradients averaged over the WAN at every inner step, in fp32 (`outer.method: data_parallel`).

It is what DiLoCo saves, so it runs over the same rounds and the same collective, only H = 1, no codec and
nothing hidden. Level 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.errors import WanError
from dilocox.metrics.records import SyncRecord
from dilocox.no_outer_loop import NoOuterLoop
from dilocox.outer.loop import State
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.reporter import Reporter
from dilocox.outer.sync.runner import JoinRules, SyncRequest, SyncRunner
from dilocox.outer.sync.thread import SyncThread
from dilocox.outer.wan.base import Member
from dilocox.param_shard import ParamShard


class WanDataParallel(NoOuterLoop):
    """Averages the island's gradient with the other islands' before the optimizer sees it.

    A step whose exchange failed cannot go on: its gradient would be this island's alone.

    Args:
        buffers: gives the fp32 gradients of this rank.
    """

    def __init__(
        self,
        config: OuterConfig,
        *,
        buffers: Callable[[], Sequence[Tensor]],
        exchange: SyncRunner,
        rules: JoinRules,
        hello: Member,
        report: Reporter,
    ) -> None:
        self._config = config
        self._buffers = buffers
        self._exchange = exchange
        self._rules = rules
        self._hello = hello
        self._report = report
        super().__init__()
        self._num_tokens = 1
        self._thread = SyncThread(torch.device("cpu"))
        self._averaging: FragmentReducer | None = None
        self.num_outer_steps = 0
        self.reduce_gradients = self._reduce

    def join(self, inner_step: int) -> int:
        self._inner_step = inner_step
        hello = replace(self._hello, kind="join", weight=0.0, inner_step=inner_step)
        waiting = partial(self._report.event, "waiting", inner_step)
        job = partial(self._exchange.join, hello, self._rules, listen=_refuse, waiting=waiting)
        joined = self._thread.result(self._thread.submit(job))
        if joined.inner_step != inner_step:
            raise WanError(
                f"data_parallel islands must start at the same inner step: this one is at {inner_step}, "
                f"another at {joined.inner_step}"
            )
        self._report.event("join", inner_step, islands=joined.num_islands)
        return inner_step

    def step_done(self, num_tokens: int) -> None:
        super().step_done(num_tokens)
        self._num_tokens = num_tokens

    def predicted_bytes(self) -> int:
        if self._averaging is None:
            return 0
        return self.num_outer_steps * self._averaging.predicted_bytes(
            self._rules.num_islands, self._hello.island
        )

    def state_dict(self) -> State:
        return {"num_outer_steps": self.num_outer_steps, "step": self._exchange.wan.step}

    def load_state_dict(self, state: State) -> None:
        self.num_outer_steps = state["num_outer_steps"]
        self._exchange.wan.set_step(state["step"])

    def close(self) -> None:
        self._thread.close()
        self._exchange.wan.abort()
        self._exchange.wan.shutdown()

    def _reduce(self) -> None:
        """Averages the gradient buffers over the islands.

        In place: the buffers.

        Raises:
            WanError: the exchange failed.
        """
        gradients = [buffer.detach().float() for buffer in self._buffers()]
        shards = [ParamShard(f"gradients[{i}]", g, "layer", 0, False, True) for i, g in enumerate(gradients)]
        if self._averaging is None:
            self._averaging = FragmentReducer.exact(0, shards, island=self._hello.island)
        by_tokens = self._config.island_weights == "by_tokens"
        hello = replace(
            self._hello,
            inner_step=self._inner_step,
            outer_step=self.num_outer_steps,
            weight=float(self._num_tokens) if by_tokens else 1.0,
        )
        proposal = SyncRequest(hello, gradients, shards, self._averaging, judge=lambda norm: None)
        outcome = self._thread.result(self._thread.submit(partial(self._exchange.run, proposal)))
        if outcome.average is None:
            raise WanError(f"gradients of inner step {self._inner_step + 1}: {outcome.error}")
        for buffer, mean in zip(self._buffers(), outcome.average.mean, strict=True):
            buffer.copy_(mean)
        self.num_outer_steps += 1
        self._report.sync(
            SyncRecord(
                inner_step=self._inner_step + 1,
                outer_step=self.num_outer_steps,
                fragment=0,
                num_participants=outcome.num_participants,
                pseudo_gradient_norm=outcome.norm,
                cosine_to_mean=outcome.cosine,
                payload_bytes_sent=outcome.payload_bytes_sent,
                exchange_s=outcome.exchange_s,
                waiting_s=outcome.waiting_s,
                blocked_s=outcome.exchange_s,
                codec="none",
                committed=True,
            )
        )


def _refuse(running: Member, healed: State | None) -> SyncRequest:
    raise WanError(
        f"the run is at inner step {running.inner_step} already; with outer.method data_parallel an island "
        "cannot join later"
    )
