"""How one fragment crosses the WAN: residual, compressor, codec, collective. Level 2.

`average` runs in the exchange thread and changes nothing that lasts; `commit` or `discard` follows when
the sync is applied.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.outer.codec.base import Compressor, DenseCompressor, MeanResult
from dilocox.outer.codec.build import build_codec
from dilocox.outer.codec.error_feedback import ErrorFeedback
from dilocox.outer.codec.low_rank import LowRankCompressor
from dilocox.outer.codec.sizes import allreduce_bytes
from dilocox.outer.reduce.all_reduce import average
from dilocox.outer.reduce.gather_feedback import GatherErrorFeedback
from dilocox.outer.wan.base import Transport
from dilocox.outer.wan.header import SyncId
from dilocox.param_shard import ParamShard, ShardState

State = dict[str, Any]


class FragmentReducer:
    """Averages the pseudo-gradients of one fragment over the islands.

    Args:
        config: resolved `outer` section.
        fragment: which one.
        shards: this rank's part of it.
        island: id of this island; stochastic rounding differs between islands.
    """

    def __init__(self, config: OuterConfig, shards: Sequence[ParamShard], *, island: int) -> None:
        self._config = config
        self._island = island
        self._shapes = [tuple(shard.tensor.shape) for shard in shards]
        self._compressor = _compressor(config, shards)
        self._codec = build_codec(_wire_codec(config), config.codec_block_size, config.rounding)
        self._gather_codec = build_codec(_gather_codec(config), config.codec_block_size, config.rounding)
        self._feedback: ErrorFeedback | None = None
        self._server: GatherErrorFeedback | None = None
        if config.error_feedback:
            self._feedback = ErrorFeedback([p.label for p in shards], [p.tensor for p in shards])
            # the factors of two low-rank rounds have other bases: their gather loss cannot be carried over
            self._server = GatherErrorFeedback() if config.codec != "low_rank" else None

    @classmethod
    def exact(cls, shards: Sequence[ParamShard], *, island: int) -> FragmentReducer:
        """Without codec and residual: fp32 in, fp32 out."""
        return cls(OuterConfig(codec="none", gather_codec="none"), shards, island=island)

    @property
    def interval_scale(self) -> float | None:
        """Sync interval over its initial value, as the rank suggests; None without low rank."""
        return self._compressor.interval_scale if isinstance(self._compressor, LowRankCompressor) else None

    def compensate(self, deltas: list[Tensor]) -> list[Tensor]:
        """Adds the residual: what to average. Not in place."""
        return deltas if self._feedback is None else self._feedback.compensate(deltas)

    def reduce(
        self, compensated: list[Tensor], transport: Transport, *, sync: SyncId, inner_step: int
    ) -> MeanResult:
        """Averages over the members of a round.

        Collective: all members, in the exchange thread.

        Raises:
            WanError: see `collective.average`.
        """
        rounds = self._compressor.rounds(compensated)
        tensors = next(rounds)
        exchange = 0
        while True:
            mean = self._average_once(tensors, transport, replace(sync, pass_index=exchange), inner_step)
            try:
                tensors = rounds.send(mean)
            except StopIteration as done:
                result: MeanResult = done.value
                return result
            exchange += 1

    def commit(self, sent: Sequence[Tensor], result: MeanResult, *, observed: bool) -> None:
        """The sync is being applied. In place: residuals, warm start.

        Args:
            observed: this island abstained; its message was empty and its residual stays.
        """
        self._compressor.commit()
        if self._server is not None:
            self._server.commit()
        if self._feedback is not None and not observed:
            self._feedback.commit(sent, result.own)

    def discard(self) -> None:
        """The sync failed: nothing has changed."""
        self._compressor.discard()
        if self._server is not None:
            self._server.discard()

    def predicted_bytes(self, num_islands: int, index: int) -> int:
        """Payload bytes of this rank for one sync with all islands."""
        return sum(
            allreduce_bytes(
                _wire_codec(self._config),
                gather_codec=_gather_codec(self._config),
                block_size=self._config.codec_block_size,
                numels=numels,
                num_islands=num_islands,
                index=index,
            )
            for numels in self._round_numels()
        )

    def shared_state(self) -> State:
        """Equal on all islands."""
        return self._compressor.state_dict()

    def load_shared_state(self, state: State) -> None:
        """Takes over another island's shared state; own residuals belong to another past and go."""
        self._compressor.load_state_dict(state)
        if self._feedback is not None:
            for residual in self._feedback.residual:
                residual.zero_()
        if self._server is not None:
            self._server.load_state_dict({})

    def state_dict(self) -> ShardState:
        """Everything. Not copies."""
        feedback = {} if self._feedback is None else {"residual": self._feedback.state_dict()}
        bound = {
            "compressor": self._compressor.state_dict(),
            "server": {} if self._server is None else self._server.state_dict(),
        }
        return ShardState(feedback, {}, bound)

    def load_state_dict(self, state: ShardState) -> None:
        """Continues from a `state_dict`."""
        self._compressor.load_state_dict(state.layout_bound["compressor"])
        if self._feedback is not None:
            self._feedback.load_state_dict(state.tensors["residual"])
        if self._server is not None:
            self._server.load_state_dict(state.layout_bound["server"])

    def _round_numels(self) -> list[list[int]]:
        if isinstance(self._compressor, LowRankCompressor):
            return self._compressor.round_numels(self._shapes)
        return [[prod(shape) for shape in self._shapes]]

    def _average_once(
        self, tensors: list[Tensor], transport: Transport, sync: SyncId, inner_step: int
    ) -> MeanResult:
        # A seed for each message instead of a generator that runs on: a sync that is started again after a
        # resume then sends the same bits.
        name = f"{sync.run_id} {self._island} {sync.fragment} {inner_step} {sync.pass_index}"
        self._codec.reseed(zlib.crc32(name.encode()))
        self._gather_codec.reseed(zlib.crc32(name.encode(), 1))
        return average(
            tensors,
            transport=transport,
            codec=self._codec,
            gather_codec=self._gather_codec,
            identity=sync,
            server=self._server,
        )


def _wire_codec(config: OuterConfig) -> str:
    """What low-rank factors cross in is int4."""
    return "int4" if config.codec == "low_rank" else config.codec


def _gather_codec(config: OuterConfig) -> str:
    return config.gather_codec or _wire_codec(config)


def _compressor(config: OuterConfig, shards: Sequence[ParamShard]) -> Compressor:
    if config.codec != "low_rank":
        return DenseCompressor()
    return LowRankCompressor(
        [shard.label for shard in shards],
        rank=config.codec_rank,
        adaptive=config.adaptive_rank,
        # their tensor parallel ranks adapt on their own, and copies must stay equal
        always_dense=[shard.label for shard in shards if shard.replicated],
    )
