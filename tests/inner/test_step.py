"""One island trains the same whatever its layout, and the report tells what happened."""

import functools
import math

import pytest
import torch
import torch.distributed as dist

from tests.distributed.forkserver import run_ranks
from tests.inner.runs import LAYOUTS, join_island, make_batch, make_config, make_inner, train

STEPS = range(20)


def _losses(rank, config):
    island = join_island(rank, config)
    inner = make_inner(config, island)
    steps = train(inner, config, STEPS)
    batches = [make_batch(config, island, step) for step in (1000, 1001)]
    return steps, inner.evaluate(batches), train(inner, config, range(20, 21))


@functools.cache
def losses_of_one_rank(**inner):
    (result,) = run_ranks(_losses, 1, make_config(inner=inner))
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_losses_of_one_rank(layout):
    config = make_config(parallel=LAYOUTS[layout])
    results = run_ranks(_losses, config.parallel.ranks_per_island, config)
    steps, validation, after = losses_of_one_rank()
    assert all(result == results[0] for result in results), "all ranks report the same"
    for mine, reference in zip(results[0][0] + results[0][2], steps + after, strict=True):
        assert mine == pytest.approx(reference, rel=1e-5)
    assert results[0][1] == pytest.approx(validation, rel=1e-5)
    assert steps[-1][0] < steps[0][0] - 0.5, "it has learned something"


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_microbatches_do_not_change_the_step(micro_batch_size):
    steps, _, _ = losses_of_one_rank(micro_batch_size=micro_batch_size)
    for mine, reference in zip(steps, losses_of_one_rank()[0], strict=True):
        assert mine == pytest.approx(reference, rel=1e-5)


def test_sgd_gives_the_losses_of_one_rank():
    inner = {"optimizer": "sgd", "lr": 0.5}
    config = make_config(parallel=LAYOUTS["PP2"], inner=inner)
    results = run_ranks(_losses, 2, config)
    for mine, reference in zip(results[0][0], losses_of_one_rank(**inner)[0], strict=True):
        assert mine == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize(
    ("style", "last_lr"), [("constant", 1e-2), ("linear", 1e-2 / 18), ("cosine", 7.6e-5), ("WSD", 1.06e-3)]
)
def test_learning_rate_warms_up_and_decays(style, last_lr):
    steps, _, _ = losses_of_one_rank(lr_decay_style=style, lr_wsd_decay_iters=5)
    lrs = [lr for _, _, lr in steps]
    assert lrs[:3] == pytest.approx([0.0, 5e-3, 1e-2]), "Megatron's warm-up starts from zero"
    assert lrs[14] == 1e-2 or style in ("linear", "cosine")
    assert lrs[19] == pytest.approx(last_lr, rel=0.01)


def test_the_same_seed_repeats_bit_for_bit_and_another_one_differs():
    again = run_ranks(_losses, 1, make_config())[0]
    assert again == losses_of_one_rank()
    other = run_ranks(_losses, 1, make_config(seed=2))[0]
    assert all(mine[0] != reference[0] for mine, reference in zip(other[0], again[0], strict=True))


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_nothing(granularity):
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    parallel = {"recompute_granularity": granularity}
    plain = run_ranks(_losses, 1, make_config(model=dropout))[0]
    assert run_ranks(_losses, 1, make_config(model=dropout, parallel=parallel))[0] == plain
    assert plain != losses_of_one_rank(), "dropout is on"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "model",
    [
        {"untie_embeddings_and_output_weights": True},
        {"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False, "num_query_groups": 4},
        {"position_embedding_type": "learned_absolute", "qk_layernorm": True},
    ],
    ids=["untied", "GPT-2 like", "qk norm"],
)
def test_other_architectures_give_the_losses_of_one_rank(model):
    config = make_config(model=model, parallel=LAYOUTS["TP2xPP2"])
    reference = run_ranks(_losses, 1, make_config(model=model))[0]
    for mine, other in zip(run_ranks(_losses, 4, config)[0][0], reference[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def _half_precision(rank, config):
    inner = make_inner(config, join_island(rank, config))
    reports = [inner.step(make_batch(config, inner.island, step)) for step in range(40)]
    losses, _ = inner.mean_losses(reports)
    return [(loss, report.skipped) for loss, report in zip(losses, reports, strict=True)]


def test_fp16_lowers_its_loss_scale_until_steps_succeed():
    config = make_config(model={"params_dtype": "fp16"}, inner={"train_iters": 40, "lr_decay_iters": 40})
    reports = run_ranks(_half_precision, 1, config)[0]
    assert reports[0][1], "the first scale is too large on purpose"
    assert not reports[-1][1]
    assert reports[-1][0] < reports[0][0] - 0.3


def test_bf16_trains_close_to_fp32():
    reports = run_ranks(_half_precision, 1, make_config(model={"params_dtype": "bf16"}))[0]
    assert reports[19][0] == pytest.approx(losses_of_one_rank()[0][19][0], rel=0.02)


def _with_hook(rank, config):
    inner = make_inner(config, join_island(rank, config))
    masters = [buffer.numel() for buffer in inner.gradient_buffers()]
    norms = []

    def double():
        for buffer in inner.gradient_buffers():
            buffer.mul_(2.0)

    for step in range(2):
        batch = make_batch(config, inner.island, step)
        norms.append(inner.step(batch, double if step else None).grad_norm)
    plain = train(make_inner(config, inner.island), config, range(2))
    return masters, norms, [norm for _, norm, _ in plain]


@pytest.mark.parametrize("layout", ["TP2xPP2", "PP2xDP2 distributed optimizer"], ids=["whole", "shards"])
def test_what_the_hook_writes_is_what_the_optimizer_sees(layout):
    config = make_config(parallel=LAYOUTS[layout])
    for sizes, norms, plain in run_ranks(_with_hook, 4, config):
        assert norms == pytest.approx([plain[0], 2 * plain[1]], rel=1e-5)
        assert sum(sizes) > 0


def _token_count(rank, config):
    island = join_island(rank, config)
    inner = make_inner(config, island)
    batch = make_batch(config, island, 0)
    mine = sum(float(part["loss_mask"].sum()) for part in batch)
    total = torch.tensor(mine / island.topology.tp / island.topology.pp)
    dist.all_reduce(total)
    report = inner.step(batch)
    for part in batch:
        part["loss_mask"].zero_()
    empty = inner.step(batch)
    return (
        report.num_tokens == int(total),
        report.step_time_s > 0,
        inner.mean_losses([empty])[0],
        math.isfinite(empty.grad_norm),
    )


@pytest.mark.parametrize("layout", ["DP2", "TP2", "PP2"])
def test_masked_tokens_do_not_count_and_a_fully_masked_batch_is_harmless(layout):
    config = make_config(parallel=LAYOUTS[layout])
    assert run_ranks(_token_count, 2, config) == [(True, True, [0.0], True)] * 2
