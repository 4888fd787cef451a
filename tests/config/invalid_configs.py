"""The table of invalid configurations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Invalid:
    """One invalid configuration.

    Attributes:
        text: of the YAML file.
        field, value: what the message must name.
        rule: what else the message must say.
        overrides: `--set` values.
    """

    name: str
    text: str
    field: str
    value: str
    rule: tuple[str, ...]
    overrides: tuple[str, ...] = ()


def _case(name, text, field, value, *rule):
    return Invalid(name, text, field, value, rule)


def _set(name, override, field, value, *rule):
    return Invalid(name, "", field, value, rule, (override,))


FILES = [
    _case("not-yaml", "run: {name: [", "CONFIG", "FILE", "is not valid YAML", "line 1"),
    _case("not-a-mapping", "- run\n- model", "CONFIG", "FILE", "must be a mapping of sections"),
    _case("key-twice", "inner: {lr: 1.0, lr: 2.0}", "CONFIG", "FILE", "'lr' is there twice"),
    _case("section-no-mapping", "inner: 3", "inner", "3", "must be a mapping"),
    _case("unknown-section", "inne: {lr: 1.0}", "inne", "lr", "unknown key", "did you mean inner?"),
    _case(
        "unknown-key",
        "outer: {sync_intervall: 3}",
        "outer.sync_intervall",
        "3",
        "did you mean sync_interval?",
    ),
    _case("unknown-key-far-off", "wan: {zzz: 3}", "wan.zzz", "3", "unknown key", "choose one of lighthouse"),
    _set("override-without-equals", "inner.lr", "--set", "inner.lr", "must be section.leaf=value"),
    _set("override-without-leaf", "inner=3", "--set", "inner=3", "must be section.leaf=value"),
    _set("override-unknown-key", "inner.learning_rat=3", "inner.learning_rat", "3", "unknown key"),
    _set("override-not-yaml", "inner.lr={", "inner.lr", "{", "is not valid YAML"),
    _set(
        "override-unfilled-template",
        "inner.lr={{LR}}",
        "inner.lr",
        "{{LR}}",
        "put text with braces in",
    ),
    _set("path-with-unset-variable", "run.output_dir=$NOT_SET/runs", "run.output_dir", "$NOT", "is not set"),
    _set(
        "path-of-unknown-user",
        "checkpoint.save=~nosuchuser/x",
        "checkpoint.save",
        "~no",
        "without home folder",
    ),
    Invalid("override-into-no-mapping", "inner: 3", "inner", "3", ("must be a mapping",), ("inner.lr=1",)),
]

LEAVES = [
    _case("text-for-number", "inner: {lr: fast}", "inner.lr", "'fast'", "must be a valid number"),
    _case(
        "fraction-for-count", "model: {num_layers: 2.5}", "model.num_layers", "2.5", "must be a valid integer"
    ),
    _case("text-for-bool", "model: {swiglu: 'yes'}", "model.swiglu", "'yes'", "must be a valid boolean"),
    _case("number-for-text", "run: {name: 2024}", "run.name", "2024", "must be a valid string", "in quotes"),
    _case("number-is-nan", "inner: {lr: .nan}", "inner.lr", "nan", "must be"),
    _case("number-is-inf", "wan: {timeout_s: .inf}", "wan.timeout_s", "inf", "must be a finite number"),
    _case("zero-layers", "model: {num_layers: 0}", "model.num_layers", "0", "greater than or equal to 1"),
    _case("negative-lr", "inner: {lr: -1.0}", "inner.lr", "-1.0", "greater than 0"),
    _case(
        "alpha-over-1", "outer: {mixing_alpha: 1.5}", "outer.mixing_alpha", "1.5", "less than or equal to 1"
    ),
    _case("outer-momentum-1", "outer: {outer_momentum: 1.0}", "outer.outer_momentum", "1.0", "less than 1"),
    _case("run-name-too-long", f"run: {{name: {'n' * 300}}}", "run.name", "nnn", "at most 200 characters"),
    _case("run-name-with-slash", "run: {name: a/b}", "run.name", "'a/b'", "must match pattern"),
    _case("unknown-codec", "outer: {codec: int5}", "outer.codec", "'int5'", "'nf4'", "did you mean int"),
    _case("unknown-method", "outer: {method: fedavg}", "outer.method", "'fedavg'", "'diloco'"),
    _case("unknown-device", "run: {device: tpu}", "run.device", "'tpu'", "'auto', 'cpu' or 'cuda'"),
    _case(
        "block-size-small", "outer: {codec: int4, codec_block_size: 4}", "outer.codec_block_size", "4", "to 8"
    ),
    _case("streams-0", "wan: {streams: 0}", "wan.streams", "0", "greater than or equal to 1"),
    _case("port-range-words", "wan: {port_range: any}", "wan.port_range", "'any'", "must match pattern"),
    _case("data-path-mapping", "data: {data_path: {a: 1}}", "data.data_path", "{'a': 1}", "must be"),
]

ISLAND = [
    _case(
        "ranks-for-tp-pp",
        "parallel: {ranks_per_island: 6, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}",
        "parallel.ranks_per_island",
        "6",
        "must be a multiple of tensor_model_parallel_size * pipeline_model_parallel_size (4)",
        "use 4 or 8",
    ),
    _case(
        "ranks-for-nodes",
        "parallel: {ranks_per_island: 4, nodes_per_island: 3}",
        "parallel.ranks_per_island",
        "4",
        "nodes_per_island (3)",
        "use 3 or 6",
    ),
    _case(
        "layers-for-pp",
        "model: {num_layers: 5}\nparallel: {ranks_per_island: 2, pipeline_model_parallel_size: 2}",
        "model.num_layers",
        "5",
        "pipeline_model_parallel_size (2)",
        "use 4 or 6",
    ),
    _case(
        "ffn-for-tp",
        "model: {ffn_hidden_size: 99}\nparallel: {ranks_per_island: 2, tensor_model_parallel_size: 2}",
        "model.ffn_hidden_size",
        "99",
        "tensor_model_parallel_size (2)",
        "use 98 or 100",
    ),
    _case(
        "heads-for-tp",
        "model: {num_attention_heads: 2}\nparallel: {ranks_per_island: 4, tensor_model_parallel_size: 4}",
        "model.num_attention_heads",
        "2",
        "tensor_model_parallel_size (4)",
        "use 4",
    ),
    _case(
        "groups-for-heads",
        "model: {num_query_groups: 3}",
        "model.num_query_groups",
        "3",
        "must divide num_attention_heads (4)",
    ),
    _case(
        "groups-for-tp",
        "model: {num_query_groups: 1}\nparallel: {ranks_per_island: 2, tensor_model_parallel_size: 2}",
        "model.num_query_groups",
        "1",
        "tensor_model_parallel_size (2)",
    ),
    _case(
        "hidden-for-heads",
        "model: {hidden_size: 130}",
        "model.hidden_size",
        "130",
        "must be a multiple of num_attention_heads (4)",
    ),
    _case(
        "odd-head-with-rope", "model: {kv_channels: 33}", "model.kv_channels", "33", "must be even", "use 34"
    ),
    _case(
        "bf16-on-cpu",
        "run: {device: cpu}\nmodel: {params_dtype: bf16}",
        "model.params_dtype",
        "'bf16'",
        "run.device cpu trains in fp32 only",
    ),
    _case(
        "fp16-on-cpu",
        "run: {device: cpu}\nmodel: {params_dtype: fp16}",
        "model.params_dtype",
        "'fp16'",
        "run.device cpu trains in fp32 only",
    ),
    _case(
        "transformer-engine-on-cpu",
        "run: {device: cpu}\nmodel: {transformer_impl: transformer_engine}",
        "model.transformer_impl",
        "'transformer_engine'",
        "needs a GPU",
    ),
    _case(
        "sequence-parallel-without-tp",
        "parallel: {sequence_parallel: true}",
        "parallel.sequence_parallel",
        "True",
        "needs tensor_model_parallel_size > 1",
    ),
    _case(
        "sequence-parallel-on-cpu",
        "run: {device: cpu}\n"
        "parallel: {ranks_per_island: 2, tensor_model_parallel_size: 2, sequence_parallel: true}",
        "parallel.sequence_parallel",
        "True",
        "needs the norms of Transformer Engine",
    ),
    _case(
        "sequence-parallel-uneven",
        "model: {seq_length: 127}\n"
        "parallel: {ranks_per_island: 2, tensor_model_parallel_size: 2, sequence_parallel: true}",
        "model.seq_length",
        "127",
        "because sequence_parallel splits the sequence",
        "use 126 or 128",
    ),
    _case(
        "recompute-layers-without-full",
        "parallel: {recompute_num_layers: 2}",
        "parallel.recompute_num_layers",
        "2",
        "has no effect unless recompute_granularity is full",
    ),
    _case(
        "recompute-more-layers-than-there-are",
        "parallel: {recompute_granularity: full, recompute_num_layers: 5}",
        "parallel.recompute_num_layers",
        "5",
        "a pipeline stage has 4 layers",
    ),
    _case(
        "rotary-base-without-rope",
        "model: {position_embedding_type: learned_absolute, rotary_base: 500000}",
        "model.rotary_base",
        "500000",
        "has no effect unless position_embedding_type is rope",
    ),
    _case("dropout-1", "model: {hidden_dropout: 1.0}", "model.hidden_dropout", "1.0", "must be under 1"),
]

DATA = [
    _case(
        "null-tokenizer-without-size",
        "data: {data_path: x, tokenizer_type: NullTokenizer}",
        "data.vocab_size",
        "None",
        "NullTokenizer needs it",
    ),
    _case(
        "null-tokenizer-with-model",
        "data: {data_path: x, tokenizer_type: NullTokenizer, vocab_size: 9, tokenizer_model: m}",
        "data.tokenizer_model",
        "'m'",
        "has no effect with tokenizer_type NullTokenizer",
    ),
    _case(
        "null-tokenizer-on-text",
        "data: {tokenizer_type: NullTokenizer, vocab_size: 9}",
        "data.tokenizer_type",
        "NullTokenizer",
        "is text, which NullTokenizer cannot read",
    ),
    _case(
        "tokenizer-file-missing",
        "data: {data_path: x}",
        "data.tokenizer_model",
        "None",
        "SentencePieceTokenizer needs its file",
    ),
    _case(
        "huggingface-file-missing",
        "data: {tokenizer_type: HuggingFaceTokenizer}",
        "data.tokenizer_model",
        "None",
        "HuggingFaceTokenizer needs its file",
    ),
    _case("data-path-empty", "data: {data_path: ''}", "data.data_path", "''", "must not be empty"),
    _case("blend-empty", "data: {data_path: []}", "data.data_path", "[]", "a blend is [weight, prefix"),
    _case("blend-without-weights", "data: {data_path: [a, b]}", "data.data_path", "['a', 'b']", "a blend is"),
    _case("blend-odd", "data: {data_path: [1, a, 2]}", "data.data_path", "[1.0, 'a', 2.0]", "a blend is"),
    _case(
        "blend-weight-0", "data: {data_path: [0, a]}", "data.data_path", "[0.0, 'a']", "with weights over 0"
    ),
    _case("blend-with-stdlib", "data: {data_path: [1, stdlib]}", "data.data_path", "stdlib", "a blend is"),
    _case(
        "island-data-count",
        "data: {island_data: [a, b, c], tokenizer_model: m}",
        "data.island_data",
        "['a', 'b', 'c']",
        "has 3 entries for parallel.num_islands = 2",
    ),
    _case(
        "island-data-beside-data-path",
        "data: {data_path: x, island_data: [a, b], tokenizer_model: m}",
        "data.data_path",
        "'x'",
        "has no effect beside island_data",
    ),
    _case(
        "island-data-stdlib",
        "data: {island_data: [a, stdlib], tokenizer_model: m}",
        "data.island_data[1]",
        "'stdlib'",
        "must be a prefix",
    ),
    _case("split-words", "data: {split: most}", "data.split", "'most'", "must be three shares"),
    _case("split-two", "data: {split: '90,10'}", "data.split", "'90,10'", "must be three shares"),
    _case("split-no-training", "data: {split: '0,1,0'}", "data.split", "'0,1,0'", "train must be over 0"),
    _case("split-no-validation", "data: {split: '1,0,0'}", "data.split", "'1,0,0'", "eval_iters: 0"),
]

INNER = [
    _case(
        "batch-for-dp",
        "parallel: {ranks_per_island: 2}\ninner: {micro_batch_size: 2, global_batch_size: 6}",
        "inner.global_batch_size",
        "6",
        "must be a multiple of micro_batch_size * data parallel size (4)",
        "use 4 or 8",
    ),
    _case(
        "min-lr",
        "inner: {lr: 1e-3, min_lr: 1e-2}",
        "inner.min_lr",
        "0.01",
        "must be at most inner.lr (0.001)",
    ),
    _case(
        "warmup-too-long",
        "inner: {train_iters: 50, lr_warmup_iters: 50}\nouter: {sync_interval: 10}",
        "inner.lr_warmup_iters",
        "50",
        "must end before train_iters",
    ),
    _case(
        "warmup-beyond-decay",
        "inner: {lr_decay_iters: 10, lr_warmup_iters: 20}",
        "inner.lr_warmup_iters",
        "20",
        "lr_decay_iters (10)",
    ),
    _case(
        "constant-with-min-lr",
        "inner: {lr_decay_style: constant, min_lr: 1e-5}",
        "inner.min_lr",
        "1e-05",
        "has no effect with lr_decay_style constant",
    ),
    _case(
        "constant-with-decay-iters",
        "inner: {lr_decay_style: constant, lr_decay_iters: 7}",
        "inner.lr_decay_iters",
        "7",
        "has no effect with lr_decay_style constant",
    ),
    _case(
        "wsd-without-decay",
        "inner: {lr_decay_style: WSD}",
        "inner.lr_wsd_decay_iters",
        "None",
        "WSD needs a final decay",
    ),
    _case(
        "wsd-decay-too-long",
        "inner: {lr_decay_style: WSD, lr_warmup_iters: 50, lr_wsd_decay_iters: 51}",
        "inner.lr_wsd_decay_iters",
        "51",
        "set it to 1 to 50",
    ),
    _case(
        "wsd-decay-without-wsd",
        "inner: {lr_wsd_decay_iters: 10}",
        "inner.lr_wsd_decay_iters",
        "10",
        "has no effect unless lr_decay_style is WSD",
    ),
    _case(
        "wsd-decay-after-the-end",
        "inner: {lr_decay_style: WSD, train_iters: 50, lr_decay_iters: 80, lr_wsd_decay_iters: 30}",
        "inner.lr_wsd_decay_iters",
        "30",
        "the final decay begins at step 50",
    ),
    _case(
        "sgd-momentum-with-adam",
        "inner: {sgd_momentum: 0.5}",
        "inner.sgd_momentum",
        "0.5",
        "has no effect with optimizer adam",
    ),
    _case(
        "adam-betas-with-sgd",
        "inner: {optimizer: sgd, adam_beta2: 0.99}",
        "inner.adam_beta2",
        "0.99",
        "has no effect with optimizer sgd",
    ),
    _case(
        "sgd-with-distributed-optimizer",
        "inner: {optimizer: sgd}\nparallel: {use_distributed_optimizer: true}",
        "inner.optimizer",
        "'sgd'",
        "distributed optimizer knows only adam",
    ),
]

OUTER = [
    _case(
        "interval-for-fragments",
        "outer: {sync_interval: 30, num_fragments: 4}",
        "outer.sync_interval",
        "30",
        "must be a multiple of num_fragments (4)",
        "use 28 or 32",
    ),
    _case(
        "interval-shorter-than-fragments",
        "outer: {sync_interval: 3, num_fragments: 4}",
        "outer.sync_interval",
        "3",
        "use 4",
    ),
    _case(
        "more-fragments-than-layers",
        "outer: {num_fragments: 5}",
        "outer.num_fragments",
        "5",
        "a pipeline stage has 4 layers",
    ),
    _case(
        "more-fragments-than-layers-of-a-stage",
        "outer: {num_fragments: 3}\nparallel: {ranks_per_island: 2, pipeline_model_parallel_size: 2}",
        "outer.num_fragments",
        "3",
        "a pipeline stage has 2 layers",
    ),
    _case(
        "interval-beyond-the-end",
        "outer: {sync_interval: 200}",
        "outer.sync_interval",
        "200",
        "the run ends before the first sync",
    ),
    _case(
        "delay-too-long",
        "outer: {sync_interval: 20, num_fragments: 4, overlap_delay: 6}",
        "outer.overlap_delay",
        "6",
        "must be at most sync_interval / num_fragments (5)",
    ),
    _case(
        "blocking-with-delay",
        "outer: {overlap_delay: 3, delay_mode: blocking}",
        "outer.delay_mode",
        "'blocking'",
        "needs an overlap_delay = 0, not 3",
    ),
    _case(
        "streaming-without-delay",
        "outer: {delay_mode: streaming}",
        "outer.delay_mode",
        "'streaming'",
        "needs an overlap_delay of 1 to 29, not 0",
    ),
    _case(
        "streaming-with-the-whole-interval",
        "outer: {delay_mode: streaming, overlap_delay: 30}",
        "outer.delay_mode",
        "'streaming'",
        "not 30",
    ),
    _case(
        "delayed-keep-with-a-short-delay",
        "outer: {delay_mode: delayed_keep, overlap_delay: 3}",
        "outer.delay_mode",
        "'delayed_keep'",
        "needs an overlap_delay = 30",
    ),
    _case(
        "eager-with-fragments",
        "outer: {delay_mode: eager, num_fragments: 2, overlap_delay: 15}",
        "outer.delay_mode",
        "'eager'",
        "works on the whole model",
    ),
    _case(
        "alpha-without-streaming",
        "outer: {mixing_alpha: 0.25}",
        "outer.mixing_alpha",
        "0.25",
        "has no effect unless delay_mode is streaming",
    ),
    _case(
        "alpha-1",
        "outer: {overlap_delay: 3, mixing_alpha: 1.0}",
        "outer.mixing_alpha",
        "1.0",
        "keeps the local value for ever",
    ),
    _case(
        "error-feedback-without-codec",
        "outer: {error_feedback: true}",
        "outer.error_feedback",
        "True",
        "has no effect with codec none",
    ),
    _case(
        "rounding-without-codec",
        "outer: {rounding: stochastic}",
        "outer.rounding",
        "'stochastic'",
        "has no effect with codec none",
    ),
    _case(
        "blocks-with-bf16",
        "outer: {codec: bf16, codec_block_size: 128}",
        "outer.codec_block_size",
        "128",
        "has no effect with codec bf16",
    ),
    _case(
        "stochastic-rounding-with-bf16",
        "outer: {codec: bf16, rounding: stochastic}",
        "outer.rounding",
        "'stochastic'",
        "has no effect with codec bf16",
    ),
    _case(
        "pattern-with-one-fragment",
        "outer: {fragment_pattern: sequential}",
        "outer.fragment_pattern",
        "'sequential'",
        "has no effect with num_fragments 1",
    ),
    _case(
        "block-size-no-multiple-of-8",
        "outer: {codec: int4, codec_block_size: 60}",
        "outer.codec_block_size",
        "60",
        "use 56 or 64",
    ),
    _case(
        "gather-codec-for-two",
        "outer: {codec: int4, gather_codec: int8}",
        "outer.gather_codec",
        "'int8'",
        "there is no gather half with parallel.num_islands = 2",
    ),
    _case(
        "rank-without-low-rank",
        "outer: {codec: int4, codec_rank: 8}",
        "outer.codec_rank",
        "8",
        "has no effect unless codec is low_rank",
    ),
    _case(
        "adaptive-rank-without-low-rank",
        "outer: {codec: int4, adaptive_rank: true}",
        "outer.adaptive_rank",
        "True",
        "has no effect unless codec is low_rank",
    ),
    _case(
        "adaptive-interval-alone",
        "outer: {codec: low_rank, adaptive_interval: true}",
        "outer.adaptive_interval",
        "True",
        "follows the adaptive rank",
    ),
    _case(
        "low-rank-on-shards",
        "outer: {codec: low_rank}\nparallel: {use_distributed_optimizer: true}",
        "outer.codec",
        "'low_rank'",
        "needs whole matrices",
    ),
    _case(
        "rank-too-high",
        "outer: {codec: low_rank, codec_rank: 128}",
        "outer.codec_rank",
        "128",
        "must be under model.hidden_size (128)",
    ),
    _case(
        "outlier-factor-under-1",
        "outer: {outlier_factor: 0.5}",
        "outer.outlier_factor",
        "0.5",
        "at 1 or less ordinary norms are outliers",
    ),
]

WAN = [
    _case("min-islands", "wan: {min_islands: 3}", "wan.min_islands", "3", "at most parallel.num_islands (2)"),
    _case(
        "grace-longer-than-join",
        "wan: {grace_s: 20, join_timeout_s: 10}",
        "wan.grace_s",
        "20",
        "must be at most wan.join_timeout_s (10.0)",
    ),
    _case(
        "ports-upside-down",
        "wan: {port_range: 29600-29500}",
        "wan.port_range",
        "'29600-29500'",
        "must be LOW-HIGH",
    ),
    _case("port-too-low", "wan: {port_range: 80-29600}", "wan.port_range", "'80-29600'", "1024 <= LOW"),
    _case("port-too-high", "wan: {port_range: 60000-70000}", "wan.port_range", "'60000-70000'", "65535"),
    _case(
        "lighthouse-without-scheme",
        "wan: {lighthouse: '10.0.0.1:29510'}",
        "wan.lighthouse",
        "10.0.0.1:29510",
        "must be http://HOST:PORT",
    ),
    _case(
        "lighthouse-port-0", "wan: {lighthouse: 'http://h:0'}", "wan.lighthouse", "http://h:0", "HOST:PORT"
    ),
    _case(
        "wandb-project-without-wandb",
        "logging: {wandb_project: mine}",
        "logging.wandb_project",
        "'mine'",
        "has no effect unless wandb is true",
    ),
    _case(
        "eval-interval-without-validation",
        "logging: {eval_iters: 0, eval_interval: 5}",
        "logging.eval_interval",
        "5",
        "has no effect with eval_iters 0",
    ),
]

INVALID = [*FILES, *LEAVES, *ISLAND, *DATA, *INNER, *OUTER, *WAN]
