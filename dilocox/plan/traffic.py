"""Bytes that each rank hands to the WAN, worked out from the configuration. No torch here.

They are counted with the codecs' own functions on the shapes that level 2 will see, so they equal the
measured payload. Only with the distributed optimizer are they an estimate: its shards are cut by Megatron's
buffers, here each parameter is cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from dilocox.config.schema import Config
from dilocox.outer.codec.sizes import allreduce_bytes, low_rank_numels
from dilocox.outer.fragments import assign, group
from dilocox.shapes import ParameterShape, stage_parameters
from dilocox.topology import Topology

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """WAN traffic of one run.

    Attributes:
        config: resolved.
        vocab_size: of the tokenizer, before padding.
    """

    config: Config
    vocab_size: int

    @cached_property
    def topology(self) -> Topology:
        return Topology.from_config(self.config.parallel)

    @cached_property
    def stages(self) -> list[list[ParameterShape]]:
        """Parameters of each pipeline stage that go over the WAN: all but the copy of a tied embedding."""
        config = self.config
        built = (
            stage_parameters(config.model, config.parallel, vocab_size=self.vocab_size, pp_rank=pp_rank)
            for pp_rank in range(self.topology.pp)
        )
        return [[parameter for parameter in stage if not parameter.tied_copy] for stage in built]

    @cached_property
    def fragments(self) -> list[list[list[ParameterShape]]]:
        """Parameters by stage and fragment."""
        outer = self.config.outer
        found = []
        for stage in self.stages:
            assignment = assign(stage, outer.num_fragments, outer.fragment_pattern)
            indices = group(stage, assignment, outer.num_fragments)
            found.append([[stage[index] for index in fragment] for fragment in indices])
        return found

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel for stage in self.stages for parameter in stage)

    def sync_bytes(self, fragment: int, rank: int) -> int:
        """Payload bytes, headers included, that one rank sends in one sync of a fragment."""
        coordinate = self.topology.coordinate(rank)
        shapes = self._owned(self.fragments[coordinate.pp][fragment], coordinate.dp)
        outer = self.config.outer
        return sum(
            allreduce_bytes(
                "int4" if outer.codec == "low_rank" else outer.codec,
                gather_codec=outer.gather_codec,
                block_size=outer.codec_block_size,
                numels=numels,
                num_islands=self.topology.num_islands,
            )
            for numels in self._rounds(shapes)
        )

    def fp32_sync_bytes(self, fragment: int, rank: int) -> int:
        """The same for a sync in fp32."""
        coordinate = self.topology.coordinate(rank)
        return self._fp32_bytes(self._owned(self.fragments[coordinate.pp][fragment], coordinate.dp))

    def data_parallel_bytes(self, rank: int) -> int:
        """Payload bytes that one rank sends in one inner step with `outer.method: data_parallel`."""
        coordinate = self.topology.coordinate(rank)
        return self._fp32_bytes(self._owned(self.stages[coordinate.pp], coordinate.dp))

    def ranks_of_host(self, host: int) -> range:
        """Ranks of an island's world on one of its hosts."""
        per_host = self.topology.ranks_per_island // self.config.parallel.nodes_per_island
        return range(host * per_host, (host + 1) * per_host)

    def _fp32_bytes(self, shapes: Sequence[Shape]) -> int:
        return allreduce_bytes(
            "none",
            block_size=self.config.outer.codec_block_size,
            numels=[prod(shape) for shape in shapes],
            num_islands=self.topology.num_islands,
        )

    def _rounds(self, shapes: Sequence[Shape]) -> list[list[int]]:
        outer = self.config.outer
        if outer.codec == "low_rank":
            return low_rank_numels(shapes, outer.codec_rank)
        return [[prod(shape) for shape in shapes]]

    def _owned(self, parameters: Sequence[ParameterShape], dp_rank: int) -> list[Shape]:
        """Shapes of the shards of a data parallel rank: row blocks, or flat shards."""
        dp, shapes = self.topology.dp, []
        for parameter in parameters:
            whole = parameter.shape_on_rank(self.topology.tp)
            if self.config.parallel.use_distributed_optimizer:
                whole = (prod(whole),)
            rows = whole[0] // dp + (dp_rank < whole[0] % dp)
            if rows:
                shapes.append((rows, *whole[1:]))
        return shapes


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that the busiest host of an island sends; its network interface carries them.

    Attributes:
        syncs: of one sync, by fragment.
        fp32_syncs: the same in fp32.
        data_parallel: of one inner step with gradients averaged over the WAN.
    """

    syncs: list[int]
    fp32_syncs: list[int]
    data_parallel: int


def busiest_host(traffic: Traffic) -> HostTraffic:
    """The host that limits each sync; for every fragment it may be another one."""
    hosts = [traffic.ranks_of_host(host) for host in range(traffic.config.parallel.nodes_per_island)]
    fragments = range(traffic.config.outer.num_fragments)
    return HostTraffic(
        syncs=[max(sum(traffic.sync_bytes(f, rank) for rank in ranks) for ranks in hosts) for f in fragments],
        fp32_syncs=[
            max(sum(traffic.fp32_sync_bytes(f, rank) for rank in ranks) for ranks in hosts) for f in fragments
        ],
        data_parallel=max(sum(traffic.data_parallel_bytes(rank) for rank in ranks) for ranks in hosts),
    )


def island_outer_step_bytes(traffic: Traffic) -> int:
    """Bytes that all ranks of an island send in one outer step (a sync of every fragment)."""
    return sum(
        traffic.sync_bytes(fragment, rank)
        for fragment in range(traffic.config.outer.num_fragments)
        for rank in range(traffic.topology.ranks_per_island)
    )
