"""Initial weights that do not depend on the layout: TP2, PP2 or one rank start from the same model.

Every parameter has a random stream of its own, keyed by seed and global name, for its full shape; a rank
keeps its part. NumPy's generator is used: torch's gives other last bits on CPUs with other vector units, and
islands on different machines must start with equal weights.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from dilocox.config.schema import ModelConfig
from dilocox.inner.blocks import block_of
from dilocox.inner.names import named_global_parameters

TIED_OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, *, seed: int, tp_rank: int, tp_size: int) -> None:
    """Writes the initial weights of this rank, by Megatron's rules.

    Matrices are normal with `init_method_std`; those that write to the residual stream have it divided by
    sqrt(2 * num_layers). Norm weights are 1, biases 0.

    In place: all parameters of `model`.
    Memory: one full fp32 parameter at a time, on the CPU.
    """
    for name, parameter in named_global_parameters(model).items():
        if name == TIED_OUTPUT and not config.untie_embeddings_and_output_weights:
            name = EMBEDDING
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            block = block_of(name, parameter, swiglu=config.swiglu, tp_rank=tp_rank, tp_size=tp_size)
            full = _normal(name, block.global_shape, std=_std(name, config), seed=seed)
            parameter.copy_(full[block.slices].reshape(parameter.shape))


def _std(name: str, config: ModelConfig) -> float:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std


def _normal(name: str, shape: tuple[int, ...], *, std: float, seed: int) -> Tensor:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    values = generator.standard_normal(math.prod(shape), dtype=np.float32)
    return torch.from_numpy(values).view(shape).mul_(std)
