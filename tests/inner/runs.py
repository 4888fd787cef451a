"""Small islands for the tests of level 1: configuration, synthetic batches, and building both on a rank."""

import torch

from dilocox.backend import Island, choose_backend, init_island
from dilocox.config.schema import Config
from dilocox.topology import Topology

VOCAB_SIZE = 61  # not a multiple of anything: the embedding has padding rows
LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2, "ranks_per_island": 2},
    "PP2": {"pipeline_model_parallel_size": 2, "ranks_per_island": 2},
    "DP2": {"ranks_per_island": 2},
    "TP2xPP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "ranks_per_island": 4},
    "TP2 distributed optimizer": {
        "tensor_model_parallel_size": 2,
        "ranks_per_island": 2,
        "use_distributed_optimizer": True,
    },
    "TP2xDP2 distributed optimizer": {
        "tensor_model_parallel_size": 2,
        "ranks_per_island": 4,
        "use_distributed_optimizer": True,
    },
    "PP2xDP2 distributed optimizer": {
        "pipeline_model_parallel_size": 2,
        "ranks_per_island": 4,
        "use_distributed_optimizer": True,
    },
}
DP2_DISTRIBUTED = {"ranks_per_island": 2, "use_distributed_optimizer": True}


def make_config(*, parallel=None, model=None, inner=None, seed=1):
    """A resolved configuration of a model with about 20,000 parameters, grouped queries, tied embedding."""
    return Config.model_validate(
        {
            "run": {"device": "cpu", "seed": seed},
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "kv_channels": 8,
                "seq_length": 16,
                "make_vocab_size_divisible_by": 32,
            }
            | (model or {}),
            "parallel": parallel or {},
            "inner": {
                "train_iters": 20,
                "lr_decay_iters": 20,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "lr": 1e-2,
                "lr_warmup_iters": 2,
            }
            | (inner or {}),
        }
    )


def join_island(rank: int, config: Config) -> Island:
    return init_island(
        choose_backend("cpu"), Topology.from_config(config.parallel), rank=rank, run=config.run
    )


def make_inner(config: Config, island: Island):
    from dilocox.inner.model import build_model
    from dilocox.inner.step import Inner

    return Inner(config, island, build_model(config, island, vocab_size=VOCAB_SIZE))


def make_masters(inner):
    from dilocox.inner.masters import MasterWeights

    return MasterWeights(inner.island, inner.model, inner.optimizer)


def make_batch(config: Config, island: Island, step: int):
    """Microbatches of this rank: noisy counting sequences with about a tenth of the tokens masked."""
    generator = torch.Generator().manual_seed(step)
    sequences, length = config.inner.global_batch_size, config.model.seq_length
    starts = torch.randint(0, VOCAB_SIZE, (sequences, 1), generator=generator)
    text = (starts + 7 * torch.arange(length + 1)) % VOCAB_SIZE
    noise = torch.randint(0, VOCAB_SIZE, text.shape, generator=generator)
    text = torch.where(torch.rand(text.shape, generator=generator) < 0.2, noise, text)
    mask = (torch.rand((sequences, length), generator=generator) < 0.9).float()
    share = sequences // island.topology.dp
    first = island.coordinate.dp * share
    size = config.inner.micro_batch_size
    return [
        {
            "tokens": text[i : i + size, :-1].contiguous(),
            "labels": text[i : i + size, 1:].contiguous(),
            "loss_mask": mask[i : i + size],
            "position_ids": torch.arange(length).expand(size, length).contiguous(),
        }
        for i in range(first, first + share, size)
    ]


def train(inner, config: Config, steps: range):
    """(lm_loss, grad_norm, lr) of each step."""
    reports = [inner.step(make_batch(config, inner.island, step)) for step in steps]
    losses, _ = inner.mean_losses(reports)
    return [(loss, report.grad_norm, report.lr) for loss, report in zip(losses, reports, strict=True)]
