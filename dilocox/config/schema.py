"""The configuration tree: one section per component, leaf names as in Megatron. No torch here.

The string below each setting documents it, with its unit. `load.py` reads YAML and overrides into this
tree, `defaults.py` fills in what follows from other settings, `check.py` checks combinations, and
`warnings.py` names what is legal but questionable.
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
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "run"
    """Name of the run and of its folder below `output_dir`."""
    seed: NonNegativeInt = 1234
    """Seeds the initial weights (equal on all islands) and the data order (each island adds its id)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if the host has a GPU. cpu trains with megatron-core over gloo in fp32."""
    output_dir: str = "runs"
    """Parent of the run folder."""
    exit_interval: PositiveInt | None = None
    """Save a checkpoint and stop after an inner step divisible by this; default: never."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save a checkpoint and stop after this many minutes; default: never."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; default: the cores shared among the ranks of this host."""


class ModelConfig(Section):
    num_layers: PositiveInt = 4
    """Transformer layers of the whole model."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream, values per token."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside the MLP. Default: 4 * hidden_size, with swiglu 8/3 * hidden_size rounded up to a multiple
    of 64."""
    num_attention_heads: PositiveInt = 4
    """Query heads of each layer."""
    num_query_groups: PositiveInt | None = None
    """Key/value heads, each shared by a group of query heads (GQA); default: num_attention_heads."""
    kv_channels: PositiveInt | None = None
    """Values per head; default: hidden_size / num_attention_heads."""
    seq_length: PositiveInt = 128
    """Tokens per sequence."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """rope rotates queries and keys; learned_absolute adds a trained vector per position."""
    rotary_base: PositiveInt = 10000
    """rope: base of the wavelengths; larger for longer sequences."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Norm before attention, before the MLP and at the end; LayerNorm also has a bias."""
    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in each norm, against division by zero."""
    swiglu: bool = True
    """True: SiLU-gated MLP. False: plain MLP with GELU."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head before attention."""
    add_bias_linear: bool = False
    """Give the linear layers a bias."""
    untie_embeddings_and_output_weights: bool = False
    """False: the output layer shares the embedding's weight."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the initial matrices; those that write to the residual stream get it divided by
    sqrt(2 * num_layers)."""
    attention_dropout: Fraction = 0.0
    """Probability that an attention weight is dropped in training."""
    hidden_dropout: Fraction = 0.0
    """Probability that a value on its way to the residual stream is dropped in training."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers to build: auto = those of Transformer Engine if it is installed and there is a GPU, else
    local."""
    params_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of the working weights; masters, anchors and pseudo-gradients are always fp32."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """Rows of the embedding are padded to a multiple of this times tensor_model_parallel_size."""


class ParallelConfig(Section):
    num_islands: PositiveInt = 2
    """Islands of the run; each holds the whole model and trains by itself between two syncs."""
    ranks_per_island: PositiveInt = 1
    """Ranks of one island; data parallel size = this / (tensor * pipeline)."""
    nodes_per_island: PositiveInt = 1
    """Hosts of one island; `dilocox launch`, which stays on one host, takes 1 only."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that split each matrix among them."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that split the layers among them."""
    use_distributed_optimizer: bool = False
    """Shard fp32 masters and optimizer states over data parallel ranks (ZeRO-1)."""
    sequence_parallel: bool = False
    """Split norms and dropout over tensor parallel ranks along the sequence; needs Transformer Engine."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations to compute again in the backward pass instead of keeping them: those of whole layers, or
    of the attention core (selective); default: none."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """full: recompute all layers in chunks of recompute_num_layers, or only the first recompute_num_layers of
    each stage (block)."""
    recompute_num_layers: PositiveInt = 1
    """full: layers per chunk (uniform), or layers of a stage that are recomputed (block)."""

    @property
    def data_parallel_size(self) -> int:
        """Model copies inside one island."""
        return self.ranks_per_island // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


class DataConfig(Section):
    data_path: list[str | float] | str = "stdlib"
    """Prefix of a .bin/.idx pair, or [weight, prefix, weight, prefix ...]. `stdlib`: the Python sources of
    this interpreter's standard library, prepared on first use. `~` and $VARIABLES are expanded."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test. The test share is only held back: nothing
    here reads it."""
    tokenizer_type: Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"] = (
        "SentencePieceTokenizer"
    )
    """Reader of tokenizer_model; NullTokenizer takes text that already is token ids."""
    tokenizer_model: str | None = None
    """File of the tokenizer: a SentencePiece .model, or a tokenizer.json or its folder. Default: a model that
    is trained on data_path stdlib."""
    vocab_size: PositiveInt | None = None
    """Number of tokens. NullTokenizer: needed. data_path stdlib: size of the SentencePiece model to train.
    With a tokenizer file: its expected size, which `dilocox plan` needs and training checks."""
    data_cache_path: str | None = None
    """Folder of Megatron's index files; default: data_cache/ in the run folder."""
    island_data: list[list[str | float] | str] | None = None
    """One data_path per island, for sites with data of their own. Default: the islands read disjoint
    documents of data_path."""


