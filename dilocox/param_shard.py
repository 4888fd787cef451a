"""The one thing both levels share: named fp32 shards of the weights that this rank owns.

Over the ranks of an island every parameter element is owned exactly once by each tensor parallel
replica: data parallel ranks own disjoint shards, and the output layer's copy of a tied embedding on the
last pipeline stage is owned by the first stage alone. Level 2 keeps anchor, momentum and residual on
the same shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch import Tensor

Role = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class ParamShard:
    """A part of one parameter, as fp32 master values.

    Attributes:
        name: Megatron parameter name with the *global* layer number, equal on all islands, for example
            `decoder.layers.7.mlp.linear_fc1.weight`.
        tensor: fp32 view of the master weights; writing to it and then calling `publish()` changes the
            model. Row blocks keep their matrix shape, shards of the distributed optimizer are 1-D.
        role: where the parameter stands; final norm and output layer are `head`.
        layer: global layer number for role `layer`, else None.
        replicated: equal copies exist on the other tensor parallel ranks (norms, biases).
        counted: this rank counts the shard in norms and sizes (False on the copies of a replicated one).
        global_shape: of the whole parameter.
        offsets: where this tensor parallel rank's block lies in it, per axis.
        block_shape: of that block, row-major.
        start: first element of the flattened block that `tensor` holds; `tensor.numel()` elements follow.
    """

    name: str
    tensor: Tensor
    role: Role
    layer: int | None
    replicated: bool
    counted: bool
    global_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    block_shape: tuple[int, ...] = ()
    start: int = 0

    @classmethod
    def whole(
        cls,
        name: str,
        tensor: Tensor,
        *,
        role: Role = "layer",
        layer: int | None = 0,
        replicated: bool = False,
        counted: bool = True,
    ) -> ParamShard:
        """A parameter that this rank holds all of."""
        shape = tuple(tensor.shape)
        return cls(
            name,
            tensor,
            role,
            layer if role == "layer" else None,
            replicated,
            counted,
            global_shape=shape,
            offsets=(0,) * len(shape),
            block_shape=shape,
        )

    @property
    def label(self) -> str:
        """The name, plus `[start:stop]` where only a part of the block is held.

        In rows for row blocks, in elements for 1-D shards.
        """
        if not self.block_shape or self.tensor.numel() == prod(self.block_shape):
            return self.name
        start = self.start // prod(self.tensor.shape[1:])
        return f"{self.name}[{start}:{start + len(self.tensor)}]"


@dataclass
class ShardState:
    """What a checkpoint holds for a rank's shards.

    Attributes:
        tensors: kind (anchor, momentum, residual ...) -> shard name -> fp32 tensor shaped like the shard's.
        common: plain JSON-able values, equal on all ranks of the island.
        layout_bound: torch.save-able values of this rank that only its own layout can read.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    layout_bound: dict[str, Any] = field(default_factory=dict)
