"""The configuration tree: one section a component, leaf names as in Megatron.

Each setting is documented in the string below it. `config_load.py` reads YAML and overrides into this
tree, `config_rules.py` checks combinations. No torch here: `dilocox plan` reads the same tree.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys and lossy type conversions are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and of its folder below `output_dir`."""
    seed: NonNegativeInt = 1234
    """Seeds the initial weights (equal on all islands) and the data order (each island adds its id)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is one. cpu trains with megatron-core over gloo in fp32."""
    output_dir: str = "runs"
    """Parent of the run folder."""
    exit_interval: PositiveInt | None = None
    """Save a checkpoint and stop after a step divisible by this."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save a checkpoint and stop after this many minutes."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; default: the cores shared among the ranks of this host."""


class ModelConfig(Section):
    num_layers: PositiveInt = 4
    hidden_size: PositiveInt = 128
    ffn_hidden_size: PositiveInt | None = None
    """Default: 4 * hidden_size, with swiglu 8/3 * hidden_size rounded up to a multiple of 64."""
    num_attention_heads: PositiveInt = 4
    num_query_groups: PositiveInt | None = None
    """Groups of key/value heads (GQA); default: one a head."""
    kv_channels: PositiveInt | None = None
    """Size of one head; default: hidden_size / num_attention_heads."""
    seq_length: PositiveInt = 128
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    rotary_base: PositiveInt = 10000
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: PositiveFloat = 1e-5
    swiglu: bool = True
    qk_layernorm: bool = False
    add_bias_linear: bool = False
    untie_embeddings_and_output_weights: bool = False
    """False: the output layer shares the embedding's weight."""
    init_method_std: PositiveFloat = 0.02
    attention_dropout: Fraction = 0.0
    hidden_dropout: Fraction = 0.0
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """auto = Transformer Engine where it is importable and a GPU is there."""
    params_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of the working weights; masters, anchors and pseudo-gradients are always fp32."""
    make_vocab_size_divisible_by: PositiveInt = 128


class ParallelConfig(Section):
    num_islands: PositiveInt = 2
    ranks_per_island: PositiveInt = 1
    """Ranks of one island; data parallel size = this / (tensor * pipeline)."""
    nodes_per_island: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    use_distributed_optimizer: bool = False
    """Shard masters and optimizer state over data parallel ranks (ZeRO-1)."""
    sequence_parallel: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1

    @property
    def data_parallel_size(self) -> int:
        """Model copies inside one island."""
        return self.ranks_per_island // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


class DataConfig(Section):
    data_path: list[str | float] | str = "stdlib"
    """Prefix of a .bin/.idx pair, or [weight, prefix, weight, prefix ...]. `stdlib` = the Python sources
    of this interpreter's standard library, prepared on first use."""
    split: str = "969,30,1"
    """Train, validation, test shares of the documents."""
    tokenizer_type: Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"] = (
        "SentencePieceTokenizer"
    )
    tokenizer_model: str | None = None
    vocab_size: PositiveInt | None = None
    """NullTokenizer: number of tokens. data_path stdlib: size of the SentencePiece model to train. With a
    tokenizer file: its expected size, which `dilocox plan` needs and training checks."""
    data_cache_path: str | None = None
    """Where Megatron's index files go; default: data_cache/ in the run folder."""
    island_data: list[list[str | float] | str] | None = None
    """One data_path an island (sites with data of their own). Default: the islands read disjoint
    documents of data_path."""


class InnerConfig(Section):
    train_iters: PositiveInt = 100
    """Optimizer steps of each island."""
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt = 1
    """Sequences an optimizer step of one island."""
    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"
    lr_decay_iters: PositiveInt | None = None
    """Default: train_iters."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    lr_wsd_decay_iters: PositiveInt | None = None
    """WSD: length of the final decay."""
    weight_decay: NonNegativeFloat = 0.1
    adam_beta1: Momentum = 0.9
    adam_beta2: Momentum = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Clip to this global norm of the island's gradient; 0 = off."""
    optimizer: Literal["adam", "sgd"] = "adam"
    sgd_momentum: Momentum = 0.9


CodecName = Literal["none", "bf16", "int8", "int4", "nf4", "e3m0", "low_rank"]
GatherCodecName = Literal["none", "bf16", "int8", "int4", "nf4", "e3m0"]


