"""Low rank: exact where it can be, equal on all islands, warm start, error feedback."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

from dilocox.config.schema import OuterConfig
from dilocox.outer.codec.base import CompressorState
from dilocox.outer.codec.error_feedback import ErrorFeedback
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.low_rank import LowRankCompressor, build, orthonormal_rows
from dilocox.param_shard import ParamShard
from tests.outer.codec.building import build_codec
from tests.outer.codec.lockstep import average_in_lockstep

NAMES = ["fc1", "norm", "fc2", "tiny"]
SHAPES = [(96, 64), (64,), (50, 130), (3, 3)]


def islands(count, rank, **options):
    return [LowRankCompressor(NAMES, rank=rank, **options) for _ in range(count)]


def matrices_of_rank(rank, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return [draw(s[0], rank) @ draw(rank, s[1]) if len(s) == 2 else draw(*s) for s in SHAPES]


def exact_mean(inputs):
    return [sum(t.double() for t in parts) / len(inputs) for parts in zip(*inputs, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_exact_when_the_rank_suffices(count):
    inputs = [matrices_of_rank(2, seed) for seed in range(count)]
    results = average_in_lockstep(islands(count, 2 * count), inputs, build_codec("none", 64))
    for got, wanted in zip(results[0].mean, exact_mean(inputs), strict=True):
        assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_own_shares_average_to_the_mean():
    inputs = [matrices_of_rank(40, seed) for seed in range(3)]
    results = average_in_lockstep(islands(3, 8), inputs, build_codec("int4", 64))
    for mean, *own in zip(results[0].mean, *(r.own_decoded for r in results), strict=True):
        assert torch.allclose(sum(own) / 3, mean, rtol=1e-4, atol=1e-5)


def test_own_share_is_of_the_island_alone():
    matrix = torch.outer(torch.randn(96), torch.randn(64))
    inputs = [[matrix], [-0.4 * matrix]]
    results = average_in_lockstep(
        [LowRankCompressor(["m"], rank=4) for _ in range(2)], inputs, build_codec("none", 64)
    )
    for result, (x,) in zip(results, inputs, strict=True):
        assert torch.allclose(result.own_decoded[0], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_equal_bits_on_all_islands_in_every_sync(codec):
    compressors = islands(3, 8, adaptive=True)
    for step in range(6):
        inputs = [matrices_of_rank(30, 10 * step + island) for island in range(3)]
        results = average_in_lockstep(compressors, inputs, build_codec(codec, 64))
        for compressor in compressors:
            compressor.commit()
        for tensors in zip(*(r.mean for r in results), strict=True):
            assert all(torch.equal(tensors[0], other) for other in tensors[1:])
        assert len({c.codec_rank for c in compressors}) == 1


def test_warm_start_finds_the_dominant_directions():
    torch.manual_seed(0)
    spectrum = torch.logspace(0, -3, 64)
    matrix = torch.linalg.qr(torch.randn(96, 64))[0] * spectrum @ torch.linalg.qr(torch.randn(64, 64))[0]
    best = float(torch.linalg.svdvals(matrix)[8:].norm())
    compressor = LowRankCompressor(["m"], rank=8)
    errors = []
    for _ in range(6):
        (result,) = average_in_lockstep([compressor], [[matrix]], build_codec("none", 64))
        compressor.commit()
        errors.append(float((result.mean[0] - matrix).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.01 * best


def test_error_feedback_delivers_everything_in_time():
    inputs = [matrices_of_rank(40, seed) for seed in range(2)]
    compressors = islands(2, 8)
    feedback = [ErrorFeedback(NAMES, inputs[0]) for _ in range(2)]
    applied = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    for _ in range(20):
        sent = [f.compensate(x) for f, x in zip(feedback, inputs, strict=True)]
        results = average_in_lockstep(compressors, sent, build_codec("int4", 64))
        for k in range(2):
            compressors[k].commit()
            feedback[k].commit(sent[k], results[k].own_decoded)
        applied = [a + m for a, m in zip(applied, results[0].mean, strict=True)]
    for i, wanted in enumerate(exact_mean(inputs)):
        residual = sum(f.residual[i] for f in feedback) / 2
        assert torch.allclose(applied[i] + residual, 20 * wanted, rtol=1e-4, atol=1e-2)
        assert (applied[i] - 20 * wanted).norm() < 0.35 * (20 * wanted).norm()


def test_discard_leaves_no_trace():
    inputs = [[t] for t in (torch.randn(96, 64), torch.randn(96, 64))]
    compressor = LowRankCompressor(["m"], rank=4, adaptive=True)
    average_in_lockstep([compressor], [inputs[0]], build_codec("none", 64))
    compressor.commit()
    before = {key: value.clone() for key, value in compressor.state_dict().layout_bound.items()}
    common = compressor.state_dict().common
    average_in_lockstep([compressor], [inputs[1]], build_codec("none", 64))
    compressor.discard()
    compressor.commit()
    after = compressor.state_dict().layout_bound
    assert compressor.state_dict().common == common
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_restored_compressor_goes_on_with_equal_bits():
    first = LowRankCompressor(NAMES, rank=8, adaptive=True)
    codec = build_codec("int4", 64)
    average_in_lockstep([first], [matrices_of_rank(3, 1)], codec)
    first.commit()
    second = LowRankCompressor(NAMES, rank=8, adaptive=True)
    second.load_state_dict(first.state_dict())
    results = [average_in_lockstep([c], [matrices_of_rank(9, 2)], codec)[0] for c in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(results[0].mean, results[1].mean, strict=True))


def test_passes_yield_the_predicted_sizes():
    compressor = LowRankCompressor(NAMES, rank=8, always_dense=["fc2"])
    passes = compressor.passes([torch.randn(s) for s in SHAPES])
    dense = [BlockGrid.of_shape(shape) for shape in SHAPES]
    grids = compressor.pass_grids(SHAPES, dense)
    assert grids == [[BlockGrid(8 * 96, 96), *dense[1:]], [BlockGrid(8 * 64, 64)]]
    first = next(passes)
    assert [t.numel() for t in first] == [grid.numel for grid in grids[0]] == [8 * 96, 64, 50 * 130, 9]


def test_without_its_bases_it_keeps_the_rank_and_starts_anew():
    first = LowRankCompressor(NAMES, rank=8, adaptive=True)
    for step in range(6):
        average_in_lockstep([first], [matrices_of_rank(2, step)], build_codec("none", 64))
        first.commit()
    assert first.codec_rank < 8
    second = LowRankCompressor(NAMES, rank=8, adaptive=True)
    second.load_state_dict(CompressorState(first.state_dict().common))
    assert second.codec_rank == first.codec_rank
    assert second.state_dict().layout_bound == {}


def test_bases_are_seeded_by_name_and_rows():
    """As they always were: another seed would be another run."""
    m = torch.randn(32, 64)
    whole = ParamShard.whole("m", m)
    part = replace(whole, tensor=m[8:], start=8 * 64)
    for shard, key in ((whole, "m"), (part, "m[8:32]")):
        compressor = build(OuterConfig(codec="low_rank", codec_rank=4), [shard])
        first = next(compressor.passes([shard.tensor]))[0]
        basis = orthonormal_rows(torch.zeros(4, 64), zlib.crc32(key.encode()))
        assert torch.equal(first, basis @ shard.tensor.T)


def test_zero_matrices_and_rank_above_the_data_are_fine():
    compressor = LowRankCompressor(["zero", "one"], rank=8)
    inputs = [torch.zeros(96, 64), torch.outer(torch.randn(96), torch.randn(64))]
    (result,) = average_in_lockstep([compressor], [inputs], build_codec("int4", 64))
    compressor.commit()
    assert torch.equal(result.mean[0], torch.zeros(96, 64))
    assert (result.mean[1] - inputs[1]).norm() < 0.2 * inputs[1].norm()
    assert all(basis.isfinite().all() for basis in compressor.state_dict().layout_bound.values())


@pytest.mark.parametrize("rank", [1, 5, 32])
def test_orthonormal_rows_refill_what_is_dependent(rank):
    torch.manual_seed(rank)
    rows = torch.randn(rank, 40)
    rows[rank // 2] = rows[0]
    rows[-1] = 0
    basis = orthonormal_rows(rows, seed=7)
    assert torch.allclose(basis @ basis.T, torch.eye(rank), atol=1e-6)
    assert torch.equal(basis, orthonormal_rows(rows, seed=7))
    if rank > 1:
        assert torch.allclose(basis[0], rows[0] / rows[0].norm(), atol=1e-6)
