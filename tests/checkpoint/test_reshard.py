"""A checkpoint of one layout continues under any other: equal bits of both levels, and the same training."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dilocox.param_shard import ShardState
from tests.distributed.forkserver import run_ranks
from tests.inner.runs import VOCAB_SIZE, join_island, make_config, make_inner, make_masters, train

LAYOUTS = {
    "one rank": {},
    "TP2": {"tensor_model_parallel_size": 2, "ranks_per_island": 2},
    "PP2": {"pipeline_model_parallel_size": 2, "ranks_per_island": 2},
    "DP2": {"ranks_per_island": 2},
    "DP2 distributed": {"ranks_per_island": 2, "use_distributed_optimizer": True},
    "TP2xPP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "ranks_per_island": 4},
    "PP2xDP2 distributed": {
        "pipeline_model_parallel_size": 2,
        "ranks_per_island": 4,
        "use_distributed_optimizer": True,
    },
}
MODELS = {
    "swiglu, tied": {},
    "gelu, untied, biases": {
        "swiglu": False,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
    },
    "swiglu, untied, biases": {"untie_embeddings_and_output_weights": True, "add_bias_linear": True},
}
TRAINED = 6
CONTINUED = 3


def _state(inner):
    from dilocox.checkpoint.store import TrainState

    return TrainState(make_masters(inner), inner.optimizer, inner.scheduler)


def _checkpoints(folder, inner, config):
    from dilocox.checkpoint.store import Checkpoints

    return Checkpoints(Path(folder), inner.island, config=config, vocab_size=VOCAB_SIZE)


def _outer(masters):
    """Three kinds, each another function of what the shards hold; momentum of the second layer alone."""
    kinds = {"anchor": {}, "optimizer_momentum_buffer": {}, "residual": {}}
    for shard in masters.shards:
        kinds["anchor"][shard.name] = shard.tensor * 1.5
        kinds["residual"][shard.name] = shard.tensor.square()
        if shard.layer == 1:
            kinds["optimizer_momentum_buffer"][shard.name] = -shard.tensor
    return ShardState(kinds, common={"outer_step": 3}, layout_bound={"basis": torch.ones(2)})


def _gathered(kinds):
    """Every tensor whole and as it lies in global coordinates, from the shards of all ranks."""
    mine = [
        (f"{kind}/{shard.name}", shard.tensor.flatten().clone(), *_where(shard))
        for kind, shards in kinds.items()
        for shard in shards
        if shard.counted
    ]
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    whole, filled = {}, {}
    for key, values, shape, offsets, block, start in (part for parts in everything for part in parts):
        places = torch.arange(torch.Size(shape).numel()).view(shape)
        slices = tuple(slice(first, first + size) for first, size in zip(offsets, block, strict=True))
        where = places[slices].flatten()[start : start + len(values)]
        whole.setdefault(key, torch.zeros(shape)).flatten()[where] = values
        filled.setdefault(key, torch.zeros(shape, dtype=torch.int)).flatten()[where] += 1
    assert all(bool((count == 1).all()) for count in filled.values()), "every element once"
    return whole


def _where(shard):
    return shard.global_shape, shard.offsets, shard.block_shape, shard.start


def _contents(masters, outer):
    from dilocox.checkpoint.placed import place

    kinds = {f"inner.{kind}": shards for kind, shards in masters.owned_state().items()}
    kinds |= {f"outer.{kind}": shards for kind, shards in place(masters.shards, outer).items()}
    return _gathered(kinds)


def _first(rank, config, folder):
    """Trains, saves, and continues."""
    inner = make_inner(config, join_island(rank, config))
    train(inner, config, range(TRAINED))
    masters = make_masters(inner)
    outer = _outer(masters)
    before = _contents(masters, outer)
    _checkpoints(folder, inner, config).save(TRAINED, _state(inner), outer=outer, common={}, retain=1)
    return before, train(inner, config, range(TRAINED, TRAINED + CONTINUED))


def _second(rank, config, source, target):
    """Loads what another layout has saved, saves it again for a third, and continues."""
    inner = make_inner(config, join_island(rank, config))
    train(inner, config, range(50, 52))  # whatever was there before is replaced
    loaded = _checkpoints(source, inner, config).load(_state(inner))
    masters = make_masters(inner)
    after = _contents(masters, loaded.outer)
    assert inner.optimizer.num_steps == (
        TRAINED if config.inner.optimizer == "adam" else 0
    )  # sgd counts none
    assert loaded.outer.common == {"outer_step": 3}
    assert loaded.outer.layout_bound == {} and loaded.layout_changed is not None
    _checkpoints(target, inner, config).save(TRAINED, _state(inner), outer=loaded.outer, common={}, retain=1)
    streams = torch.get_rng_state()
    return after, train(inner, config, range(TRAINED, TRAINED + CONTINUED)), loaded.layout_changed, streams


def _config(layout, model="swiglu, tied", **sections):
    return make_config(parallel=LAYOUTS[layout], model=MODELS[model], **sections)


def _run(fn, config, *args):
    return run_ranks(fn, config.parallel.ranks_per_island, config, *args)


def _assert_equal(mine, other):
    assert mine.keys() == other.keys()
    assert [key for key in mine if not torch.equal(mine[key], other[key])] == []


def _check_chain(layouts, folder, model="swiglu, tied", **sections):
    """Saves under the first layout and hands the checkpoint on from each layout to the next."""
    results = _run(_first, _config(layouts[0], model, **sections), str(folder / "0"))
    contents, steps = results[0]
    for index, layout in enumerate(layouts[1:]):
        folders = str(folder / str(index)), str(folder / str(index + 1))
        for after, continued, changed, _ in _run(_second, _config(layout, model, **sections), *folders):
            _assert_equal(after, contents)
            for mine, reference in zip(continued, steps, strict=True):
                assert mine[0] == pytest.approx(reference[0], abs=1e-5), layout
            assert changed.startswith("layout changed from TP") and " to TP" in changed
    return contents, steps


def test_from_tp2_through_all_layouts_and_back(tmp_path):
    _check_chain(["TP2", "PP2", "DP2", "DP2 distributed", "PP2xDP2 distributed", "TP2"], tmp_path)


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("gelu, untied, biases", ["TP2xPP2", "DP2 distributed", "TP2"]),
        ("swiglu, untied, biases", ["TP2", "PP2"]),
    ],
)
def test_other_models(model, layouts, tmp_path):
    _check_chain(layouts, tmp_path, model)


def test_sgd(tmp_path):
    sgd = {"optimizer": "sgd", "lr": 0.1}
    contents, _ = _check_chain(["DP2", "PP2"], tmp_path, inner=sgd)
    assert {key.partition("/")[0] for key in contents} >= {"inner.master", "inner.momentum_buffer"}


def test_what_is_compared_is_not_trivial(tmp_path):
    results = _run(_first, _config("TP2"), str(tmp_path))
    contents, _ = results[0]
    kinds = {key.partition("/")[0] for key in contents}
    assert kinds == {
        "inner.master", "inner.exp_avg", "inner.exp_avg_sq",
        "outer.anchor", "outer.optimizer_momentum_buffer", "outer.residual",
    }  # fmt: skip
    assert all(bool(values.count_nonzero() > 0) for values in contents.values())
    fc1 = contents["outer.anchor/decoder.layers.0.mlp.linear_fc1.weight"]
    assert fc1.shape == (2, 64, 32), "gate and value"
    (alone,) = _run(_first, _config("one rank"), str(tmp_path / "alone"))
    for key, values in contents.items():  # the places are those of the model that one rank has
        torch.testing.assert_close(values, alone[0][key], rtol=1e-3, atol=1e-4, msg=key)


def test_random_streams_begin_anew_in_the_same_way_each_time(tmp_path):
    results = _run(_first, _config("TP2"), str(tmp_path / "0"))
    assert len(results) == 2
    streams = [
        _run(_second, _config("PP2"), str(tmp_path / "0"), str(tmp_path / name))[0][3] for name in "ab"
    ]
    assert torch.equal(*streams)


def _padding(rank, config, source, target):
    """Loads a checkpoint whose embedding has other padding rows."""
    inner = make_inner(config, join_island(rank, config))
    initial = _contents(make_masters(inner), ShardState())
    loaded = _checkpoints(source, inner, config).load(_state(inner))
    masters = make_masters(inner)
    _checkpoints(target, inner, config).save(TRAINED, _state(inner), outer=loaded.outer, common={}, retain=1)
    return initial, _contents(masters, loaded.outer)


def test_padding_rows_of_the_vocabulary_follow_the_tensor_parallel_size(tmp_path):
    """61 tokens: 64 rows on one rank, 128 with TP2 where Megatron pads to multiples of 64 * TP."""
    few, many = (make_config(parallel=LAYOUTS[name], model={"make_vocab_size_divisible_by": 64})
                 for name in ("PP2", "TP2"))  # fmt: skip
    before, _ = _run(_first, few, str(tmp_path / "few"))[0]
    initial, grown = _run(_padding, many, str(tmp_path / "few"), str(tmp_path / "many"))[0]
    _, back = _run(_padding, few, str(tmp_path / "many"), str(tmp_path / "back"))[0]
    _assert_equal(back, before)
    name = "embedding.word_embeddings.weight"
    for key, values in before.items():
        assert torch.equal(grown[key][: len(values)], values)
    added = {kind: grown[f"{kind}/{name}"][64:] for kind in ("inner.master", "outer.anchor", "inner.exp_avg")}
    assert added["inner.master"].shape == (64, 32)
    assert torch.equal(added["inner.master"], initial[f"inner.master/{name}"][64:])
    assert torch.equal(added["outer.anchor"], initial[f"inner.master/{name}"][64:])
    assert not added["inner.exp_avg"].any()
