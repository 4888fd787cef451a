"""Where each of Megatron's optimizers keeps the fp32 masters (level 1; used by `master_weights`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn


@dataclass(frozen=True)
class Master:
    """The fp32 values behind one parameter, or behind a flat part of it.

    Attributes:
        values: detached view of the optimizer's own storage; of the parameter's shape, or 1-D for a shard.
        start: first element of the flattened parameter that `values` holds.
    """

    parameter: nn.Parameter
    values: Tensor
    start: int


def find_masters(optimizer: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Master]:
    """Masters that this rank holds, by global parameter name, in the model's order.

    Args:
        optimizer: what `single` gives.

    Raises:
        TypeError: an optimizer of Megatron that is not known here.
    """
    if isinstance(optimizer, DistributedOptimizer):
        return _shards(optimizer, parameters)
    if isinstance(optimizer, FP32Optimizer | Float16OptimizerWithFloat16Params):
        return {name: Master(p, _whole(p), 0) for name, p in parameters.items()}
    raise TypeError(f"no masters known for {type(optimizer).__name__}")


def _whole(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter.data  # the model's weight is its own master
    master: Tensor = parameter.main_param  # type: ignore[attr-defined]
    return master.data


def _shards(optimizer: DistributedOptimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Master]:
    held: dict[nn.Parameter, Tensor] = {}
    for models, shards in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            held.update(zip(model_group, shard_group, strict=True))
    masters = {}
    for name, parameter in parameters.items():
        if parameter in held:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            masters[name] = Master(parameter, held[parameter].data, start)
    return masters
