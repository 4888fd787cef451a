"""A fragment's way over the WAN: every codec against an fp64 oracle, its bytes, its state."""

from __future__ import annotations

import warnings
import zlib
from typing import get_args

import pytest
import torch

from dilocox.config.schema import CodecName, OuterConfig
from dilocox.errors import CheckpointError
from dilocox.outer.codec import block_codec
from dilocox.outer.codec.adaptive_rank import WINDOW
from dilocox.outer.codec.compiled import CompiledKernels
from dilocox.outer.codec.registry import CODECS
from dilocox.outer.reduce import fragment_reducer
from dilocox.outer.reduce.aggregate import AGGREGATORS
from dilocox.outer.reduce.all_reduce import all_reduce_mean
from dilocox.outer.reduce.fragment_reducer import FragmentReducer, grid_of
from dilocox.outer.wan.header import SyncId
from dilocox.param_shard import ShardState
from tests.outer.codec.bounds import mean_bound
from tests.outer.codec.building import WIRE_CODECS
from tests.outer.codec.test_kernels import broken_compiler
from tests.outer.reduce.reducers import Islands, exact_mean, outer, random_deltas, whole_shards

SHAPES = [(24, 40), (40,), (3, 7, 16), (37, 12), (1,)]
"""Rows that are and that are not multiples of the block."""


def low_rank_deltas(count, seed):
    """Matrices of rank 1 on each island: rank `count` in the mean."""
    deltas = random_deltas(count, SHAPES, seed)
    for tensors in deltas:
        for i, tensor in enumerate(tensors):
            if tensor.ndim == 2:
                tensors[i] = torch.outer(tensor[:, 0], tensor[0]) * 1e3
    return deltas


def test_the_codecs_of_the_configuration_are_the_registered_ones():
    assert {*get_args(CodecName)} == {*WIRE_CODECS, "low_rank"}
    assert {*get_args(OuterConfig.model_fields["aggregation"].annotation)} == {*AGGREGATORS}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("codec", WIRE_CODECS)
def test_mean_is_within_the_bound_of_the_oracle(codec, count, feedback, rounding):
    config = outer(codec=codec, error_feedback=feedback, codec_block_size=16, rounding=rounding)
    shards = whole_shards(SHAPES)
    islands, weights = Islands(count, config, shards), [1.0 + 2 * k for k in range(count)]
    for step in range(2):
        deltas = random_deltas(count, SHAPES, seed=step)
        sent = [r.compensate(d) for r, d in zip(islands.reducers, deltas, strict=True)]
        held, carried = (islands.held(weights), islands.gather_residual()) if feedback else (None, {})
        predicted = [r.predicted_bytes(count, k) for k, r in enumerate(islands.reducers)]
        results = islands.sync(deltas, step=step, weights=weights)
        assert islands.bytes_sent == predicted
        for i, shard in enumerate(shards):
            mean, bound = mean_bound(
                [(weight, tensors[i]) for weight, tensors in zip(weights, sent, strict=True)],
                names=(codec, codec),
                block_size=16,
                grid=grid_of(shard),
                carried=carried.get(shard.name),
                factor=1 if rounding == "nearest" else 2,
            )
            assert ((results[0].mean[i].reshape(-1).double() - mean).abs() <= bound).all()
        if held is not None:
            true, after = exact_mean(deltas, weights), islands.held(weights)
            for a, h, t, b in zip(results[0].mean, after, true, held, strict=True):
                assert torch.allclose(a + h, t + b, rtol=0, atol=2e-8)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_low_rank_is_near_the_oracle_and_counts_its_bytes(count, feedback, adaptive):
    config = outer(
        codec="low_rank", codec_rank=8, adaptive_rank=adaptive, error_feedback=feedback, codec_block_size=16
    )
    islands = Islands(count, config, whole_shards(SHAPES))
    for step in range(7):
        predicted = [r.predicted_bytes(count, k) for k, r in enumerate(islands.reducers)]
        before = islands.held() if feedback else [torch.zeros(s) for s in SHAPES]
        deltas = low_rank_deltas(count, step)
        results = islands.sync(deltas, step=step)
        assert islands.bytes_sent == predicted
        if adaptive and step >= WINDOW:
            continue  # the rank has followed the last means, not the residuals
        for got, wanted, held in zip(results[0].mean, exact_mean(deltas), before, strict=True):
            assert (got - wanted - held).norm() <= 0.4 * (wanted + held).norm()
    scales = {reducer.interval_scale for reducer in islands.reducers}
    assert len(scales) == 1
    assert (scales.pop() < 1) == adaptive  # a mean of rank 3 in bases of rank 8


