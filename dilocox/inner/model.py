"""Configuration to megatron-core `GPTModel`, wrapped for half precision and data parallelism."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from torch.nn import functional

from dilocox.backend import Backend, Island
from dilocox.config.schema import Config, ModelConfig
from dilocox.errors import ConfigError, ModelError
from dilocox.inner.initial_weights import initialise
from dilocox.inner.names import named_global_parameters
from dilocox.shapes import padded_vocab_size, stage_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(config: Config, island: Island, *, vocab_size: int) -> DistributedDataParallel:
    """Builds this rank's part of the model with initial weights that are equal for every layout.

    Collective: all ranks of the island.

    Args:
        config: resolved configuration (no None among the sizes of the model).
        vocab_size: of the tokenizer, before padding.

    Raises:
        ModelError: what megatron-core built is not what the configuration says.
    """
    last_stage = island.topology.pp - 1
    gpt = GPTModel(
        config=transformer_config(config, island.backend),
        transformer_layer_spec=_layer_spec(config.model, island.backend),
        vocab_size=padded_vocab_size(
            vocab_size,
            divisible_by=config.model.make_vocab_size_divisible_by,
            tp=island.topology.tp,
        ),
        max_sequence_length=config.model.seq_length,
        pre_process=island.coordinate.pp == 0,
        post_process=island.coordinate.pp == last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
        rotary_base=config.model.rotary_base,
    ).to(island.backend.device)
    check_built(gpt, config, vocab_size=vocab_size, pp_rank=island.coordinate.pp)
    initialise(
        gpt,
        config.model,
        seed=config.run.seed,
        tp_rank=island.coordinate.tp,
        tp_size=island.topology.tp,
    )
    return _wrap(gpt, config, island)


def check_built(gpt: nn.Module, config: Config, *, vocab_size: int, pp_rank: int) -> None:
    """Compares a built stage with the formula of `shapes`: no layer, head or token may be missing silently.

    Raises:
        ModelError: names the first parameter that differs, with what was built and what was expected.
    """
    expected = {
        parameter.name: parameter.shape_on_rank(config.parallel.tensor_model_parallel_size)
        for parameter in stage_parameters(
            config.model, config.parallel, vocab_size=vocab_size, pp_rank=pp_rank
        )
    }
    built = {name: tuple(parameter.shape) for name, parameter in named_global_parameters(gpt).items()}
    for name in sorted(expected.keys() | built.keys()):
        if built.get(name) != expected.get(name):
            raise ModelError(
                f"stage {pp_rank}, {name}: megatron-core built {built.get(name)}, "
                f"the configuration says {expected.get(name)}"
            )


def transformer_config(config: Config, backend: Backend) -> TransformerConfig:
    """Returns Megatron's description of the network and of how it runs."""
    model, parallel = config.model, config.parallel
    dtype = DTYPES[model.params_dtype]
    fused = backend.is_cuda  # the fused functions are compiled, which a CPU host may have no compiler for
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        activation_func=functional.silu if model.swiglu else functional.gelu,
        add_bias_linear=model.add_bias_linear,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        init_method=_leave_to_initial_weights,
        output_layer_init_method=_leave_to_initial_weights,
        embedding_init_method=_leave_to_initial_weights,
        use_cpu_initialization=not backend.is_cuda,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.params_dtype == "bf16",
        fp16=model.params_dtype == "fp16",
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True,  # the gradient is the mean over tokens, however they are batched
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        **_recompute(config),
    )


def _leave_to_initial_weights(weight: Tensor) -> Tensor:
    # `perform_initialization=False` would do, but then Megatron does not mark what is tensor parallel.
    return weight


def _recompute(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    if parallel.recompute_granularity != "full":
        return {"recompute_granularity": parallel.recompute_granularity}
    return {
        "recompute_granularity": "full",
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
    }


def check_layers(model: ModelConfig, backend: Backend) -> None:
    """Checks that the layers asked for can be built here; needs no process group.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed.
    """
    if model.transformer_impl == "transformer_engine" and not _has_transformer_engine(backend):
        raise ConfigError(
            "model.transformer_impl",
            model.transformer_impl,
            "needs a GPU and the package transformer-engine; use auto or local",
        )


def _has_transformer_engine(backend: Backend) -> bool:
    return backend.is_cuda and importlib.util.find_spec("transformer_engine") is not None


def _layer_spec(model: ModelConfig, backend: Backend) -> Any:
    if _has_transformer_engine(backend) and model.transformer_impl != "local":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_layernorm)
    return get_gpt_layer_local_spec(qk_layernorm=model.qk_layernorm, normalization=model.normalization)


def _wrap(gpt: Any, config: Config, island: Island) -> DistributedDataParallel:
    network = gpt.config
    module = gpt if config.model.params_dtype == "fp32" else Float16Module(network, gpt)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=island.backend.is_cuda and island.topology.dp > 1,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    model = DistributedDataParallel(network, ddp_config, module)
    network.no_sync_func = model.no_sync
    return model
