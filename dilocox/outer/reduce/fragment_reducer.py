"""Averages one fragment over the islands: residual, compressor, codec, collective. Level 2.

`reduce` runs in the sync thread and stages its changes; `commit` or `discard` follows in the training thread,
when the sync is applied.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dilocox.config.schema import OuterConfig
from dilocox.errors import CheckpointError
from dilocox.outer.codec.base import CompressorState, MeanResult
from dilocox.outer.codec.error_feedback import ErrorFeedback, check_fits
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CODECS, CodecRegistry
from dilocox.outer.reduce.aggregate import AGGREGATORS, Aggregator
from dilocox.outer.reduce.all_reduce import Wire, all_reduce_mean
from dilocox.outer.reduce.gather_feedback import GatherErrorFeedback
from dilocox.outer.reduce.predicted import WireCodecs, allreduce_bytes
from dilocox.outer.wan.base import Transport
from dilocox.outer.wan.header import SyncId
from dilocox.param_shard import ParamShard, ShardState

State = dict[str, Any]


class FragmentReducer:
    """Averages the pseudo-gradients of one fragment over the islands.

    Args:
        config: resolved `outer` section.
        shards: this rank's part of the fragment.
        island: id of this island; stochastic rounding differs between islands.
        codecs: where `config.codec` is looked up; default: `CODECS`.
        aggregators: where `config.aggregation` is looked up; default: `AGGREGATORS`.
    """

    def __init__(
        self,
        config: OuterConfig,
        shards: Sequence[ParamShard],
        *,
        island: int,
        codecs: CodecRegistry | None = None,
        aggregators: Mapping[str, Aggregator] | None = None,
    ) -> None:
        codecs, aggregators = codecs or CODECS, aggregators or AGGREGATORS
        entry, carrier = codecs.get(config.codec), codecs.carrier(config.codec)
        gather = codecs.get(config.gather_codec) if config.gather_codec else carrier
        self._island = island
        self._names = [shard.name for shard in shards]
        self._like = [shard.tensor for shard in shards]
        self._grids = [grid_of(shard) for shard in shards]
        self._codecs = WireCodecs(carrier, gather, config.codec_block_size)
        self._wire = Wire(
            carrier.build_codec(config.codec_block_size, config.rounding),
            gather.build_codec(config.codec_block_size, config.rounding),
            aggregators[config.aggregation],
        )
        self._compressor = entry.build_compressor(config, shards)
        self._feedback: ErrorFeedback | None = None
        self._gather_feedback: GatherErrorFeedback | None = None
        if config.error_feedback and "local" in entry.residuals:
            self._feedback = ErrorFeedback(self._names, self._like)
        if config.error_feedback and "gather" in entry.residuals:
            self._gather_feedback = GatherErrorFeedback()

    @classmethod
    def exact(cls, shards: Sequence[ParamShard], *, island: int) -> FragmentReducer:
        """Builds a reducer without codec and residual: fp32 in, fp32 out."""
        return cls(OuterConfig(codec="none", gather_codec="none"), shards, island=island)

    @property
    def interval_scale(self) -> float | None:
        """Sync interval over its initial value, as the rank suggests; None without low rank."""
        return self._compressor.interval_scale

    @property
    def num_fallbacks(self) -> int:
        """Codec calls so far that ran uncompiled because compiling had failed; their results are correct."""
        return self._wire.codec.num_fallbacks + self._wire.gather_codec.num_fallbacks

    def compensate(self, deltas: list[Tensor]) -> list[Tensor]:
        """Returns what to average: deltas plus residual. Changes nothing."""
        return deltas if self._feedback is None else self._feedback.compensate(deltas)

    def reduce(
        self, compensated: list[Tensor], transport: Transport, *, sync: SyncId, inner_step: int
    ) -> MeanResult:
        """Averages over the members of a session.

        Collective: all members, in the sync thread.

        Args:
            compensated: what `compensate` returned.
            transport: of the open session.
            sync: which sync this is; `pass_index` is filled in here.
            inner_step: inner steps done; seeds stochastic rounding.

        Raises:
            WanError: see `all_reduce_mean`.
        """
        # A generator: it yields tensors, is sent their mean, and returns the mean of the input.
        passes = self._compressor.passes(compensated)
        tensors = next(passes)
        for index, grids in enumerate(self._pass_grids()):
            self._reseed(sync, inner_step, index)
            result = all_reduce_mean(
                tensors,
                grids,
                transport=transport,
                wire=self._wire,
                sync=replace(sync, pass_index=index),
                feedback=self._gather_feedback,
            )
            try:
                tensors = passes.send(result)
            except StopIteration as done:
                mean: MeanResult = done.value
                return mean
        raise AssertionError("the compressor wants more passes than pass_grids has predicted")

    def commit(self, compensated: Sequence[Tensor], result: MeanResult, *, observed: bool) -> None:
        """Keeps what the sync staged; called when it is applied. In place: residuals, warm start.

        Args:
            compensated: what was averaged.
            result: what `reduce` returned for it.
            observed: this island abstained; its message was empty and its residual stays.
        """
        self._compressor.commit()
        if self._gather_feedback is not None:
            self._gather_feedback.commit()
        if self._feedback is not None and not observed:
            self._feedback.commit(compensated, result.own_decoded)

    def discard(self) -> None:
        """Drops what the failed sync staged."""
        self._compressor.discard()
        if self._gather_feedback is not None:
            self._gather_feedback.discard()

    def predicted_bytes(self, num_islands: int, index: int) -> int:
        """Returns the payload bytes, headers included, that this rank sends in the next sync.

        Args:
            num_islands: members, all with a weight above 0.
            index: position of this island among them.
        """
        return sum(
            allreduce_bytes(self._codecs, grids, num_islands=num_islands, index=index)
            for grids in self._pass_grids()
        )

    def shared_state(self) -> State:
        """Returns state that is equal on all islands of this layout. Not copies."""
        state = self._compressor.state_dict()
        return {"common": state.common, "layout_bound": state.layout_bound}

    def load_shared_state(self, state: State) -> None:
        """Loads another island's shared state; clears the residuals, which belong to another trajectory."""
        self._compressor.load_state_dict(CompressorState(state["common"], state["layout_bound"]))
        if self._feedback is not None:
            self._feedback.clear()
        if self._gather_feedback is not None:
            self._gather_feedback.clear()

    def state_dict(self) -> ShardState:
        """Returns residuals and warm start. Not copies, but for `gather_residual`.

        Memory: one fp32 copy of the fragment once three islands or more have synced with error feedback.
        """
        compressor = self._compressor.state_dict()
        # The adaptive rank follows the shards of this rank, so the ranks of an island may differ in it.
        # `common` is what rank 0 has, and what another layout starts from.
        state = ShardState(
            common={"compressor": compressor.common},
            layout_bound={"compressor": compressor.layout_bound, "compressor_plain": compressor.common},
        )
        if self._feedback is not None:
            state.tensors["residual"] = self._feedback.state_dict()
        if self._gather_feedback is not None:
            state.layout_bound["gather_residual"] = self._gather_feedback.state_dict()
            if self._gather_feedback.in_use:
                totals = self._gather_feedback.totals(self._like)
                state.tensors["gather_residual"] = dict(zip(self._names, totals, strict=True))
        return state

    def load_state_dict(self, state: ShardState) -> None:
        """Continues from a `state_dict`.

        With an empty `layout_bound`, tensors come from another layout: bases start anew, and the gather
        residual is stale, so it is forwarded through this island's own message and nothing is lost.

        Raises:
            CheckpointError: a residual is missing or has another shape than its shard; nothing is loaded.
        """
        totals = state.tensors.get("gather_residual", {})
        if self._feedback is not None:
            check_fits(state.tensors.get("residual", {}), self._names, self._like)
        if totals:
            check_fits(totals, self._names, self._like)
        if totals and self._gather_feedback is None:
            raise CheckpointError("a gather residual is saved, but these settings keep none")
        plain = state.layout_bound.get("compressor_plain", state.common["compressor"])
        self._compressor.load_state_dict(CompressorState(plain, state.layout_bound.get("compressor", {})))
        if self._feedback is not None:
            self._feedback.load_state_dict(state.tensors.get("residual", {}))
        if self._gather_feedback is None:
            return
        if state.layout_bound:
            held = state.layout_bound["gather_residual"]
            self._gather_feedback.load_state_dict(held, self._like, in_use=bool(totals))
        elif totals:
            self._gather_feedback.load_stale(
                [totals[name].to(like.device) for name, like in zip(self._names, self._like, strict=True)]
            )
        else:
            self._gather_feedback.clear()

    def _pass_grids(self) -> list[list[BlockGrid]]:
        return self._compressor.pass_grids([tensor.shape for tensor in self._like], self._grids)

    def _reseed(self, sync: SyncId, inner_step: int, pass_index: int) -> None:
        # A seed for each message instead of one running generator: a sync that is started again after a
        # resume then sends the same bits.
        name = f"{sync.run_id} {self._island} {sync.fragment} {inner_step} {pass_index}"
        self._wire.codec.reseed(zlib.crc32(name.encode()))
        self._wire.gather_codec.reseed(zlib.crc32(name.encode(), 1))


def grid_of(shard: ParamShard) -> BlockGrid:
    """Returns the grid of a shard: rows of its tensor parallel rank's block, from `start` on."""
    shape = shard.block_shape or tuple(shard.tensor.shape)
    return BlockGrid.of_shape(shape, numel=shard.tensor.numel(), start=shard.start)
