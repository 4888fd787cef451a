"""The adapter takes whatever Megatron builds, also several optimizers in a chain."""

import pytest
import torch

from dilocox.plan.memory import rank_memory
from dilocox.plan.traffic import Traffic
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import (
    DP2_DISTRIBUTED,
    LAYOUTS,
    VOCAB_SIZE,
    join_island,
    make_config,
    make_inner,
    make_masters,
    train,
)


def _chain(inner, config):
    """Momentum SGD for matrices and AdamW for the rest, chained as Megatron chains Muon and Adam."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from dilocox.inner.optimizer import InnerOptimizer, build_scheduler

    def zeros(optimizer, config=None):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
                optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter.data)

    settings = OptimizerConfig(lr=1e-2, min_lr=0.0, clip_grad=1.0)
    parameters = list(inner.model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    others = [parameter for parameter in parameters if parameter.dim() == 1]
    parts = [
        FP32Optimizer(torch.optim.SGD(matrices, lr=1e-2, momentum=0.9), settings, None),
        FP32Optimizer(torch.optim.AdamW(others, lr=1e-2), settings, zeros),
    ]
    for part in parts:
        part.grad_stats_parallel_group = torch.distributed.group.WORLD
        part.tp_group = torch.distributed.new_group([torch.distributed.get_rank()])
    inner.optimizer = InnerOptimizer(ChainedOptimizer(parts))
    inner.scheduler = build_scheduler(config, inner.optimizer)
    return inner


def _chained(rank, config, folder):
    from dilocox.checkpoint.store import Checkpoints, TrainState
    from dilocox.param_shard import ShardState

    island = join_island(rank, config)
    inner = _chain(make_inner(config, island), config)
    kinds = {
        kind: {shard.name for shard in shards} for kind, shards in make_masters(inner).held_state().items()
    }
    train(inner, config, range(3))
    state = TrainState(make_masters(inner), inner.optimizer, inner.scheduler)
    checkpoints = Checkpoints(folder, island, config=config, vocab_size=VOCAB_SIZE)
    checkpoints.save(3, state, outer=ShardState(), common={}, retain=1)
    expected = train(inner, config, range(3, 5))
    again = _chain(make_inner(config, island), config)
    assert again.optimizer.num_steps == 0
    checkpoints.load(TrainState(make_masters(again), again.optimizer, again.scheduler))
    assert again.optimizer.num_steps == 3
    return kinds, expected, train(again, config, range(3, 5))


def test_a_chain_of_two_optimizers_is_found_saved_and_loaded(tmp_path):
    kinds, expected, again = run_ranks(_chained, 1, make_config(), tmp_path)[0]
    norms = {name for name in kinds["master"] if "norm" in name}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == norms != set()
    assert kinds["momentum_buffer"] == kinds["master"] - norms != set()
    assert again == expected
    assert expected[0][0] > expected[1][0] - 1, "it trains"


def _unknown(rank, config):
    from dilocox.inner.optimizer import InnerOptimizer

    class Strange:
        init_state_fn = None
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    with pytest.raises(TypeError, match="no masters known for Strange"):
        InnerOptimizer(Strange()).masters()


def test_an_unknown_optimizer_is_refused():
    run_ranks(_unknown, 1, make_config())


def _state_bytes(rank, config):
    return make_inner(config, join_island(rank, config)).optimizer.state_bytes()


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": LAYOUTS["PP2"]},
        {"parallel": DP2_DISTRIBUTED, "model": {"params_dtype": "bf16"}},
        {"parallel": LAYOUTS["TP2"], "inner": {"optimizer": "sgd"}},
        {"parallel": LAYOUTS["DP2"], "model": {"params_dtype": "fp16"}, "inner": {"optimizer": "sgd"}},
        {"inner": {"optimizer": "sgd", "sgd_momentum": 0.0}},
    ],
    ids=["Adam PP2", "Adam bf16 shards", "SGD TP2", "SGD fp16 DP2", "SGD without momentum"],
)
def test_state_takes_the_bytes_that_plan_counts(sections):
    config = make_config(**sections)
    counted = run_ranks(_state_bytes, config.parallel.ranks_per_island, config)
    traffic = Traffic(config, VOCAB_SIZE)
    stages = [rank_memory(traffic, pp_rank) for pp_rank in range(traffic.topology.pp)]
    planned = sum(stage.masters + stage.inner_states for stage in stages)
    assert sum(counted) == planned * config.parallel.ranks_per_island // traffic.topology.pp
