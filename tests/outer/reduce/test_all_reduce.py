"""The two-shot average against an fp64 oracle, its bytes, and what it refuses."""

from __future__ import annotations

import time

import pytest
import torch

from dilocox.errors import MessageError, WanError
from dilocox.outer.codec.registry import CODECS
from dilocox.outer.codec.sizes import HEADER_BYTES
from dilocox.outer.reduce.all_reduce import COLLECTIVES, Wire, all_reduce_mean
from dilocox.outer.reduce.predicted import _STRATEGIES, WireCodecs, allreduce_bytes
from dilocox.outer.wan.header import SyncId
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.codec.bounds import mean_bound
from tests.outer.codec.building import WIRE_CODECS, build_codec, flat_grids, rows
from tests.outer.wan.islands import member_of, run_islands

SIZES = [1, 2, 3, 5, 63, 64, 65, 4095, 4097]
SYNC = SyncId("run", fragment=1, outer_step=2)


def all_reduce(inputs, codec="none", *, gather=None, weights=None, spoil=None):
    """Averages inputs[k] of island k. Returns: (MeanResult, transport) of each island."""
    count = len(inputs)
    hub = LoopbackHub(count, timeout_s=10)

    def work(island):
        weight = 1.0 if weights is None else weights[island]
        wan = hub.wan(island)
        transport = wan.open_session(member_of(island, weight=weight)).transport
        if spoil is not None:
            spoil(island, transport)
        try:
            result = all_reduce_mean(
                inputs[island],
                flat_grids(inputs[island]),
                transport=transport,
                wire=Wire(build_codec(codec, 64), build_codec(gather or codec, 64)),
                sync=SYNC,
            )
        except WanError:
            wan.abort()  # the others need not wait for their timeout
            raise
        return result, transport

    return run_islands(work, range(count))


def random_inputs(count, sizes, scale=1e-3):
    torch.manual_seed(count)
    return [[torch.randn(size) * scale for size in sizes] for _ in range(count)]


def total_bound(codec, gather, xs, weights):
    (grid,) = rows(xs[0].numel())
    pairs = list(zip(weights, xs, strict=True))
    return mean_bound(pairs, names=(codec, gather), block_size=64, grid=grid)


@pytest.mark.parametrize("codec", WIRE_CODECS)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_mean_is_within_the_bound_of_the_oracle(codec, count, size):
    inputs = random_inputs(count, [size])
    results = all_reduce(inputs, codec)
    mean, bound = total_bound(codec, codec, [x[0] for x in inputs], [1.0] * count)
    assert ((results[0][0].mean[0].double() - mean).abs() <= bound).all()
    assert all(torch.equal(r.mean[0], results[0][0].mean[0]) for r, _ in results)


@pytest.mark.parametrize("codec", WIRE_CODECS)
@pytest.mark.parametrize("gather", [None, "int8", "none"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_many_tensors_weights_bits_and_bytes(codec, gather, count):
    sizes = [*SIZES, 0]
    inputs = random_inputs(count, sizes)
    weights = [1.0 + 3 * k for k in range(count)]
    results = all_reduce(inputs, codec, gather=gather, weights=weights)
    for i, size in enumerate(sizes):
        mean, bound = total_bound(codec, gather or codec, [x[i] for x in inputs], weights)
        got = results[0][0].mean[i]
        assert got.shape == (size,)
        assert ((got.double() - mean).abs() <= bound).all()
        assert all(torch.equal(r.mean[i], got) for r, _ in results)
    for index, (_, transport) in enumerate(results):
        codecs = WireCodecs(CODECS.get(codec), CODECS.get(gather or codec), 64)
        predicted = allreduce_bytes(codecs, rows(*sizes), num_islands=count, index=index)
        assert transport.bytes_sent == predicted


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_element_arrives_once_and_in_place(count):
    shapes = [(7,), (64, 3), (1,), (65,), (5, 5, 5)]
    first = 0
    tensors = []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + numel, dtype=torch.float32).view(shape))
        first += numel
    results = all_reduce([[t * (k + 1) for t in tensors] for k in range(count)])
    factor = (count + 1) / 2
    for result, _ in results:
        for got, sent in zip(result.mean, tensors, strict=True):
            assert torch.allclose(got, sent * factor, rtol=1e-6)
            assert got.shape == sent.shape


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_values_average_to_themselves(count):
    x = random_inputs(1, [1000])[0]
    for result, _ in all_reduce([x] * count):
        assert torch.allclose(result.mean[0], x[0], rtol=2e-7, atol=0)