class OuterConfig(Section):
    method: Literal["diloco", "data_parallel", "none"] = "diloco"
    """diloco; data_parallel = gradients averaged over the WAN at every inner step (the baseline);
    none = islands alone. With the last two the other leaves of this section go back to their defaults
    (data_parallel keeps `island_weights`), so that a baseline is one override away."""
    sync_interval: PositiveInt = 30
    """H: inner steps between two syncs of the same fragment."""
    num_fragments: PositiveInt = 1
    """P: parts of the model synced in turn, one every H/P inner steps."""
    fragment_pattern: Literal["strided", "sequential"] = "strided"
    """Which layers make a fragment: p, p+P, ... or neighbours."""
    overlap_delay: NonNegativeInt = 0
    """tau: inner steps from start to apply. 0 = blocking; up to H/P."""
    delay_mode: Literal["blocking", "streaming", "delayed_keep", "eager", "delayed_reset"] | None = None
    """Default: blocking for tau = 0, streaming for 0 < tau < H/P, delayed_keep for tau = H/P."""
    mixing_alpha: Fraction = 0.0
    """streaming: weight of the local value when applying (0 = take the global one)."""
    codec: CodecName = "none"
    """How a pseudo-gradient crosses the WAN; none = fp32."""
    codec_block_size: Annotated[int, Field(ge=8, le=4096)] = 64
    """Values that share one scale; a multiple of 8."""
    gather_codec: GatherCodecName | None = None
    """Codec of the gather half for three islands and more; default: same as codec."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    codec_rank: PositiveInt = 32
    """low_rank: initial rank r_1."""
    adaptive_rank: bool = False
    """low_rank: follow the effective rank of the averaged pseudo-gradient (DiLoCoX)."""
    adaptive_interval: bool = False
    """low_rank: scale sync_interval with the rank (DiLoCoX)."""
    error_feedback: bool = False
    """Add what the last message of this rank lost to its next one."""
    outer_optimizer: Literal["nesterov", "sgd"] = "nesterov"
    outer_lr: PositiveFloat | None = None
    """Default: by delay mode, see `config_defaults.OUTER_DEFAULTS`."""
    outer_momentum: Momentum | None = None
    """Default: by delay mode."""
    island_weights: Literal["uniform", "by_tokens"] = "uniform"
    """Weights of the islands in the average."""
    aggregation: Literal["mean"] = "mean"
    outlier_factor: NonNegativeFloat = 10.0
    """Abstain when the pseudo-gradient norm exceeds this times the running median; 0 = off."""


class WanConfig(Section):
    lighthouse: str | None = None
    """http://HOST:PORT of `dilocox lighthouse`; `dilocox launch` starts one by itself."""
    interface: str | None = None
    """Network interface of the WAN; default: the one that routes to the lighthouse."""
    advertise_address: str | None = None
    """Address under which other islands reach this host; default: the interface's address."""
    port_range: Annotated[str, Field(pattern=r"^\d+-\d+$")] | None = None
    """LOW-HIGH: ports for the island's store and membership server; default: any free port."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for one exchange; the other timeouts derive from it."""
    min_islands: PositiveInt = 1
    """Fewest islands in a committed sync."""
    grace_s: PositiveFloat = 30.0
    """How long a quorum waits for islands that are alive but late."""
    streams: Annotated[int, Field(ge=1, le=64)] = 1
    """Parallel TCP connections a pair of ranks."""
    join_timeout_s: PositiveFloat = 3600.0
    """How long an island waits at start for the others."""


class CheckpointConfig(Section):
    save: str | None = None
    """Folder of the checkpoints; default: checkpoints/ in the run folder."""
    save_interval: PositiveInt | None = None
    """Inner steps between two checkpoints; default: only at the end or when stopped."""
    save_retain: PositiveInt = 2
    """Newest checkpoints kept."""
    load: str | None = None
    """Folder to resume from; default: `save` when `--resume` is given."""


class LoggingConfig(Section):
    log_interval: PositiveInt = 10
    eval_interval: PositiveInt | None = None
    """Inner steps between two validations on the anchor; default: first and last only."""
    eval_iters: PositiveInt = 8
    """Global batches a validation."""
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "dilocox"


class Config(Section):
    """One run. All islands must agree on everything but `data.island_data` paths and `wan` addresses."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    wan: WanConfig = WanConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
