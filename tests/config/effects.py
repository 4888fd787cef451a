"""For each leaf of the configuration: another legal value, and where its effect is seen.

A leaf that is added without an entry here fails `test_every_leaf.py`; so does one that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dilocox.config.schema import Config
from tests.config import observers as see

TRAINED, WHOLE_RUN, LONELY = "trained", "whole run", "lonely"
"""Observers that take all their cases at once, because processes are expensive."""


@dataclass(frozen=True)
class Effect:
    """A value that changes what an observer sees.

    Attributes:
        value: as after `section.leaf=`.
        seen: the observer.
        base: overrides under which the leaf has an effect.
        old: the value before, where the base file's is not another one.
    """

    value: str
    seen: Callable[[Config], object] | str
    base: tuple[str, ...] = ()
    old: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A value that is refused on this machine, or for want of another setting.

    Attributes:
        field: named by the error; default: the leaf itself.
    """

    value: str
    base: tuple[str, ...] = ()
    field: str | None = None


BASE = """
run: {device: cpu, output_dir: FOLDER/runs}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 16,
        make_vocab_size_divisible_by: 32}
data: {data_path: FOLDER/a, tokenizer_type: NullTokenizer, vocab_size: 61, split: '50,50,0'}
inner: {train_iters: 8, micro_batch_size: 1, global_batch_size: 4, lr: 0.01}
outer: {sync_interval: 4}
logging: {eval_iters: 1, log_interval: 100}
"""
TWO_RANKS = ("parallel.ranks_per_island=2",)
TP2 = (*TWO_RANKS, "parallel.tensor_model_parallel_size=2")
GPU = ("run.device=cuda",)
FULL = (*GPU, "parallel.recompute_granularity=full")
WSD = ("inner.lr_decay_style=WSD", "inner.lr_wsd_decay_iters=7", "inner.min_lr=0.001")
SGD = ("inner.optimizer=sgd",)
P2 = ("outer.num_fragments=2",)
INT4 = ("outer.codec=int4",)
LOW_RANK = ("outer.codec=low_rank", "outer.codec_rank=8")
ADAPTIVE = (*LOW_RANK, "outer.adaptive_rank=true")
THREE = ("parallel.num_islands=3",)
SENTENCEPIECE = ("data.tokenizer_type=SentencePieceTokenizer", "data.vocab_size=null")
ALONE = ("parallel.num_islands=1",)
WAITING = ("wan.timeout_s=1", "wan.grace_s=1", "wan.join_timeout_s=1", "parallel.num_islands=2")
MEETING = ("wan.lighthouse=http://10.0.0.1:29510",)

