"""The fp32 master weights of this rank, as level 2 and the checkpoint see them (level 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from dilocox.backend import Island
from dilocox.inner.blocks import block_of
from dilocox.inner.initial_weights import EMBEDDING, TIED_OUTPUT
from dilocox.inner.names import is_tensor_parallel, layer_of, named_global_parameters, unwrap
from dilocox.inner.optimizer import InnerOptimizer, Master
from dilocox.param_shard import ParamShard, Role

MASTER = "master"
"""Kind of the weights themselves, beside those of the optimizer's state (`exp_avg` ...)."""


@dataclass(frozen=True)
class _Held:
    """One master that this rank holds.

    Attributes:
        shard: its values, and where they lie.
        owned: level 2 and the checkpoint take them from this stage (False: the copy of a tied embedding).
    """

    shard: ParamShard
    master: Master
    owned: bool


class MasterWeights:
    """Masters of one rank, for every Megatron optimizer.

    Without the distributed optimizer every data parallel rank holds all masters of its model part; the
    ranks then own row blocks of each. With it a rank holds, and owns, flat shards. The last stage's copy
    of a tied embedding is owned by the first stage alone and follows it.

    Collective: all ranks of the island make it together.

    Attributes:
        shards: what this rank owns, in the model's order.
    """

    def __init__(self, island: Island, model: Any, optimizer: InnerOptimizer) -> None:
        self._island = island
        self._model = model
        self._optimizer = optimizer
        self._held = self._find()
        # Where masters are flat shards, Megatron gathers the model weights over the data parallel ranks.
        self._sharded = any(held.master.is_flat for held in self._held)
        self._tied = self._tied_values()
        self.shards = self._owned([held.shard for held in self._held if held.owned])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the shards to the masters and model weights of all replicas, bit for bit.

        Collective: all ranks of the island.
        In place: masters of other data parallel ranks, the last stage's tied embedding, model weights.
        Memory: without the distributed optimizer 1/DP of this rank's masters.
        """
        # Inside a stage first: the embedding must be complete before it is copied to the last stage.
        if self._island.topology.dp > 1:
            self._share_rows()
        if self._tied is not None:
            dist.broadcast(self._tied, group_src=0, group=parallel_state.get_embedding_group())
        self.copy_to_model()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copies the masters to the model weights, where all replicas hold equal masters already.

        Collective: all ranks of the island.
        In place: model weights.
        """
        self._optimizer.copy_masters_to_model()
        if self._sharded:
            self._model.start_param_sync(force_sync=True)

    def load(self, values: Sequence[Tensor]) -> None:
        """Copies one fp32 value into each shard and publishes. Collective: all ranks of the island."""
        for shard, value in zip(self.shards, values, strict=True):
            shard.tensor.copy_(value)
        self.publish()

    @contextmanager
    def temporarily(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Replaces the master values inside the `with`, and restores them exactly after it.

        Collective: all ranks of the island, on entry and on exit.
        Memory: a copy of the shards.

        Args:
            values: fp32, one per shard, of its shape.
        """
        saved = [shard.tensor.clone() for shard in self.shards]
        self.load(values)
        try:
            yield
        finally:
            self.load(saved)

    def owned_state(self) -> dict[str, list[ParamShard]]:
        """Returns what this rank owns and saves: masters and optimizer state, by kind (`exp_avg` ...).

        Over the island every element is there once for each tensor parallel replica. Views, no copies.
        """
        kinds = _by_kind(held for held in self._held if held.owned)
        return {kind: self._owned(shards) for kind, shards in kinds.items()}

    def held_state(self) -> dict[str, list[ParamShard]]:
        """Returns what this rank holds and loads: all masters and optimizer state, by kind.

        The copy of a tied embedding has the name of the embedding. Views, no copies.
        """
        return _by_kind(self._held)

    def _find(self) -> list[_Held]:
        masters = self._optimizer.masters()
        tied = unwrap(self._model).share_embeddings_and_output_weights
        found = []
        for name, parameter in named_global_parameters(self._model).items():
            if parameter in masters:
                is_copy = tied and name == TIED_OUTPUT
                shard = self._shard(EMBEDDING if is_copy else name, parameter, masters[parameter])
                found.append(_Held(shard, masters[parameter], owned=not is_copy))
        return found

    def _shard(self, name: str, parameter: nn.Parameter, master: Master) -> ParamShard:
        tp = self._island.topology.tp
        tp_rank = self._island.coordinate.tp
        swiglu = unwrap(self._model).config.gated_linear_unit
        block = block_of(name, parameter, swiglu=swiglu, tp_rank=tp_rank, tp_size=tp)
        replicated = tp > 1 and not is_tensor_parallel(parameter)
        return ParamShard(
            name=name,
            tensor=master.values,
            role=_role(name),
            layer=layer_of(name),
            replicated=replicated,
            counted=not replicated or tp_rank == 0,
            global_shape=block.global_shape,
            offsets=block.offsets,
            block_shape=block.shape,
            start=master.start,
        )

    def _owned(self, shards: Sequence[ParamShard]) -> list[ParamShard]:
        """Returns this data parallel rank's part of what it holds, without empty parts."""
        flat = {held.shard.name for held in self._held if held.master.is_flat}
        parts = [shard if shard.name in flat else self._rows(shard) for shard in shards]
        return [part for part in parts if part.tensor.numel() > 0]

    def _rows(self, shard: ParamShard) -> ParamShard:
        blocks = shard.tensor.tensor_split(self._island.topology.dp)
        before = sum(block.numel() for block in blocks[: self._island.coordinate.dp])
        return replace(shard, tensor=blocks[self._island.coordinate.dp], start=before)

    def _share_rows(self) -> None:
        """Broadcasts the row blocks that each data parallel rank owns. In place: masters."""
        whole = [held.shard.tensor for held in self._held if held.owned and not held.master.is_flat]
        if not whole:
            return
        group = parallel_state.get_data_parallel_group()
        dp = self._island.topology.dp
        for owner in range(dp):
            blocks = [values.tensor_split(dp)[owner] for values in whole]
            flat = torch.cat([block.flatten() for block in blocks])
            dist.broadcast(flat, group_src=owner, group=group)
            parts = torch.split(flat, [block.numel() for block in blocks])
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part.view_as(block))

    def _tied_values(self) -> Tensor | None:
        """Returns the masters of the embedding that first and last stage share; None without a copy.

        Megatron gives a tied embedding a gradient bucket of its own, so with the distributed optimizer the
        shards of the two stages cover the same elements. Otherwise rows would be copied to other tokens;
        hence the check.
        """
        last_stage = self._island.topology.pp - 1
        tied = unwrap(self._model).share_embeddings_and_output_weights and last_stage > 0
        if not tied or self._island.coordinate.pp not in (0, last_stage):
            return None
        shard = next(held.shard for held in self._held if held.shard.name == EMBEDDING)
        group = parallel_state.get_embedding_group()
        mine = (shard.start, shard.tensor.numel())
        ranges: list[tuple[int, int] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranges, mine, group=group)
        if any(other != mine for other in ranges):
            raise AssertionError(f"the stages shard the tied embedding differently: (start, numel) {ranges}")
        return shard.tensor


def _by_kind(masters: Iterable[_Held]) -> dict[str, list[ParamShard]]:
    kinds: dict[str, list[ParamShard]] = {}
    for held in masters:
        for kind, tensor in {MASTER: held.master.values, **held.master.state}.items():
            kinds.setdefault(kind, []).append(replace(held.shard, tensor=tensor))
    return kinds


def _role(name: str) -> Role:
    if layer_of(name) is not None:
        return "layer"
    return "embedding" if name.startswith("embedding.") else "head"
