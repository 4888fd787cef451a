"""The one thing both levels share: named fp32 shards of the weights that this rank owns.

Over the ranks of an island every parameter element is owned exactly once by each tensor parallel
replica: data parallel ranks own disjoint shards, and the output layer's copy of a tied embedding on the
last pipeline stage is owned by the first stage alone. Level 2 keeps anchor, momentum and residual on
the same shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Role = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class ParamShard:
    """A part of one parameter, as fp32 master values.

    Attributes:
        name: Megatron parameter name with the *global* layer number, equal on all islands, for example
            `decoder.layers.7.mlp.linear_fc1.weight`, plus `[start:stop]` where only a part is owned.
        tensor: fp32 view of the master weights; writing to it and then calling `publish()` changes the
            model. Row blocks keep their matrix shape, shards of the distributed optimizer are 1-D.
        role: where the parameter stands; final norm and output layer are `head`.
        layer: global layer number for role `layer`, else None.
        replicated: equal copies exist on the other tensor parallel ranks (norms, biases).
        counted: this rank counts the shard in norms and sizes (False on the copies of a replicated one).
    """

    name: str
    tensor: Tensor
    role: Role
    layer: int | None
    replicated: bool
    counted: bool