def test_every_pass_has_its_own_number_and_seed(monkeypatch):
    """The seed's text is fixed: a sync that is started again must send the same bits."""
    seeds, numbers = [], []

    def reduced(*args, sync, **others):
        numbers.append(sync)
        return all_reduce_mean(*args, sync=sync, **others)

    monkeypatch.setattr(fragment_reducer, "all_reduce_mean", reduced)
    monkeypatch.setattr(block_codec.BlockCodec, "reseed", lambda self, seed: seeds.append(seed))
    islands = Islands(1, outer(codec="low_rank", codec_rank=4), whole_shards(SHAPES))
    islands.sync(random_deltas(1, SHAPES), step=7)
    assert numbers == [SyncId("run", 0, 7, pass_index) for pass_index in (0, 1)]
    texts = [b"run 0 0 7 0", b"run 0 0 7 1"]
    assert seeds == [seed for text in texts for seed in (zlib.crc32(text), zlib.crc32(text, 1))]


def test_low_rank_keeps_no_gather_residual():
    config = outer(codec="low_rank", codec_rank=4, error_feedback=True)
    islands = Islands(3, config, whole_shards(SHAPES))
    islands.sync(random_deltas(3, SHAPES))
    assert set(islands.reducers[0].state_dict().tensors) == {"residual"}


def test_without_codec_nothing_is_lost():
    islands = Islands(3, OuterConfig(codec="none", gather_codec="none"), whole_shards(SHAPES))
    deltas = random_deltas(3, SHAPES)
    for got, wanted in zip(islands.sync(deltas)[0].mean, exact_mean(deltas), strict=True):
        assert torch.allclose(got.double(), wanted, rtol=1e-6, atol=1e-10)
    assert islands.reducers[0].interval_scale is None
    assert islands.reducers[0].state_dict().tensors == {}


def test_a_discarded_sync_leaves_no_trace_and_an_observed_one_no_residual():
    config = outer(codec="int4", error_feedback=True, codec_block_size=16)
    islands = Islands(3, config, whole_shards(SHAPES))
    islands.sync(random_deltas(3, SHAPES, 0), step=0)
    before = islands.held()
    islands.sync(random_deltas(3, SHAPES, 1), step=1, commit=False)
    assert all(torch.equal(a, b) for a, b in zip(before, islands.held(), strict=True))
    own = [t.clone() for t in islands.reducers[1].state_dict().tensors["residual"].values()]
    islands.sync(random_deltas(3, SHAPES, 2), step=2, weights=[1.0, 0.0, 1.0])
    after = islands.reducers[1].state_dict().tensors["residual"].values()
    assert all(torch.equal(a, b) for a, b in zip(own, after, strict=True))


@pytest.mark.parametrize("codec", ["int4", "low_rank"])
def test_a_restored_reducer_continues_with_equal_bits(codec):
    config = outer(codec=codec, codec_rank=4, adaptive_rank=codec == "low_rank", error_feedback=True,
                   codec_block_size=16, rounding="stochastic")  # fmt: skip
    first, second = (Islands(3, config, whole_shards(SHAPES)) for _ in range(2))
    for step in range(6):
        first.sync(random_deltas(3, SHAPES, step), step=step)
    for old, new in zip(first.reducers, second.reducers, strict=True):
        new.load_state_dict(old.state_dict())
    results = [islands.sync(random_deltas(3, SHAPES, 9), step=9) for islands in (first, second)]
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.mean, other.mean, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.own_decoded, other.own_decoded, strict=True))


def test_a_rank_that_owns_nothing_of_a_fragment_continues_from_its_state():
    config = outer(codec="int4", error_feedback=True)
    state = FragmentReducer(config, [], island=0).state_dict()
    state.tensors.clear()  # a checkpoint has no kind without tensors
    FragmentReducer(config, [], island=0).load_state_dict(state)


