"""Which parameters a model has, stage by stage, worked out from the configuration. No torch here.

This is the formula that the built megatron-core model is checked against, and what `plan` counts with. Names
are those of megatron-core's GPTModel with local layers, and *global* layer numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from dilocox.config.schema import ModelConfig, ParallelConfig

Role = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the model.

    Attributes:
        name: for example `decoder.layers.7.mlp.linear_fc1.weight`.
        shape: of the whole parameter, before tensor parallel ranks split it.
        split_dim: dimension that tensor parallel ranks split; None = each of them has all of it.
        role: part of the model; final norm and output layer are `head`.
        layer: global layer number for role `layer`, else None.
        tied_copy: the last stage's copy of a tied embedding, which is no parameter of its own.
    """

    name: str
    shape: tuple[int, ...]
    split_dim: int | None
    role: Role
    layer: int | None = None
    tied_copy: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shape_on_rank(self, tp: int) -> tuple[int, ...]:
        """Shape on each of `tp` tensor parallel ranks."""
        return tuple(size // tp if dim == self.split_dim else size for dim, size in enumerate(self.shape))


def stage_layers(num_layers: int, *, pp_size: int, pp_rank: int) -> range:
    """Global numbers of the layers of a pipeline stage."""
    per_stage = num_layers // pp_size
    return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tp: int) -> int:
    """Rows of the embedding: Megatron pads them so that tensor parallel ranks get equal, aligned shares."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def stage_parameters(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, pp_rank: int
) -> list[ParameterShape]:
    """The parameters of one pipeline stage, whole (not yet split by tensor parallelism).

    Args:
        model: resolved.
        vocab_size: of the tokenizer, before padding.
    """
    pp_size = parallel.pipeline_model_parallel_size
    rows = padded_vocab_size(
        vocab_size,
        divisible_by=model.make_vocab_size_divisible_by,
        tp=parallel.tensor_model_parallel_size,
    )
    parameters: list[ParameterShape] = []
    if pp_rank == 0:
        parameters += _embedding(model, rows)
    for layer in stage_layers(model.num_layers, pp_size=pp_size, pp_rank=pp_rank):
        parameters += _layer(model, layer)
    if pp_rank == pp_size - 1:
        parameters += _head(model, rows, alone=pp_size == 1)
    return parameters


def all_parameters(model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int) -> list[ParameterShape]:
    """Every parameter of the model once, in the order of the stages."""
    return [
        parameter
        for pp_rank in range(parallel.pipeline_model_parallel_size)
        for parameter in stage_parameters(model, parallel, vocab_size=vocab_size, pp_rank=pp_rank)
        if not parameter.tied_copy
    ]


def count_parameters(model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int) -> int:
    """Number of the model's parameters: a tied embedding counts once, its padding rows count."""
    return sum(parameter.numel for parameter in all_parameters(model, parallel, vocab_size=vocab_size))


def _embedding(model: ModelConfig, rows: int) -> Iterator[ParameterShape]:
    hidden = model.hidden_size
    yield ParameterShape("embedding.word_embeddings.weight", (rows, hidden), 0, "embedding")
    if model.position_embedding_type == "learned_absolute":
        shape = (model.seq_length, hidden)
        yield ParameterShape("embedding.position_embeddings.weight", shape, None, "embedding")


def _layer(model: ModelConfig, layer: int) -> Iterator[ParameterShape]:
    assert model.num_query_groups and model.kv_channels and model.ffn_hidden_size
    hidden, channels, ffn = model.hidden_size, model.kv_channels, model.ffn_hidden_size
    query = model.num_attention_heads * channels
    key_value = 2 * model.num_query_groups * channels
    first = f"decoder.layers.{layer}."

    def norm(name: str, size: int) -> Iterator[ParameterShape]:
        for leaf in _norm_leaves(model):
            yield ParameterShape(f"{first}{name}.{leaf}", (size,), None, "layer", layer)

    def linear(name: str, rows: int, columns: int, split_dim: int) -> Iterator[ParameterShape]:
        yield ParameterShape(f"{first}{name}.weight", (rows, columns), split_dim, "layer", layer)
        if (
            model.add_bias_linear
        ):  # a row parallel layer adds its bias after the reduction: every rank has all of it
            bias_split = 0 if split_dim == 0 else None
            yield ParameterShape(f"{first}{name}.bias", (rows,), bias_split, "layer", layer)

    yield from norm("input_layernorm", hidden)
    yield from linear("self_attention.linear_proj", hidden, query, 1)
    yield from linear("self_attention.linear_qkv", query + key_value, hidden, 0)
    if model.qk_layernorm:
        yield from norm("self_attention.q_layernorm", channels)
        yield from norm("self_attention.k_layernorm", channels)
    yield from norm("pre_mlp_layernorm", hidden)
    yield from linear("mlp.linear_fc1", 2 * ffn if model.swiglu else ffn, hidden, 0)
    yield from linear("mlp.linear_fc2", hidden, ffn, 1)


def _head(model: ModelConfig, rows: int, *, alone: bool) -> Iterator[ParameterShape]:
    """`alone`: the only stage, where a tied output layer uses the embedding itself."""
    hidden = model.hidden_size
    for leaf in _norm_leaves(model):
        yield ParameterShape(f"decoder.final_layernorm.{leaf}", (hidden,), None, "head")
    tied = not model.untie_embeddings_and_output_weights
    if not (tied and alone):
        yield ParameterShape("output_layer.weight", (rows, hidden), 0, "head", tied_copy=tied)


def _norm_leaves(model: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
