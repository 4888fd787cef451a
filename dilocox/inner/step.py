"""One optimizer step, and one evaluation, of one island (level 1, fast fabric)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from dilocox.backend import Island
from dilocox.config.schema import Config
from dilocox.inner.names import unwrap
from dilocox.inner.optimizer import build_optimizer, build_scheduler

Microbatch = Mapping[str, Tensor]
"""Sequences of one forward pass, each (micro_batch_size, seq_length), as Megatron's GPT data sets make:
`tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float, weighs the tokens in the loss). The first
pipeline stage needs `tokens` and `position_ids`, the last one `labels` and `loss_mask`, others nothing."""


@dataclass(frozen=True)
class InnerReport:
    """Result of one inner step.

    Attributes:
        loss_sum: this rank's share of the sum of the island's token losses, in nats; scalar, fp64, on the
            device. `Inner.mean_losses` turns the reports of many steps into losses with one collective.
        grad_norm: global norm of the island's gradient before clipping; None in a skipped step.
        lr: learning rate of this step.
        num_tokens: tokens of the island that counted in the loss, equal on all its ranks.
        step_time_s: wall seconds of this step.
        skipped: the weights did not change (fp16 overflow; the loss scale has been lowered).
    """

    loss_sum: Tensor
    grad_norm: float | None
    lr: float
    num_tokens: int
    step_time_s: float
    skipped: bool


class Inner:
    """Level 1 of one island: Megatron's schedule, gradient finalisation, clipping and optimizer.

    Attributes:
        island: this rank's place in its island.
        model: Megatron's `DistributedDataParallel`.
        optimizer: Megatron's optimizer, behind its adapter.
        scheduler: Megatron's `OptimizerParamScheduler`, counted in inner steps.
    """

    def __init__(self, config: Config, island: Island, model: Any) -> None:
        self.model = model
        self.optimizer = build_optimizer(config, model)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.island = island
        self._num_tokens: Tensor | None = None
        network = unwrap(model).config
        network.finalize_model_grads_func = self._finalize
        network.grad_scale_func = self.optimizer.scale_loss
        self._run_schedule = partial(
            get_forward_backward_func(),
            forward_step_func=_forward_step,
            model=[model],
            seq_length=config.model.seq_length,
            micro_batch_size=config.inner.micro_batch_size,
        )

    def step(
        self, microbatches: Sequence[Microbatch], reduce_gradients: Callable[[], None] | None = None
    ) -> InnerReport:
        """Takes one optimizer step on the mean gradient over all tokens of the island's batch.

        Collective: all ranks of the island, each with the microbatches of its data parallel rank.

        Args:
            microbatches: at least one; the same number on all ranks.
            reduce_gradients: called when `gradient_buffers` hold the island's gradient, before clipping.
        """
        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward(microbatches, forward_only=False)
        # After Megatron has summed over the island and before clipping: the norm must be that of the mean.
        if reduce_gradients is not None:
            reduce_gradients()
        lr = self.optimizer.param_groups[0]["lr"]
        succeeded, grad_norm, _ = self.optimizer.step()
        # A skipped step (fp16 overflow) does not move the learning rate, as in Megatron.
        if succeeded:
            self.scheduler.step(1)
        assert self._num_tokens is not None, "Megatron's schedule finalises the gradients in every step"
        return InnerReport(
            loss_sum=self._own_sum(losses)[0],
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=float(lr),
            num_tokens=int(self._num_tokens),
            step_time_s=time.perf_counter() - start,
            skipped=not succeeded,
        )

    def mean_losses(self, reports: Sequence[InnerReport], *votes: float) -> tuple[list[float], list[float]]:
        """Returns mean losses per token (nats) of several steps, and sums of votes.

        The sums are exact, so losses do not depend on how many steps are reduced together: the losses are
        fp32 and the sums fp64, which is exact for 2^29 addends of one magnitude.

        Collective: all ranks of the island, with the same steps and the same number of votes.

        Args:
            reports: of the steps, in order.
            votes: values of this rank.

        Returns:
            The losses, and the sum over the island's ranks of each vote; equal on all ranks.
        """
        device = self.island.backend.device
        own = torch.tensor(votes, dtype=torch.float64, device=device)
        total = torch.cat([torch.stack([report.loss_sum for report in reports]), own]) if reports else own
        dist.all_reduce(total)
        values = total.tolist()
        losses = [
            loss_sum / max(report.num_tokens, 1) for loss_sum, report in zip(values, reports, strict=False)
        ]
        return losses, values[len(reports) :]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Microbatch]]) -> float:
        """Returns the mean loss per token in nats over the island's batches, equal on all its ranks.

        Collective: all ranks of the island.
        """
        self.model.eval()
        losses: list[Tensor] = []
        for microbatches in batches:
            losses += self._forward(microbatches, forward_only=True)
        self.model.train()
        total = self._own_sum(losses)
        dist.all_reduce(total)
        loss_sum, num_tokens = total.tolist()
        return float(loss_sum) / max(int(num_tokens), 1)

    def gradient_buffers(self) -> list[Tensor]:
        """Returns the mean gradient, fp32 and flat; with the distributed optimizer this rank's shards of it.

        In place: what is written here before clipping is what the optimizer sees. Both copies of a tied
        embedding are in it, on the first and on the last stage.
        """
        dp, dp_rank = self.island.topology.dp, self.island.coordinate.dp
        buffers = self.model.buffers
        if not self.model.ddp_config.use_distributed_optimizer:
            return [buffer.grad_data for buffer in buffers]
        return [bucket.grad_data.chunk(dp)[dp_rank] for buffer in buffers for bucket in buffer.buckets]

    def _forward(self, microbatches: Sequence[Microbatch], *, forward_only: bool) -> list[Tensor]:
        losses: list[Tensor] = self._run_schedule(
            data_iterator=iter(microbatches), num_microbatches=len(microbatches), forward_only=forward_only
        )
        return losses

    def _own_sum(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns this rank's share of [loss sum, tokens] over microbatches; fp64, on the device."""
        total = torch.zeros(2, dtype=torch.float64, device=self.island.backend.device)
        if self.island.coordinate.tp == 0:  # the tensor parallel ranks hold equal losses
            for loss in losses:
                total += loss
        return total

    def _finalize(self, model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
        """Runs Megatron's gradient finalisation; keeps `num_tokens`, summed over the island in place."""
        finalize_model_grads(model, num_tokens, **groups)
        self._num_tokens = num_tokens


def _forward_step(batches: Iterator[Microbatch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Megatron's forward function. Returns: output of this stage, and the loss function of the last one.

    Prefetched microbatches are on the device already; then moving them does nothing.
    """
    device = torch.cuda.current_device()
    batch = {name: values.to(device) for name, values in next(batches).items()}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,  # causal attention needs no mask
        labels=batch["labels"] if parallel_state.is_pipeline_last_stage() else None,
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(mask: Tensor | None, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of the token losses, the number of tokens, and both again for the report.

    Args:
        mask, losses: (micro_batch_size, seq_length).
    """
    assert mask is not None, "the last stage reads the loss mask"
    mask = mask.float()
    loss = (losses.float() * mask).sum()
    num_tokens = mask.sum()
    return loss, num_tokens.int(), torch.stack([loss.detach(), num_tokens]).double()