EFFECTS: dict[str, Effect | Refusal] = {
    "run.name": Effect("other", see.paths),
    "run.seed": Effect("7", TRAINED),
    "run.device": Effect("cuda", see.device),
    "run.output_dir": Effect("elsewhere", see.paths),
    "run.exit_interval": Effect("5", see.stops),
    "run.exit_duration_in_mins": Effect("1e-9", see.stops),
    "run.threads_per_rank": Effect("77", see.launched),
    "model.num_layers": Effect("4", TRAINED),
    "model.hidden_size": Effect("64", TRAINED),
    "model.ffn_hidden_size": Effect("48", TRAINED),
    "model.num_attention_heads": Effect("2", TRAINED),
    "model.num_query_groups": Effect("2", TRAINED),
    "model.kv_channels": Effect("16", TRAINED),
    "model.seq_length": Effect("8", TRAINED),
    "model.position_embedding_type": Effect("learned_absolute", TRAINED),
    "model.rotary_base": Effect("100", TRAINED),
    "model.normalization": Effect("LayerNorm", TRAINED),
    "model.norm_epsilon": Effect("0.1", TRAINED),
    "model.swiglu": Effect("false", TRAINED),
    "model.qk_layernorm": Effect("true", TRAINED),
    "model.add_bias_linear": Effect("true", TRAINED),
    "model.untie_embeddings_and_output_weights": Effect("true", TRAINED),
    "model.init_method_std": Effect("0.1", TRAINED),
    "model.attention_dropout": Effect("0.5", TRAINED),
    "model.hidden_dropout": Effect("0.5", TRAINED),
    "model.transformer_impl": Refusal("transformer_engine"),
    "model.params_dtype": Effect("bf16", see.megatron, GPU),
    "model.make_vocab_size_divisible_by": Effect("128", see.planned),
    "parallel.num_islands": Effect("3", see.planned),
    "parallel.ranks_per_island": Effect("2", see.planned),
    "parallel.nodes_per_island": Effect("2", see.planned, TWO_RANKS),
    "parallel.tensor_model_parallel_size": Effect("2", see.planned, TWO_RANKS),
    "parallel.pipeline_model_parallel_size": Effect("2", see.planned, TWO_RANKS),
    "parallel.use_distributed_optimizer": Effect("true", see.planned, TWO_RANKS),
    "parallel.sequence_parallel": Effect("true", see.megatron, (*GPU, *TP2)),
    "parallel.recompute_granularity": Effect("selective", see.megatron, GPU),
    "parallel.recompute_method": Effect("block", see.megatron, FULL),
    "parallel.recompute_num_layers": Effect("2", see.megatron, FULL),
    "data.data_path": Effect("FOLDER/b", see.samples),
    "data.split": Effect("60,40,0", see.samples),
    "data.tokenizer_type": Refusal("HuggingFaceTokenizer", field="data.tokenizer_model"),
    "data.tokenizer_model": Effect("FOLDER/b.model", see.samples, SENTENCEPIECE, old="FOLDER/a.model"),
    "data.vocab_size": Effect("200", see.planned),
    "data.data_cache_path": Effect("elsewhere", see.paths),
    "data.island_data": Effect(
        "[FOLDER/b, FOLDER/a]", see.samples, ("data.data_path=stdlib",), old="[FOLDER/a, FOLDER/b]"
    ),
    "inner.train_iters": Effect("12", TRAINED),
    "inner.micro_batch_size": Effect("2", see.samples),
    "inner.global_batch_size": Effect("8", TRAINED),
    "inner.lr": Effect("0.02", TRAINED),
    "inner.min_lr": Effect("0.005", TRAINED),
    "inner.lr_decay_style": Effect("linear", TRAINED),
    "inner.lr_decay_iters": Effect("4", TRAINED),
    "inner.lr_warmup_iters": Effect("3", TRAINED),
    "inner.lr_wsd_decay_style": Effect("linear", TRAINED, WSD),
    "inner.lr_wsd_decay_iters": Effect("8", TRAINED, ("inner.lr_decay_style=WSD",), old="5"),
    "inner.weight_decay": Effect("0.9", TRAINED),
    "inner.adam_beta1": Effect("0.5", TRAINED),
    "inner.adam_beta2": Effect("0.5", TRAINED),
    "inner.adam_eps": Effect("0.1", TRAINED),
    "inner.clip_grad": Effect("0.001", TRAINED, SGD),
    "inner.optimizer": Effect("sgd", TRAINED),
    "inner.sgd_momentum": Effect("0.1", TRAINED, SGD),
    "outer.method": Effect("data_parallel", see.planned),
    "outer.sync_interval": Effect("8", see.planned),
    "outer.num_fragments": Effect("2", see.planned),
    "outer.fragment_pattern": Effect("sequential", see.planned, (*P2, "model.num_layers=4")),
    "outer.overlap_delay": Effect("2", see.planned),
    "outer.delay_mode": Effect("eager", see.planned, ("outer.overlap_delay=4",)),
    "outer.mixing_alpha": Effect("0.5", see.synced, ("outer.overlap_delay=2",)),
    "outer.codec": Effect("int8", see.synced),
    "outer.codec_block_size": Effect("16", see.synced, INT4),
    "outer.gather_codec": Effect("int8", see.synced, (*INT4, *THREE)),
    "outer.rounding": Effect("stochastic", see.synced, INT4),
    "outer.codec_rank": Effect("4", see.synced, LOW_RANK),
    "outer.adaptive_rank": Effect("true", see.synced, LOW_RANK),
    "outer.adaptive_interval": Effect("true", see.synced, ADAPTIVE),
    "outer.error_feedback": Effect("true", see.synced, INT4),
    "outer.outer_optimizer": Effect("sgd", see.synced, ("outer.outer_lr=0.5", "outer.outer_momentum=0.5")),
    "outer.outer_lr": Effect("0.5", see.synced),
    "outer.outer_momentum": Effect("0.1", see.synced),
    "outer.island_weights": Effect("by_tokens", see.synced),
    "outer.aggregation": Refusal("median"),  # the mean is the only rule there is
    "outer.outlier_factor": Effect("0", see.synced),
    "wan.lighthouse": Effect("http://10.0.0.1:29510", see.launched),
    "wan.interface": Effect("eth1", see.network, MEETING),
    "wan.advertise_address": Effect("10.9.9.9", see.network, MEETING),
    "wan.port_range": Effect("29710-29719", see.network, MEETING),
    "wan.timeout_s": Effect("3", LONELY, WAITING),
    "wan.min_islands": Effect("2", see.launched),
    "wan.grace_s": Effect("7", see.launched),
    "wan.streams": Effect("4", see.examined),
    "wan.join_timeout_s": Effect("3", LONELY, (*WAITING, "wan.min_islands=2")),
    "checkpoint.save": Effect("elsewhere", see.paths),
    "checkpoint.save_interval": Effect("3", WHOLE_RUN, ALONE),
    "checkpoint.save_retain": Effect("1", WHOLE_RUN, (*ALONE, "checkpoint.save_interval=3")),
    "checkpoint.load": Effect("elsewhere", see.paths),
    "logging.log_interval": Effect("2", WHOLE_RUN, ALONE),
    "logging.eval_interval": Effect("3", WHOLE_RUN, ALONE),
    "logging.eval_iters": Effect("0", WHOLE_RUN, ALONE),
    "logging.tensorboard": Effect("true", see.services),
    "logging.wandb": Effect("true", see.services),
    "logging.wandb_project": Effect("mine", see.services, ("logging.wandb=true",)),
}
