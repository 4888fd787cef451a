"""Names of Megatron's parameters that mean the same on every stage and with every layer implementation."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Transformer Engine fuses a norm into the linear layer that follows it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def named_global_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of this stage under global names, in the model's order.

    Layers carry their global number, and fused norms the name that they have in Megatron's local layers:
    `decoder.layers.7.input_layernorm.weight`.

    Args:
        model: a `GPTModel`, wrapped or not.
    """
    gpt = unwrap(model)
    names = {}
    for name, parameter in gpt.named_parameters():
        match = _LOCAL_LAYER.match(name)
        if match:
            layer = gpt.decoder.layers[int(match.group(1))].layer_number - 1
            name = f"decoder.layers.{layer}.{name[match.end() :]}"
        for fused, plain in _FUSED_NORMS.items():
            name = name.replace(fused, plain)
        names[name] = parameter
    return names


def unwrap(model: Any) -> Any:
    """Returns the `GPTModel` inside Megatron's wrappers for data parallelism and half precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def layer_of(name: str) -> int | None:
    """Returns the global layer number of a global parameter name; None outside the layers."""
    match = _LOCAL_LAYER.match(name)
    return int(match.group(1)) if match else None


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether tensor parallel ranks hold different parts of this parameter (not equal copies)."""
    return bool(getattr(parameter, "tensor_model_parallel", False))
