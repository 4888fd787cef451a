"""Megatron's optimizers behind one adapter, and the learning rate schedule (level 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from dilocox.config.schema import Config, InnerConfig
from dilocox.inner.model import DTYPES


@dataclass(frozen=True)
class Master:
    """The fp32 values behind one parameter, or behind a flat part of it.

    Attributes:
        values: detached view of the optimizer's own storage; of the parameter's shape, or 1-D for a shard.
        start: first element of the flattened parameter that `values` holds.
        is_flat: a shard of the distributed optimizer: no other data parallel rank holds these values.
        state: the optimizer's tensors for these values, each of their shape, by torch's name for them
            (`exp_avg`, `momentum_buffer` ...).
    """

    values: Tensor
    start: int
    is_flat: bool
    state: dict[str, Tensor]


class InnerOptimizer:
    """Adapter for Megatron's optimizer, which may chain any number of others.

    Collective: made by all ranks of the island.

    Args:
        megatron: from `get_megatron_optimizer`.
    """

    def __init__(self, megatron: Any) -> None:
        self._megatron = megatron
        self._parts: list[Any] = list(getattr(megatron, "chained_optimizers", [megatron]))
        for part in self._parts:
            _allocate(part)
        self.num_steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all chained optimizers; the learning rate schedule writes to them."""
        groups: list[dict[str, Any]] = self._megatron.param_groups
        return groups

    def zero_grad(self) -> None:
        self._megatron.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale of fp16; unchanged for the other dtypes."""
        scaled: Tensor = self._megatron.scale_loss(loss)
        return scaled

    def step(self) -> tuple[bool, float | None, int | None]:
        """Takes one step. Returns: whether the weights changed, gradient norm, zeros in the gradient."""
        succeeded, grad_norm, num_zeros = self._megatron.step()
        return succeeded, grad_norm, num_zeros

    def masters(self) -> dict[nn.Parameter, Master]:
        """Returns the masters that this rank holds, with their state, by parameter of the model.

        Raises:
            TypeError: an optimizer of Megatron that this adapter does not know.
        """
        found = {}
        for part in self._parts:
            for parameter, master, start in _masters_of(part):
                state = part.optimizer.state.get(master, {})
                found[parameter] = Master(
                    values=master.data,
                    start=start,
                    is_flat=isinstance(part, DistributedOptimizer),
                    state={
                        kind: tensor
                        for kind, tensor in state.items()
                        if isinstance(tensor, Tensor) and tensor.shape == master.shape
                    },
                )
        return found

    def copy_masters_to_model(self) -> None:
        """Rounds the masters to the working dtype. In place: this rank's part of the model weights."""
        for part in self._parts:
            if not isinstance(part, FP32Optimizer):  # there the weights are the masters
                part._copy_main_params_to_model_params()

    @property
    def num_steps(self) -> int:
        """Steps taken, as the optimizers count them; 0 for those that do not.

        Not the position of the learning rate schedule: an island that joins late skips ahead there.
        """
        return max(_num_steps(part.optimizer) for part in self._parts)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for part in self._parts:
            _set_num_steps(part.optimizer, value)

    def state_bytes(self) -> int:
        """Returns the bytes of this rank's optimizer state, and of masters that are no model weights."""
        total = 0
        for parameter, master in self.masters().items():
            tensors = list(master.state.values())
            if parameter.dtype != torch.float32:
                tensors.append(master.values)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, equal on all ranks of the island; tensors are in `masters`."""
        scaler = getattr(self._parts[0], "grad_scaler", None)
        values = {} if scaler is None else scaler.state_dict()
        if "scale" in values:
            values = {**values, "scale": float(values["scale"])}
        return {"num_steps": self.num_steps, "loss_scale": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`; the caller fills the tensors of `masters`."""
        self.num_steps = state["num_steps"]
        values = dict(state["loss_scale"])
        if "scale" in values:
            values["scale"] = torch.tensor([values["scale"]])
        for part in self._parts:
            if getattr(part, "grad_scaler", None) is not None:
                part.grad_scaler.load_state_dict(dict(values))


def build_optimizer(config: Config, model: nn.Module) -> InnerOptimizer:
    """Builds Megatron's optimizer: masters in fp32, weight decay on matrices only, clipping, loss scaling.

    Its state exists before the first step, with the zeros that the first step would start from.

    Collective: all ranks of the island.

    Args:
        model: Megatron's `DistributedDataParallel`.
    """
    settings = _settings(config.inner, config)
    return InnerOptimizer(get_megatron_optimizer(settings, [model], use_gloo_process_groups=False))


def _settings(inner: InnerConfig, config: Config) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=inner.optimizer,
        lr=inner.lr,
        min_lr=inner.min_lr,
        weight_decay=inner.weight_decay,
        adam_beta1=inner.adam_beta1,
        adam_beta2=inner.adam_beta2,
        adam_eps=inner.adam_eps,
        sgd_momentum=inner.sgd_momentum,
        clip_grad=inner.clip_grad,
        params_dtype=DTYPES[config.model.params_dtype],
        bf16=config.model.params_dtype == "bf16",
        fp16=config.model.params_dtype == "fp16",
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )


def build_scheduler(config: Config, optimizer: InnerOptimizer) -> OptimizerParamScheduler:
    """Builds the learning rate as a function of inner steps, by Megatron's formulas."""
    inner = config.inner
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=inner.lr,
        min_lr=inner.min_lr,
        lr_warmup_steps=inner.lr_warmup_iters,
        lr_decay_steps=inner.lr_decay_iters or inner.train_iters,
        lr_decay_style=inner.lr_decay_style,
        start_wd=inner.weight_decay,
        end_wd=inner.weight_decay,
        wd_incr_steps=inner.train_iters,
        wd_incr_style="constant",
        wsd_decay_steps=inner.lr_wsd_decay_iters,
        lr_wsd_decay_style=inner.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a checkpoint holds the position, the configuration the curve
    )


def _masters_of(part: Any) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
    """Yields (parameter of the model, torch's parameter that holds its master, first element held)."""
    if isinstance(part, DistributedOptimizer):
        models = (*part.model_float16_groups, *part.model_fp32_groups)
        shards = (*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
        for parameter, shard in _pairs(models, shards):
            yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        models = (*part.float16_groups, *part.fp32_from_fp32_groups)
        masters = (*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups)
        yield from ((parameter, master, 0) for parameter, master in _pairs(models, masters))
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from ((parameter, parameter, 0) for parameter in group["params"])
    else:
        raise TypeError(f"no masters known for {type(part).__name__}")


def _pairs(groups: Any, others: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for group, other in zip(groups, others, strict=True):
        yield from zip(group, other, strict=True)


def _allocate(part: Any) -> None:
    """Allocates the state that torch's optimizers allocate at their first step, with the same zeros.

    A checkpoint can then be saved and loaded before that step.
    """
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if group.get("momentum") and not part.optimizer.state[parameter]:
                part.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)


def _num_steps(optimizer: torch.optim.Optimizer) -> int:
    """Returns the steps taken: torch counts per parameter, Transformer Engine and Apex per group."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    counts += [group["step"] for group in optimizer.param_groups if "step" in group]
    return max((int(count) for count in counts), default=0)


def _set_num_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    if isinstance(optimizer, torch.optim.AdamW):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(num_steps))
    elif not isinstance(optimizer, torch.optim.SGD):  # SGD does not count
        for group in optimizer.param_groups:
            group["step"] = num_steps
