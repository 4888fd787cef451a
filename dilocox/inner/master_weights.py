"""The fp32 master weights that this rank owns, as level 2 sees them (level 1 side of `shards`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from dilocox.backend import Island
from dilocox.inner.initial_weights import EMBEDDING, TIED_OUTPUT
from dilocox.inner.masters import Master, find_masters
from dilocox.inner.names import is_tensor_parallel, layer_of, named_global_parameters, unwrap
from dilocox.inner.optimizer_state import single
from dilocox.param_shard import ParamShard, Role


class MasterWeights:
    """Masters of one rank, whichever Megatron optimizer holds them.

    Without the distributed optimizer every data parallel rank holds all masters of its model part; the
    ranks then own row blocks of each. With it a rank holds, and owns, flat shards. The last stage's copy
    of a tied embedding is owned by nobody there: it follows the first stage.

    Collective: all ranks of the island make it together.

    Attributes:
        shards: what this rank owns, in the model's order.
    """

    def __init__(self, island: Island, model: Any, optimizer: Any) -> None:
        self._island = island
        self._model = model
        self._optimizer = single(optimizer)
        self._sharded = isinstance(self._optimizer, DistributedOptimizer)
        masters = find_masters(self._optimizer, named_global_parameters(model))
        last_stage = island.topology.pp - 1
        self._tied: Tensor | None = None
        if unwrap(model).share_embeddings_and_output_weights and last_stage > 0:
            if island.coordinate.pp == 0:
                self._tied = _tied_values(masters[EMBEDDING])
            elif island.coordinate.pp == last_stage:
                self._tied = _tied_values(masters.pop(TIED_OUTPUT))
        self._whole = [] if self._sharded else [master.values for master in masters.values()]
        shards = [self._piece(name, master) for name, master in masters.items()]
        self.shards = [shard for shard in shards if shard.tensor.numel() > 0]

    @torch.no_grad()
    def publish(self) -> None:
        """Makes masters and model weights of all replicas follow the shards, bit for bit.

        Collective: all ranks of the island.
        In place: masters of other data parallel ranks, the last stage's tied embedding, model weights.
        Memory: without the distributed optimizer 1/DP of this rank's masters.
        """
        if self._whole and self._island.topology.dp > 1:
            self._share_rows()
        if self._tied is not None:
            dist.broadcast(self._tied, group_src=0, group=parallel_state.get_embedding_group())
        if not isinstance(self._optimizer, FP32Optimizer):
            self._optimizer._copy_main_params_to_model_params()
        if self._sharded:
            self._model.start_param_sync(force_sync=True)

    def load(self, values: Sequence[Tensor]) -> None:
        """Copies one fp32 value into each shard and publishes. Collective: all ranks of the island."""
        for shard, value in zip(self.shards, values, strict=True):
            shard.tensor.copy_(value)
        self.publish()

    @contextmanager
    def temporarily(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Has other master values inside the `with` and restores the own ones exactly after it.

        Collective: all ranks of the island, on entry and on exit.
        Memory: a copy of the shards.

        Args:
            values: fp32, one for each shard, of its shape.
        """
        saved = [shard.tensor.clone() for shard in self.shards]
        self.load(values)
        try:
            yield
        finally:
            self.load(saved)

    def _piece(self, name: str, master: Master) -> ParamShard:
        island, values, start = self._island, master.values, master.start
        if not self._sharded:
            blocks = values.tensor_split(island.topology.dp)
            start = sum(len(block) for block in blocks[: island.coordinate.dp])
            values = blocks[island.coordinate.dp]
        is_part = values.numel() < master.parameter.numel()
        replicated = island.topology.tp > 1 and not is_tensor_parallel(master.parameter)
        layer = layer_of(name)
        return ParamShard(
            name=name,
            tensor=values,
            role=_role(name),
            layer=layer,
            replicated=replicated,
            counted=not replicated or island.coordinate.tp == 0,
            global_shape=tuple(values.shape),
            offsets=(0,) * values.dim(),
            block_shape=tuple(values.shape),
            start=start if is_part else 0,
        )

    def _share_rows(self) -> None:
        """Each data parallel rank tells the others the row blocks that it owns."""
        group = parallel_state.get_data_parallel_group()
        dp = self._island.topology.dp
        for owner in range(dp):
            blocks = [values.tensor_split(dp)[owner] for values in self._whole]
            flat = torch.cat([block.flatten() for block in blocks])
            dist.broadcast(flat, group_src=owner, group=group)
            parts = torch.split(flat, [block.numel() for block in blocks])
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part.view_as(block))


def _tied_values(master: Master) -> Tensor:
    """What the two stages exchange.

    Megatron gives a tied embedding a gradient bucket of its own, so with the distributed optimizer the
    shards of the two stages cover the same elements; anything else would mix up tokens, hence the check.
    """
    group = parallel_state.get_embedding_group()
    mine = (master.start, master.values.numel())
    ranges: list[tuple[int, int] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranges, mine, group=group)
    if any(other != mine for other in ranges):
        raise AssertionError(f"the stages shard the tied embedding differently: (start, numel) {ranges}")
    return master.values


def _role(name: str) -> Role:
    if layer_of(name) is not None:
        return "layer"
    return "embedding" if name.startswith("embedding.") else "head"
