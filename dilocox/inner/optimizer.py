"""Megatron's optimizer and learning rate schedule (level 1)."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from dilocox.config.schema import Config
from dilocox.inner.model import DTYPES
from dilocox.inner.optimizer_state import allocate_state


def build_optimizer(config: Config, model: nn.Module) -> Any:
    """Builds Megatron's optimizer: masters in fp32, weight decay on matrices only, clipping, loss scaling.

    Collective: all ranks of the island.

    Args:
        model: Megatron's `DistributedDataParallel`.
    """
    inner = config.inner
    settings = OptimizerConfig(
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
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    allocate_state(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate as a function of inner steps, by Megatron's formulas."""
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
