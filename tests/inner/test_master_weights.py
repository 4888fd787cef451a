"""Level 2 writes to the shards that a rank owns; after `publish` every copy in the island has those bits."""

import hashlib
import re
import zlib
from collections import Counter, defaultdict

import pytest
import torch

from tests.distributed.forkserver import run_ranks
from tests.inner.runs import (
    DP2_DISTRIBUTED,
    LAYOUTS,
    join_island,
    make_batch,
    make_config,
    make_inner,
    make_masters,
    train,
)

CASES = {
    "one": ({}, "fp32"),
    "TP2xPP2": (LAYOUTS["TP2xPP2"], "fp32"),
    "DP2": (LAYOUTS["DP2"], "fp32"),
    "DP2 distributed": (DP2_DISTRIBUTED, "fp32"),
    "PP2xDP2 bf16": ({"pipeline_model_parallel_size": 2, "ranks_per_island": 4}, "bf16"),
    "PP2xDP2 distributed": (LAYOUTS["PP2xDP2 distributed optimizer"], "fp32"),
    "PP2xDP2 distributed bf16": (LAYOUTS["PP2xDP2 distributed optimizer"], "bf16"),
    "TP2xPP2xDP2": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "ranks_per_island": 8},
        "fp32",
    ),
}


def bits(tensor):
    """Hash of the exact bytes."""
    return hashlib.sha1(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def model_bits(inner):
    from dilocox.inner.names import named_global_parameters

    return {name: bits(parameter) for name, parameter in named_global_parameters(inner.model).items()}


def change(shard, tp_rank):
    """The same noise on all equal copies of a shard, other noise elsewhere."""
    key = f"{shard.label}/{0 if shard.replicated else tp_rank}"
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    shard.tensor.add_(torch.randn(shard.tensor.shape, generator=generator), alpha=0.01)


def _publish(rank, config):
    island = join_island(rank, config)
    inner = make_inner(config, island)
    masters = make_masters(inner)
    train(inner, config, range(2))
    trained = model_bits(inner)
    masters.publish()
    untouched = model_bits(inner) == trained
    for shard in masters.shards:
        change(shard, island.coordinate.tp)
    masters.publish()
    published, values = model_bits(inner), [shard.tensor.clone() for shard in masters.shards]
    other = [torch.full_like(value, 0.25) for value in values]
    with masters.temporarily(other):
        replaced = all(bool((parameter == 0.25).all()) for parameter in inner.model.parameters())
    restored = model_bits(inner) == published and all(
        torch.equal(shard.tensor, value) for shard, value in zip(masters.shards, values, strict=True)
    )
    after = train(inner, config, range(2, 4))
    return {
        "coordinate": island.coordinate,
        "shards": [
            (shard.name, shard.tensor.shape, shard.role, shard.layer, shard.replicated, shard.counted)
            for shard in masters.shards
        ],
        "changed": [name for name in trained if trained[name] != published[name]],
        "untouched": untouched,
        "replaced": replaced,
        "restored": restored,
        "published": published,
        "after": after,
        "still equal": model_bits(inner),
    }


@pytest.fixture(scope="module", params=CASES)
def ranks(request):
    parallel, dtype = CASES[request.param]
    config = make_config(parallel=parallel, model={"params_dtype": dtype})
    return run_ranks(_publish, config.parallel.ranks_per_island, config)


def test_all_copies_of_a_parameter_have_equal_bits(ranks):
    for key in ("published", "still equal"):
        copies = defaultdict(set)
        for rank in ranks:
            for name, value in rank[key].items():
                name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
                tp = 0 if "norm" in name else rank["coordinate"].tp
                copies[name, tp].add(value)
        assert [name for name, values in copies.items() if len(values) != 1] == []


def test_publishing_changes_what_level_2_wrote_and_nothing_else(ranks):
    assert all(rank["untouched"] for rank in ranks)
    assert all(len(rank["changed"]) == len(rank["published"]) for rank in ranks)
    assert all(rank["after"] == ranks[0]["after"] for rank in ranks)


def test_other_values_are_there_temporarily_and_leave_no_trace(ranks):
    assert all(rank["replaced"] and rank["restored"] for rank in ranks)


def test_every_element_is_owned_once_by_each_tensor_parallel_rank(ranks):
    sizes, counted = Counter(), 0
    for rank in ranks:
        for name, shape, _, _, replicated, is_counted in rank["shards"]:
            sizes[name.split("[")[0], rank["coordinate"].tp, replicated] += shape.numel()
            counted += shape.numel() * is_counted
    whole = {name: size for (name, _, _), size in sizes.items()}
    assert all(size == whole[name] for (name, _, _), size in sizes.items())
    by_formula = 64 * 32 + 2 * (2 * 32 + 32 * 32 + 64 * 32 + 128 * 32 + 64 * 32) + 32
    assert counted == by_formula


def test_pieces_say_what_they_are(ranks):
    for rank in ranks:
        for name, shape, role, layer, replicated, counted in rank["shards"]:
            match = re.fullmatch(r"decoder\.layers\.(\d)\..*", name)
            assert layer == (int(match.group(1)) if match else None)
            assert role == ("layer" if match else "embedding" if "embedding" in name else "head")
            assert replicated == ("norm" in name and len({r["coordinate"].tp for r in ranks}) > 1)
            assert counted == (not replicated or rank["coordinate"].tp == 0)
            assert shape.numel() > 0
            assert not name.startswith("output_layer"), "the tied copy is not owned"


def _learned(rank, config):
    """Validation losses: of the anchor, after training, of the anchor again, of the trained weights again."""
    inner = make_inner(config, join_island(rank, config))
    masters = make_masters(inner)
    anchors = [shard.tensor.clone() for shard in masters.shards]
    batches = [make_batch(config, inner.island, 500)]
    first = inner.evaluate(batches)
    train(inner, config, range(5))
    learned = inner.evaluate(batches)
    with masters.temporarily(anchors):
        again = inner.evaluate(batches)
    return first, learned, again, inner.evaluate(batches)


def test_validation_of_an_anchor_is_the_validation_of_its_weights():
    for parallel in (LAYOUTS["DP2"], DP2_DISTRIBUTED):
        for first, learned, again, after in run_ranks(_learned, 2, make_config(parallel=parallel)):
            assert again == first
            assert after == learned < first
