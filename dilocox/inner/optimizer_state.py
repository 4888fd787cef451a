"""State of Megatron's optimizers: made before the first step, and put back from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig


def single(optimizer: Any) -> Any:
    """The one optimizer in Megatron's chain (the others are for experts, which this model has not)."""
    (only,) = getattr(optimizer, "chained_optimizers", [optimizer])
    return only


def allocate_state(optimizer: Any) -> None:
    """Makes the state that torch's optimizers make at their first step, with the same zeros.

    A checkpoint can then be saved and loaded before that step; Megatron's distributed optimizer asks for it.
    """
    only = single(optimizer)
    if only.init_state_fn is None:
        only.init_state_fn = _allocate_momentum
    only.init_state_fn(only.optimizer, only.config)
    _set_num_steps(only.optimizer, 0)


def count_steps(optimizer: Any) -> int:
    """Optimizer steps taken, as torch's AdamW counts them; 0 for optimizers that do not count in tensors.

    Not the position of the learning rate schedule, which an island that joins late skips ahead in.
    """
    states = single(optimizer).optimizer.state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def restore_state(optimizer: Any, loaded: dict[str, Any], *, num_steps: int) -> None:
    """Puts back what Megatron's `dist_checkpointing.load` has read.

    Megatron 0.16 to 0.19 lose torch's count of steps on the way (it is missing at step 0, and with the
    distributed optimizer one tensor becomes the count of all parameters), so it is set here.

    In place: state and fp32 masters of `optimizer`.

    Args:
        loaded: optimizer part of the loaded state dict.
        num_steps: optimizer steps taken.
    """
    only = single(optimizer)
    if isinstance(only, DistributedOptimizer):
        values = loaded.pop("param_state")
        only.load_state_dict(loaded)
        for state in only.optimizer.state.values():
            state.pop("step", None)
        only.load_parameter_state_from_fully_reshardable(values)
    else:
        if isinstance(only.optimizer, torch.optim.AdamW):
            loaded.get("optimizer", loaded)["state"]["common_step"] = torch.tensor(float(num_steps))
        only.load_state_dict(loaded)
    _set_num_steps(only.optimizer, num_steps)


def _set_num_steps(inner: torch.optim.Optimizer, num_steps: int) -> None:
    if isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(num_steps))


def _allocate_momentum(inner: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and not inner.state[parameter]:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)
