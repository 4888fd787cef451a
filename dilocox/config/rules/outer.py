"""Rules on what islands average, and when."""

from __future__ import annotations

from dilocox.config.defaults import delay_mode
from dilocox.config.rules.require import require, require_default, require_multiple
from dilocox.config.schema import Config


def interval(config: Config) -> None:
    """Every fragment syncs, and before the run ends."""
    outer = config.outer
    if outer.method != "diloco":
        return
    interval, fragments = outer.sync_interval, outer.num_fragments
    per_stage = config.model.num_layers // config.parallel.pipeline_model_parallel_size
    require(
        fragments <= per_stage,
        "outer.num_fragments",
        fragments,
        f"a pipeline stage has {per_stage} layers and a fragment needs one of each stage; use at most "
        f"{per_stage}",
    )
    require_multiple("outer.sync_interval", interval, fragments, "num_fragments")
    require(
        interval <= config.inner.train_iters,
        "outer.sync_interval",
        interval,
        f"the run ends before the first sync (inner.train_iters = {config.inner.train_iters}); shorten it",
    )


def fragments(config: Config) -> None:
    """A pattern needs fragments to lay out."""
    if config.outer.num_fragments == 1:
        require_default(config.outer, "outer", ("fragment_pattern",), "with num_fragments 1")


def delay(config: Config) -> None:
    """Delay mode and overlap delay belong together."""
    outer = config.outer
    if outer.method != "diloco":
        return
    delay, fragment_interval = outer.overlap_delay, outer.sync_interval // outer.num_fragments
    mode = outer.delay_mode
    assert mode is not None
    require(
        delay <= fragment_interval,
        "outer.overlap_delay",
        delay,
        f"must be at most sync_interval / num_fragments ({fragment_interval}); use 0 to {fragment_interval}",
    )
    whole_interval = mode not in ("blocking", "streaming")
    fits = delay == fragment_interval if whole_interval else delay_mode(outer) == mode
    wanted = {"blocking": "= 0", "streaming": f"of 1 to {fragment_interval - 1}"}.get(
        mode, f"= {fragment_interval} (sync_interval / P)"
    )
    require(
        fits,
        "outer.delay_mode",
        mode,
        f"needs an overlap_delay {wanted}, not {delay}; change one of the two",
    )
    require(
        mode != "eager" or outer.num_fragments == 1,
        "outer.delay_mode",
        mode,
        f"works on the whole model and num_fragments is {outer.num_fragments}; use num_fragments: 1",
    )


def mixing(config: Config) -> None:
    """Only streaming mixes, and it must take up something global."""
    outer = config.outer
    if outer.method != "diloco":
        return
    if outer.delay_mode != "streaming":
        require_default(outer, "outer", ("mixing_alpha",), "unless delay_mode is streaming")
    require(
        outer.mixing_alpha < 1,
        "outer.mixing_alpha",
        outer.mixing_alpha,
        "1 keeps the local value for ever, so islands would never share anything; use 0 to 0.9",
    )


def codec(config: Config) -> None:
    """Settings of codecs need a codec in use that has them."""
    outer, islands = config.outer, config.parallel.num_islands
    own_gather_codec = "int4" if outer.codec == "low_rank" else outer.codec
    require(
        outer.gather_codec in (None, own_gather_codec) or islands > 2,
        "outer.gather_codec",
        outer.gather_codec,
        f"there is no gather half with parallel.num_islands = {islands}; remove it",
    )
    in_use = {outer.codec, outer.gather_codec} if islands > 2 else {outer.codec}
    name = " and ".join(sorted({str(codec) for codec in in_use if codec is not None}))
    if in_use <= {"none", None}:
        require_default(outer, "outer", ("error_feedback",), "with codec none, which loses nothing")
    if in_use <= {"none", "bf16", None}:
        leaves = ("rounding", "codec_block_size")
        require_default(
            outer, "outer", leaves, f"with codec {name}, which has no blocks and rounds to nearest"
        )
    require_multiple("outer.codec_block_size", outer.codec_block_size, 8, "a byte's worth of codes")


def low_rank(config: Config) -> None:
    """Low rank needs matrices, and a rank that saves something."""
    outer = config.outer
    if outer.codec != "low_rank":
        leaves = ("codec_rank", "adaptive_rank", "adaptive_interval")
        require_default(outer, "outer", leaves, "unless codec is low_rank")
        return
    require(
        not config.parallel.use_distributed_optimizer,
        "outer.codec",
        outer.codec,
        "needs whole matrices, and parallel.use_distributed_optimizer cuts them into flat shards; use int4 "
        "or set that to false",
    )
    require(
        outer.codec_rank < config.model.hidden_size,
        "outer.codec_rank",
        outer.codec_rank,
        f"must be under model.hidden_size ({config.model.hidden_size}) to save anything; use a quarter "
        "of it at most",
    )
    require(
        outer.adaptive_rank or not outer.adaptive_interval,
        "outer.adaptive_interval",
        True,
        "follows the adaptive rank; set adaptive_rank: true as well",
    )


def guards(config: Config) -> None:
    """A factor of 1 or less would call half of all norms outliers."""
    factor = config.outer.outlier_factor
    require(
        factor == 0 or factor > 1,
        "outer.outlier_factor",
        factor,
        "at 1 or less ordinary norms are outliers; use 0 (off) or about 10",
    )
