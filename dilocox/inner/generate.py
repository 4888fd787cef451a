"""Text from the model as it is, for a look at what it has learned (level 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from dilocox.data.tokenizer import Tokenizer
from dilocox.inner.names import unwrap
from dilocox.inner.step import Inner
from dilocox.topology import Coordinate


@torch.no_grad()
def generate(
    inner: Inner, tokenizer: Tokenizer, prompt: str, *, num_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """Continues a prompt by sampling; equal seeds give equal text.

    Each token is a whole forward pass, with no cache: meant for tens of tokens.

    Collective: all ranks of the island.

    Args:
        num_tokens: to generate at most; an end of document ends the text.
        temperature: divides the logits; 0 takes the most probable token.

    Returns:
        The continuation, without the prompt, on all ranks.
    """
    end = tokenizer.eod
    start = tokenizer.encode(prompt) or [0 if end is None else end]
    generator = torch.Generator().manual_seed(seed)
    ids = list(start)
    inner.model.eval()
    while len(ids) < len(start) + num_tokens:
        logits = _next_logits(inner, ids)
        chosen = _choose(logits, tokenizer.vocab_size, temperature, generator)
        token = _tell_all(inner, chosen)
        if token == end:
            break
        ids.append(token)
    inner.model.train()
    return tokenizer.decode(ids[len(start) :])


def _next_logits(inner: Inner, ids: Sequence[int]) -> Tensor | None:
    """Logits (padded vocabulary) of the token after `ids`; None where this rank has no last stage.

    The input is padded to the sequence length that the pipeline expects; attention is causal, so the
    padding behind the text changes nothing.
    """
    length = unwrap(inner.model).max_sequence_length
    window = list(ids[-length:])
    tokens = torch.zeros(1, length, dtype=torch.int64)
    tokens[0, : len(window)] = torch.tensor(window)
    outputs: list[Tensor] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter([tokens]),
        model=[inner.model],
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not outputs:
        return None
    own = outputs[0][0, len(window) - 1].float()  # this rank's share of the vocabulary
    whole: Tensor = gather_from_tensor_model_parallel_region(own)
    return whole.cpu()


def _forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
    tokens = next(batches).to(torch.cuda.current_device())
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return model(tokens, positions, None), _as_it_is


def _as_it_is(output: Tensor, non_loss_data: bool) -> Tensor:
    return output


def _choose(logits: Tensor | None, vocab_size: int, temperature: float, generator: torch.Generator) -> int:
    if logits is None:
        return 0
    logits = logits[:vocab_size]  # the rows behind it are padding
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _tell_all(inner: Inner, token: int) -> int:
    """What the last stage of the first model copy chose."""
    island = inner.island
    source = island.topology.rank(Coordinate(pp=island.topology.pp - 1, tp=0, dp=0))
    chosen = torch.tensor(token)
    dist.broadcast(chosen, group_src=source, group=island.control_group)
    return int(chosen)