def test_common_state_is_plain_and_layout_bound_state_alone_is_not_needed():
    config = outer(codec="low_rank", codec_rank=4, adaptive_rank=True, error_feedback=True)
    first, second = (Islands(2, config, whole_shards(SHAPES)) for _ in range(2))
    for step in range(6):
        first.sync(low_rank_deltas(2, step), step=step)
    for old, new in zip(first.reducers, second.reducers, strict=True):
        state = old.state_dict()
        assert state.common == {"compressor": {"rank": pytest.approx(state.common["compressor"]["rank"]),
                                               "window": state.common["compressor"]["window"]}}  # fmt: skip
        new.load_state_dict(ShardState(state.tensors, state.common))
        assert new.interval_scale == old.interval_scale != 1
    assert all(torch.equal(a, b) for a, b in zip(first.held(), second.held(), strict=True))
    second.sync(low_rank_deltas(2, 7), step=7)


def test_a_rank_keeps_its_own_adaptive_rank_though_common_state_is_that_of_rank_0():
    config = outer(codec="low_rank", codec_rank=4, adaptive_rank=True)
    first, other = Islands(2, config, whole_shards(SHAPES)), Islands(2, config, whole_shards(SHAPES))
    for step in range(6):
        first.sync(low_rank_deltas(2, step), step=step)
    state = first.reducers[0].state_dict()
    state.common = other.reducers[0].state_dict().common  # what a checkpoint keeps: rank 0's
    new = FragmentReducer(config, whole_shards(SHAPES), island=0)
    new.load_state_dict(state)
    assert new.interval_scale == first.reducers[0].interval_scale != 1


def test_another_islands_state_clears_the_residuals():
    config = outer(codec="low_rank", codec_rank=4, error_feedback=True)
    islands = Islands(2, config, whole_shards(SHAPES))
    islands.sync(low_rank_deltas(2, 0))
    fresh = FragmentReducer(config, whole_shards(SHAPES), island=2)
    fresh.load_state_dict(islands.reducers[1].state_dict())
    fresh.load_shared_state(islands.reducers[0].shared_state())
    assert not any(t.any() for t in fresh.state_dict().tensors["residual"].values())
    bases = [r.state_dict().layout_bound["compressor"] for r in (fresh, islands.reducers[0])]
    assert bases[0].keys() == bases[1].keys() != set()
    assert all(torch.equal(bases[0][name], bases[1][name]) for name in bases[0])


@pytest.mark.parametrize("kind", ["residual", "gather_residual"])
def test_a_saved_residual_that_does_not_fit_is_refused(kind):
    config = outer(codec="int4", error_feedback=True)
    islands = Islands(3, config, whole_shards(SHAPES))
    islands.sync(random_deltas(3, SHAPES))
    state = islands.reducers[0].state_dict()
    state.tensors[kind] = {**state.tensors[kind], "b": torch.zeros(1)}
    fresh = FragmentReducer(config, whole_shards(SHAPES), island=0)
    with pytest.raises(CheckpointError, match=r"residual of b has shape \(1,\), the shard has \(40,\)"):
        fresh.load_state_dict(state)
    assert not any(t.any() for t in fresh.state_dict().tensors["residual"].values())
    del state.tensors["residual"]
    with pytest.raises(CheckpointError, match="no residual of a is saved"):
        fresh.load_state_dict(state)


def test_the_gather_residual_is_saved_only_once_there_can_be_one():
    config = outer(codec="int4", error_feedback=True)
    islands = Islands(3, config, whole_shards(SHAPES))
    for members, expected in (([0, 1], False), ([0, 1, 2], True), ([0, 1], False)):
        islands.sync(random_deltas(3, SHAPES), members=members)
        for member in members:
            assert ("gather_residual" in islands.reducers[member].state_dict().tensors) == expected


def test_calls_that_run_uncompiled_are_counted(monkeypatch):
    """As on a CUDA host without a working compiler."""
    monkeypatch.setattr(torch, "compile", broken_compiler)
    monkeypatch.setattr(block_codec, "serve_kernels", lambda form, _: CompiledKernels(form, threshold=0))
    islands = Islands(2, outer(codec="int8"), whole_shards([(64, 64)]))
    assert islands.reducers[0].num_fallbacks == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        islands.sync(random_deltas(2, [(64, 64)]))
    assert {str(warning.message).split(":")[0] for warning in caught} == {"codec"}
    assert islands.reducers[0].num_fallbacks == 4  # one message encoded, three decoded


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no codec is called 'zip'"):
        FragmentReducer(outer(codec="zip"), [], island=0)
    assert CODECS.carrier("low_rank") is CODECS.get("int4")