class InnerConfig(Section):
    train_iters: PositiveInt = 100
    """Optimizer steps of each island."""
    micro_batch_size: PositiveInt = 1
    """Sequences per forward pass of one data parallel rank."""
    global_batch_size: PositiveInt = 1
    """Sequences per optimizer step of one island."""
    lr: PositiveFloat = 1e-3
    """Highest learning rate, reached after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"
    """Curve of the learning rate after the warm-up; WSD stays at lr until its final decay."""
    lr_decay_iters: PositiveInt | None = None
    """Inner step at which the decay ends; default: train_iters."""
    lr_warmup_iters: NonNegativeInt = 0
    """Inner steps in which the learning rate rises linearly from 0."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    """WSD: curve of the final decay."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """WSD: inner steps of the final decay, which ends at lr_decay_iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the matrices; norms and biases have none."""
    adam_beta1: Momentum = 0.9
    """adam: decay of the first moment per step."""
    adam_beta2: Momentum = 0.95
    """adam: decay of the second moment per step."""
    adam_eps: PositiveFloat = 1e-8
    """adam: added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Clip the island's gradient to this global L2 norm; 0 = off."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Inner optimizer; sgd has momentum and needs no second moment."""
    sgd_momentum: Momentum = 0.9
    """sgd: share of the last update that is kept."""


CodecName = Literal["none", "bf16", "int8", "int4", "nf4", "e3m0", "low_rank"]
GatherCodecName = Literal["none", "bf16", "int8", "int4", "nf4", "e3m0"]


class OuterConfig(Section):
    method: Literal["diloco", "data_parallel", "none"] = "diloco"
    """diloco; data_parallel: gradients averaged over the WAN in every inner step (the baseline); none:
    islands that never meet. With the last two the other leaves of this section go back to their defaults
    (data_parallel keeps `island_weights`), so that a baseline is one override away."""
    sync_interval: PositiveInt = 30
    """H: inner steps between two syncs of the same fragment."""
    num_fragments: PositiveInt = 1
    """P: parts of the model that sync in turn, one every H/P inner steps."""
    fragment_pattern: Literal["strided", "sequential"] = "strided"
    """Layers of fragment p: p, p+P, p+2P ... (strided) or neighbours (sequential)."""
    overlap_delay: NonNegativeInt = 0
    """tau: inner steps from the start of a sync to its application; 0 = blocking, at most H/P."""
    delay_mode: Literal["blocking", "streaming", "delayed_keep", "eager", "delayed_reset"] | None = None
    """How weights take up the result of a sync. Default: blocking for tau = 0, streaming for 0 < tau < H/P,
    delayed_keep for tau = H/P."""
    mixing_alpha: Fraction = 0.0
    """streaming: weight of the local value when a result is applied; 0 = take the global value."""
    codec: CodecName = "none"
    """Encoding of pseudo-gradients on the WAN; none = fp32."""
    codec_block_size: Annotated[int, Field(ge=8, le=4096)] = 64
    """Values that share one scale; a multiple of 8."""
    gather_codec: GatherCodecName | None = None
    """Codec of averaged values on their way back, with three islands and more; default: same as codec, int4
    for low_rank."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of quantised values; stochastic is right on average."""
    codec_rank: PositiveInt = 32
    """low_rank: initial rank r_1."""
    adaptive_rank: bool = False
    """low_rank: follow the effective rank of the averaged pseudo-gradient (DiLoCoX)."""
    adaptive_interval: bool = False
    """low_rank: scale sync_interval with the rank (DiLoCoX)."""
    error_feedback: bool = False
    """Add what the codec lost in the last message of a rank to its next one."""
    outer_optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """Optimizer of the anchors: SGD with Nesterov or with plain momentum."""
    outer_lr: PositiveFloat | None = None
    """Learning rate of the anchors. Default: by delay mode, see `config.defaults.OUTER_DEFAULTS`."""
    outer_momentum: Momentum | None = None
    """Momentum of the anchors. Default: by delay mode, 0 for sgd."""
    island_weights: Literal["uniform", "by_tokens"] = "uniform"
    """Weight of each island in the mean: equal, or its tokens since the last sync."""
    aggregation: Literal["mean"] = "mean"
    """Rule that combines the islands' pseudo-gradients: their weighted mean."""
    outlier_factor: NonNegativeFloat = 10.0
    """Abstain from a sync if the norm of the own pseudo-gradient exceeds this times its running median; 0 =
    off."""


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
    """Longest wait for one operation of a sync, in seconds; other timeouts are derived from it."""
    min_islands: PositiveInt = 1
    """Fewest islands that a sync is committed with."""
    grace_s: PositiveFloat = 30.0
    """Seconds that a quorum waits for islands that are alive but late."""
    streams: Annotated[int, Field(ge=1, le=64)] = 1
    """Parallel TCP connections per pair of ranks."""
    join_timeout_s: PositiveFloat = 3600.0
    """Seconds that a starting island waits for the others."""


class CheckpointConfig(Section):
    save: str | None = None
    """Folder of the checkpoints; default: checkpoints/ in the run folder."""
    save_interval: PositiveInt | None = None
    """Inner steps between two checkpoints; default: only at the end or when stopped."""
    save_retain: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    load: str | None = None
    """Folder of checkpoints to start from; default: `save` when `--resume` is given."""


class LoggingConfig(Section):
    log_interval: PositiveInt = 10
    """Inner steps between two log lines of the training loss."""
    eval_interval: PositiveInt | None = None
    """Inner steps between two validations on the anchor; default: first and last only."""
    eval_iters: NonNegativeInt = 8
    """Global batches per validation; 0 = a run without validation."""
    tensorboard: bool = False
    """Write event files for TensorBoard, which needs the package tensorboard."""
    wandb: bool = False
    """Send curves to Weights & Biases, which needs the package wandb."""
    wandb_project: str = "dilocox"
    """Project in Weights & Biases."""


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
