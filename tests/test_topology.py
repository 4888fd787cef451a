"""Ranks and coordinates are one to one, in Megatron's order."""

import itertools

import pytest

from dilocox.config.schema import ParallelConfig
from dilocox.topology import Coordinate, Topology

SIZES = list(itertools.product((1, 2, 3, 4), repeat=3))


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_rank_and_coordinate_are_inverse(tp, pp, dp):
    topology = Topology(num_islands=2, tp=tp, pp=pp, dp=dp)
    coordinates = [topology.coordinate(rank) for rank in range(topology.ranks_per_island)]
    assert [topology.rank(coordinate) for coordinate in coordinates] == list(range(tp * pp * dp))
    everywhere = itertools.product(range(pp), range(dp), range(tp))
    assert coordinates == [Coordinate(pp=p, dp=d, tp=t) for p, d, t in everywhere]


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_a_configuration_gives_the_layout_back(tp, pp, dp):
    parallel = ParallelConfig(
        num_islands=3,
        ranks_per_island=tp * pp * dp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    assert Topology.from_config(parallel) == Topology(num_islands=3, tp=tp, pp=pp, dp=dp)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_of_no_island_is_an_error(rank):
    with pytest.raises(ValueError, match=r"is not in 0\.\.7"):
        Topology(num_islands=1, tp=2, pp=2, dp=2).coordinate(rank)
