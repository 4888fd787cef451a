"""Rules on the optimizer steps inside an island."""

from __future__ import annotations

from dilocox.config.rules.require import require, require_default, require_multiple
from dilocox.config.schema import Config


def batch(config: Config) -> None:
    """A global batch falls evenly on data parallel ranks."""
    inner, dp = config.inner, config.parallel.data_parallel_size
    require_multiple(
        "inner.global_batch_size",
        inner.global_batch_size,
        inner.micro_batch_size * dp,
        "micro_batch_size * data parallel size",
    )


def learning_rate(config: Config) -> None:
    """The curve is one that a run can follow."""
    inner = config.inner
    warmup, decay = inner.lr_warmup_iters, inner.lr_decay_iters
    assert decay is not None
    require(
        inner.min_lr <= inner.lr,
        "inner.min_lr",
        inner.min_lr,
        f"must be at most inner.lr ({inner.lr}); lower it",
    )
    shorter = min(decay, inner.train_iters)
    require(
        warmup < shorter,
        "inner.lr_warmup_iters",
        warmup,
        f"must end before train_iters and lr_decay_iters ({shorter}); shorten it",
    )
    if inner.lr_decay_style == "constant":
        require_default(inner, "inner", ("min_lr",), "with lr_decay_style constant")
        require(
            decay == inner.train_iters,
            "inner.lr_decay_iters",
            decay,
            "has no effect with lr_decay_style constant; remove it",
        )


def final_decay(config: Config) -> None:
    """WSD has a final decay, which fits behind the warm-up and begins before the run ends."""
    inner = config.inner
    if inner.lr_decay_style != "WSD":
        leaves = ("lr_wsd_decay_iters", "lr_wsd_decay_style")
        require_default(inner, "inner", leaves, "unless lr_decay_style is WSD")
        return
    warmup, decay, final = inner.lr_warmup_iters, inner.lr_decay_iters, inner.lr_wsd_decay_iters
    assert decay is not None
    require(
        final is not None and warmup + final <= decay,
        "inner.lr_wsd_decay_iters",
        final,
        f"lr_decay_style WSD needs a final decay that fits between warm-up ({warmup}) and lr_decay_iters "
        f"({decay}); set it to 1 to {decay - warmup}",
    )
    begin = decay - (final or 0)
    require(
        begin < inner.train_iters,
        "inner.lr_wsd_decay_iters",
        final,
        f"has no effect: the final decay begins at step {begin} (lr_decay_iters - lr_wsd_decay_iters) and "
        f"the run ends at train_iters ({inner.train_iters}); lengthen the decay or lower lr_decay_iters",
    )


def inner_optimizer(config: Config) -> None:
    """Settings belong to the optimizer in use."""
    inner = config.inner
    if inner.optimizer == "adam":
        require_default(inner, "inner", ("sgd_momentum",), "with optimizer adam")
        return
    require_default(inner, "inner", ("adam_beta1", "adam_beta2", "adam_eps"), "with optimizer sgd")
    require(
        not config.parallel.use_distributed_optimizer,
        "inner.optimizer",
        inner.optimizer,
        "Megatron's distributed optimizer knows only adam; use adam or set "
        "parallel.use_distributed_optimizer: false",
    )
