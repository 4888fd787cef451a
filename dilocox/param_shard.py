"""What both levels share: named fp32 shards of the weights that this rank owns.

Over the ranks of an island every parameter element is owned exactly once by each tensor parallel
replica: data parallel ranks own disjoint shards, and the output layer's copy of a tied embedding on the
last pipeline stage is owned by the first stage alone. Level 2 keeps anchor, momentum and residual on
the same shards.

A shard knows where it lies in the whole parameter, so that state on shards can be written by one layout and
read by another.
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

    The tensor parallel ranks of a stage cut the global tensor into rectangular blocks; `tensor` holds a
    contiguous range of the elements of this rank's block, in row-major order.

    Attributes:
        name: Megatron parameter name with the *global* layer number, equal on all islands and for all
            layouts, for example `decoder.layers.7.mlp.linear_fc1.weight`.
        tensor: fp32 view of the master weights; writing to it and then calling `publish()` changes the
            model. Whole matrices and row blocks of data parallel ranks keep their matrix shape, shards of
            the distributed optimizer are 1-D.
        role: part of the model; final norm and output layer are `head`.
        layer: global layer number for role `layer`, else None.
        replicated: equal copies exist on the other tensor parallel ranks (norms, biases).
        counted: this rank counts the shard in norms and sizes (False on the copies of a replicated one).
        global_shape: of the whole parameter. The first linear layer of a SwiGLU is (2, ffn, hidden): a
            tensor parallel rank holds rows of the gate and the same rows of the value, which is one block.
        offsets: where this rank's block begins in the global tensor, one for each axis.
        block_shape: of this rank's block, with the axes of `global_shape`.
        start: first element of the flattened block that `tensor` holds.
    """

    name: str
    tensor: Tensor
    role: Role
    layer: int | None
    replicated: bool
    counted: bool
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    block_shape: tuple[int, ...]
    start: int

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
        """A shard that holds the whole of its parameter."""
        shape = tuple(tensor.shape)
        return cls(
            name=name,
            tensor=tensor,
            role=role,
            layer=layer,
            replicated=replicated,
            counted=counted,
            global_shape=shape,
            offsets=(0,) * len(shape),
            block_shape=shape,
            start=0,
        )

    @property
    def label(self) -> str:
        """The name, plus `[start:stop]` where only a part of the block is held.

        In rows for row blocks, in elements for 1-D shards.
        """
        if self.tensor.numel() == prod(self.block_shape):
            return self.name
        start = self.start // prod(self.tensor.shape[1:])
        return f"{self.name}[{start}:{start + len(self.tensor)}]"


@dataclass
class ShardState:
    """State of a part of level 2, in a form that a checkpoint can write and another layout can read.

    Attributes:
        tensors: by kind (`anchor`, `momentum`, `residual` ...) and name of the shard; fp32, shaped like
            that shard's tensor. A kind may hold only some of the shards.
        common: plain values that JSON can hold, equal on all ranks of the island.
        layout_bound: values of this rank that `torch.save` can hold and that only its own layout can
            read; empty after a load under another layout.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    layout_bound: dict[str, Any] = field(default_factory=dict)