@pytest.mark.parametrize("codec", WIRE_CODECS)
@pytest.mark.parametrize("count", [2, 3])
def test_own_is_what_the_others_decode(codec, count):
    inputs = random_inputs(count, [4097, 3])
    block_codec = build_codec(codec, 64)
    for island, (result, _) in enumerate(all_reduce(inputs, codec)):
        expected = block_codec.decode(block_codec.encode(inputs[island], rows(4097, 3)), rows(4097, 3))
        assert all(torch.equal(a, b) for a, b in zip(result.own_decoded, expected, strict=True))


def test_a_single_island_keeps_its_exact_values():
    inputs = random_inputs(1, [100])
    ((result, transport),) = all_reduce(inputs, "int4")
    assert torch.equal(result.mean[0], inputs[0][0])
    assert torch.equal(result.own_decoded[0], inputs[0][0])
    assert transport.bytes_sent == 0
    result.mean[0].zero_()
    assert inputs[0][0].abs().sum() > 0


@pytest.mark.parametrize("count", [2, 3, 5])
def test_who_abstains_takes_the_result_and_gives_nothing(count):
    inputs = random_inputs(count, SIZES)
    inputs[1] = [torch.full((size,), float("nan")) for size in SIZES]
    weights = [1.0] * count
    weights[1] = 0.0
    results = all_reduce(inputs, "int4", weights=weights)
    others = [x for x, w in zip(inputs, weights, strict=True) if w]
    for i in range(len(SIZES)):
        assert all(torch.equal(r.mean[i], results[0][0].mean[i]) for r, _ in results)
        mean = sum(x[i].double() for x in others) / len(others)
        assert (results[0][0].mean[i] - mean).abs().max() < 1e-3
        assert not results[1][0].own_decoded[i].any()
    assert results[1][1].bytes_sent < results[0][1].bytes_sent


def test_if_all_abstain_the_sync_fails():
    with pytest.raises(WanError, match="every island abstains"):
        all_reduce(random_inputs(2, [10]), weights=[0.0, 0.0])


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_without_shards_takes_part(count):
    for result, _ in all_reduce([[] for _ in range(count)], "int4"):
        assert result.mean == []


def test_arrival_order_does_not_matter():
    inputs = random_inputs(5, [4097])

    def late(delays):
        def spoil(island, transport):
            time.sleep(delays[island])

        return spoil

    first = all_reduce(inputs, "int4", spoil=late([0.02, 0.0, 0.01, 0.03, 0.0]))
    second = all_reduce(inputs, "int4", spoil=late([0.0, 0.03, 0.0, 0.01, 0.02]))
    assert torch.equal(first[0][0].mean[0], second[4][0].mean[0])


@pytest.mark.parametrize(("count", "call"), [(2, 0), (3, 0), (3, 1)])
def test_a_byte_that_flips_on_the_wire_fails_the_sync(count, call):
    def spoil(island, transport):
        send = transport.all_to_all
        calls = iter(range(2))

        def flipped(messages, sizes):
            received = send(messages, sizes)
            if next(calls) == call and island == 0:
                received[1][100] ^= 1
            return received

        transport.all_to_all = flipped

    with pytest.raises(MessageError, match=r"position 1.*checksum"):
        all_reduce(random_inputs(count, [4097]), "int4", spoil=spoil)


def test_inputs_are_not_written_to():
    inputs = random_inputs(3, [300])
    before = [x[0].clone() for x in inputs]
    for result, _ in all_reduce(inputs, "none", weights=[1.0, 2.0, 3.0]):
        result.mean[0].zero_()
    assert all(torch.equal(x[0], b) for x, b in zip(inputs, before, strict=True))


def test_a_small_model_stays_under_4_5_bits_with_its_headers():
    layer = [256, 256 * 768, 256 * 256, 256, 256 * 1408, 704 * 256]
    numels = [4096 * 256, *layer, *layer, 256]
    codecs = WireCodecs(CODECS.get("int4"), CODECS.get("int4"), 64)
    total = sum(allreduce_bytes(codecs, rows(*numels[p::4]), num_islands=2) for p in range(4))
    assert 8 * total / sum(numels) <= 4.5


@pytest.mark.parametrize("num_islands", [3, 4, 5, 8])
def test_islands_together_send_twice_k_minus_1_messages(num_islands):
    grids = rows(1 << 18, 100, 77)
    codecs = WireCodecs(CODECS.get("int4"), CODECS.get("int4"), 64)
    total = sum(
        allreduce_bytes(codecs, grids, num_islands=num_islands, index=index) for index in range(num_islands)
    )
    headers = 2 * num_islands * (num_islands - 1) * HEADER_BYTES
    assert total == 2 * (num_islands - 1) * codecs.codec.num_bytes(grids, 64) + headers


def test_every_strategy_predicts_its_bytes():
    assert COLLECTIVES.keys() == _STRATEGIES.keys()
