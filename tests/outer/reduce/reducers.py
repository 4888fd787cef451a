"""The reducers of some islands on a loopback WAN: compensate, reduce, commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer.codec.base import MeanResult
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.wan.header import SyncId
from dilocox.outer.wan.loopback import LoopbackHub
from dilocox.param_shard import ParamShard
from tests.outer.wan.islands import member_of, run_islands


def outer(**settings) -> OuterConfig:
    """An `outer` section, not validated: names that only a test registers are welcome."""
    return OuterConfig().model_copy(update=settings)


def whole_shards(shapes: Sequence[Sequence[int]]) -> list[ParamShard]:
    """Shards that are whole parameters: a, b, c ..."""
    return [ParamShard.whole(chr(97 + i), torch.zeros(tuple(s))) for i, s in enumerate(shapes)]


class Islands:
    """Islands of one rank each, all with the same shards.

    Attributes:
        reducers: by island.
        bytes_sent: of each member in the last sync.
    """

    def __init__(self, count: int, config: OuterConfig, shards: Sequence[ParamShard], **registries) -> None:
        self.reducers = [FragmentReducer(config, shards, island=k, **registries) for k in range(count)]
        self.bytes_sent: list[int] = []

    def sync(
        self,
        deltas: Sequence[list[Tensor]],
        *,
        step: int = 0,
        members: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        commit: bool = True,
    ) -> list[MeanResult]:
        """One sync; deltas by island. Returns: the result of each member; the means must have equal bits."""
        members = range(len(self.reducers)) if members is None else members
        weights = [1.0] * len(members) if weights is None else weights
        hub = LoopbackHub(0, timeout_s=30)
        for island in members:
            hub.join(island)

        def work(island: int) -> tuple[MeanResult, int]:
            weight, reducer = weights[list(members).index(island)], self.reducers[island]
            transport = hub.wan(island).open_session(member_of(island, weight=weight)).transport
            sent = reducer.compensate(deltas[island])
            result = reducer.reduce(sent, transport, sync=SyncId("run", 0, step), inner_step=step)
            if commit:
                reducer.commit(sent, result, observed=weight == 0)
            else:
                reducer.discard()
            return result, transport.bytes_sent

        done = run_islands(work, list(members))
        self.bytes_sent = [num_bytes for _, num_bytes in done]
        results = [result for result, _ in done]
        for result in results:
            for mine, first in zip(result.mean, results[0].mean, strict=True):
                assert torch.equal(mine.view(torch.int32), first.view(torch.int32))
        return results

    def gather_residual(self) -> dict[str, Tensor]:
        """What the owners of all parts hold, by shard name; empty before there can be any."""
        total: dict[str, Tensor] = {}
        for reducer in self.reducers:
            for name, values in reducer.state_dict().tensors.get("gather_residual", {}).items():
                total[name] = total[name] + values if name in total else values
        return total

    def held(self, weights: Sequence[float] | None = None) -> list[Tensor]:
        """What is still to be applied: weighted local residuals, and gather residuals; fp64."""
        weights = [1.0] * len(self.reducers) if weights is None else weights
        states = [reducer.state_dict().tensors["residual"] for reducer in self.reducers]
        gather = self.gather_residual()
        total = []
        for name in states[0]:
            parts = [w / sum(weights) * s[name].double() for w, s in zip(weights, states, strict=True)]
            total.append(sum(parts) + gather[name].double() if name in gather else sum(parts))
        return total


def random_deltas(count: int, shapes: Sequence[Sequence[int]], seed: int = 0) -> list[list[Tensor]]:
    """Normal values of 1e-3, by island and tensor."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(tuple(s), generator=generator) * 1e-3 for s in shapes] for _ in range(count)]


def exact_mean(deltas: Sequence[list[Tensor]], weights: Sequence[float] | None = None) -> list[Tensor]:
    """The weighted mean in fp64."""
    weights = [1.0] * len(deltas) if weights is None else weights
    total = sum(weights)
    return [
        torch.stack([w / total * t.double() for w, t in zip(weights, tensors, strict=True)]).sum(0)
        for tensors in zip(*deltas, strict=True)
    ]
