"""A codec and an aggregation rule from this file alone take part in whole syncs."""

from __future__ import annotations

import pytest
import torch

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.registry import CODECS, CodecEntry
from dilocox.outer.codec.sizes import CastSizes
from dilocox.outer.reduce import fragment_reducer
from dilocox.outer.reduce.aggregate import AGGREGATORS, mean
from tests.outer.reduce.reducers import Islands, exact_mean, outer, random_deltas, whole_shards

SHAPES = [(24, 40), (37, 12), (5,)]


class Signs(Codec):
    """One byte per value: its sign, times 2^-10."""

    def encode_into(self, tensors, grids, message):
        self.check_length(message, grids)
        values = [tensor.reshape(-1) for tensor in tensors]
        message.copy_(torch.cat(values).sign().add(1).to(torch.uint8) if values else message)

    def decode_into(self, message, grids, outputs):
        self.check_length(message, grids)
        parts = message.split([grid.numel for grid in grids])
        for output, part in zip(outputs, parts, strict=True):
            output.view(-1).copy_(part.to(torch.float32).sub(1).mul(2.0**-10))


SIGNS = CodecEntry("signs", 200, CastSizes(1), lambda entry, size, rounding: Signs(entry, size))


def median(contributions):
    """Element by element; weights do not matter."""
    values = [tensors for _, tensors in contributions]
    return [torch.stack(tensors).median(dim=0).values for tensors in zip(*values, strict=True)]


REGISTRIES = {"codecs": CODECS.extended(SIGNS), "aggregators": {**AGGREGATORS, "median": median}}


@pytest.mark.parametrize("count", [2, 3])
def test_a_toy_codec_crosses_and_its_loss_comes_back(count):
    config = outer(codec="signs", error_feedback=True)
    islands = Islands(count, config, whole_shards(SHAPES), **REGISTRIES)
    applied = true = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(5):
        deltas = random_deltas(count, SHAPES, step)
        predicted = [r.predicted_bytes(count, k) for k, r in enumerate(islands.reducers)]
        result = islands.sync(deltas, step=step)[0]
        assert islands.bytes_sent == predicted
        assert {*torch.cat([t.flatten() for t in result.mean]).tolist()} <= {-(2.0**-10), 0.0, 2.0**-10}
        applied = [a + m for a, m in zip(applied, result.mean, strict=True)]
        true = [t + m for t, m in zip(true, exact_mean(deltas), strict=True)]
    for a, held, t in zip(applied, islands.held(), true, strict=True):
        assert torch.allclose(a + held, t, rtol=0, atol=1e-7)


@pytest.mark.parametrize("count", [2, 3])
def test_a_toy_rule_aggregates(count):
    islands = Islands(count, outer(aggregation="median"), whole_shards(SHAPES), **REGISTRIES)
    deltas = random_deltas(count, SHAPES)
    deltas[0] = [tensor + 1e6 for tensor in deltas[0]]  # an island that has diverged
    results = islands.sync(deltas, weights=[1.0 + k for k in range(count)])
    for got, *parts in zip(results[0].mean, *deltas, strict=True):
        assert torch.equal(got, torch.stack(parts).median(dim=0).values)
        assert got.abs().max() < 1


def test_a_run_finds_what_is_added_to_the_shipped_registries(monkeypatch):
    monkeypatch.setattr(fragment_reducer, "CODECS", REGISTRIES["codecs"])
    monkeypatch.setattr(fragment_reducer, "AGGREGATORS", REGISTRIES["aggregators"])
    islands = Islands(3, outer(codec="signs", aggregation="median"), whole_shards(SHAPES))
    assert islands.sync(random_deltas(3, SHAPES))[0].mean[0].abs().max() <= 2.0**-10


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (CodecEntry("int4", 201, CastSizes(1), "x:y"), "a codec name is given twice"),
        (CodecEntry("other", 3, CastSizes(1), "x:y"), "a wire id is given twice"),
        (CodecEntry("other", carrier="zip"), "no codec is called 'zip'"),
        (CodecEntry("other", carrier="low_rank"), "cannot cross in low_rank, which has no wire id"),
    ],
)
def test_an_entry_that_clashes_is_refused(entry, text):
    with pytest.raises(ValueError, match=text):
        CODECS.extended(entry)
    assert "signs" not in CODECS.wire_names()


@pytest.mark.parametrize(
    "arguments",
    [("other",), ("other", 7), ("other", 256, CastSizes(1), "x:y"), ("o", 7, CastSizes(1), "x:y", "int4")],
)
def test_an_entry_that_lacks_something_is_refused(arguments):
    with pytest.raises(ValueError, match="codec 'o"):
        CodecEntry(*arguments)


def test_the_mean_takes_operations_one_by_one_in_order():
    torch.manual_seed(0)
    values = [torch.randn(1000) for _ in range(4)]
    weights = [1.0, 3.0, 1.0, 0.3]
    expected = values[0].clone()
    for weight, value in zip(weights[1:], values[1:], strict=True):
        expected += value * weight if weight != 1 else value
    expected *= 1.0 / sum(weights)
    (got,) = mean([(w, [v.clone()]) for w, v in zip(weights, values, strict=True)])
    assert torch.equal(got, expected)
    assert mean([(1.0, []), (2.0, [])]) == []


def test_the_mean_asks_for_one_island_at_a_time():
    alive = []

    def contributions():
        for island in range(5):
            alive.append(island)
            yield 1.0, [torch.ones(3)]
            alive.pop()
            assert not alive

    assert mean(contributions())[0].tolist() == [1.0, 1.0, 1.0]
