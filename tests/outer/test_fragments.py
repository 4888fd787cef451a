"""Fragments: whole layers, every shard once, balanced in each stage, equal wherever they are worked out."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, ModelConfig, ParallelConfig
from dilocox.outer.fragments import assign, group
from dilocox.shapes import ParameterShape, stage_layers, stage_parameters

PATTERNS = ["strided", "sequential"]


def layers(count, *, numel=10, first=0):
    return [ParameterShape(f"l{n}", (numel,), None, "layer", n) for n in range(first, first + count)]


def embedding(numel):
    return ParameterShape("e", (numel,), 0, "embedding")


def head(numel):
    return ParameterShape("h", (numel,), 0, "head")


def loads(parameters, assignment, num_fragments):
    sums = [0] * num_fragments
    for parameter in parameters:
        sums[assignment[parameter.role, parameter.layer]] += parameter.numel
    return sums


def stage(pp_rank=0, pp=1, *, num_layers=12, tied=True, vocab=32000):
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=64,
        untie_embeddings_and_output_weights=not tied,
        num_attention_heads=4,
    )
    config = resolve(Config(model=model, parallel=ParallelConfig(pipeline_model_parallel_size=pp)))
    parameters = stage_parameters(config.model, config.parallel, vocab_size=vocab, pp_rank=pp_rank)
    return [parameter for parameter in parameters if not parameter.tied_copy]


def test_strided_takes_every_pth_layer():
    assignment = assign(layers(7, first=14), 3, "strided")
    assert [assignment["layer", n] for n in range(14, 21)] == [0, 1, 2, 0, 1, 2, 0]


def test_sequential_takes_neighbours():
    assignment = assign(layers(7, first=14), 3, "sequential")
    fragments = [assignment["layer", n] for n in range(14, 21)]
    assert fragments == sorted(fragments) and sorted(map(fragments.count, range(3))) == [2, 2, 3]


def test_a_heavy_embedding_gets_fewer_layers_beside_it():
    parameters = [embedding(25), *layers(8), head(1)]
    assert sorted(loads(parameters, assign(parameters, 4, "strided"), 4)) == [21, 25, 30, 30]
    assert max(loads(parameters, assign(parameters, 4, "sequential"), 4)) == 30


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_fragments", [1, 2, 3])
def test_every_stage_gives_whole_layers_to_every_fragment(pattern, pp, tied, num_fragments):
    for pp_rank in range(pp):
        parameters = stage(pp_rank, pp, tied=tied)
        assignment = assign(parameters, num_fragments, pattern)
        fragments = group(parameters, assignment, num_fragments)
        assert sorted(index for fragment in fragments for index in fragment) == list(range(len(parameters)))
        assert all(fragments)
        assert {unit[1] for unit in assignment if unit[0] == "layer"} == set(
            stage_layers(12, pp_size=pp, pp_rank=pp_rank)
        )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_fragments", range(1, 7))
@pytest.mark.parametrize("vocab", [128, 4096, 32000])
@pytest.mark.parametrize("tied", [True, False])
def test_no_fragment_exceeds_the_mean_by_more_than_the_largest_unit(pattern, num_fragments, vocab, tied):
    parameters = stage(vocab=vocab, tied=tied)
    found = loads(parameters, assign(parameters, num_fragments, pattern), num_fragments)
    by_unit = loads(parameters, {(p.role, p.layer): i for i, p in enumerate(parameters)}, len(parameters))
    units = {}
    for parameter in parameters:
        units[parameter.role, parameter.layer] = (
            units.get((parameter.role, parameter.layer), 0) + parameter.numel
        )
    assert sum(found) == sum(by_unit)
    assert max(found) <= sum(found) / num_fragments + max(units.values())


def test_sequential_cut_is_the_best_one():
    for seed in range(30):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 20) for _ in range(8)]
        parameters = [replace(layer, shape=(size,)) for layer, size in zip(layers(8), sizes, strict=True)]
        for count in (2, 3, 4):
            cuts = [(0, *cut, 8) for cut in combinations(range(1, 8), count - 1)]
            best = min(max(sum(sizes[a:b]) for a, b in pairwise(cut)) for cut in cuts)
            assert max(loads(parameters, assign(parameters, count, "sequential"), count)) == best


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_order_of_parameters_does_not_matter(pattern):
    parameters = stage(tied=False)
    shuffled = random.Random(0).sample(parameters, len(parameters))
    assert assign(parameters, 4, pattern) == assign(shuffled, 4, pattern)


def test_group_keeps_the_order_of_pieces_and_takes_any_part_of_a_parameter():
    whole = layers(4)
    assignment = assign(whole, 2, "strided")
    owned = [whole[3], whole[1], replace(whole[1], shape=(3,)), whole[2]]
    assert group(owned, assignment, 2) == [[3], [0, 1, 2]]


def test_too_many_fragments_are_refused():
    with pytest.raises(ValueError, match="5 fragments but only 4"):
        assign(layers(4), 5, "strided")
