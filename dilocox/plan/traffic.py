"""Bytes that each rank hands to the WAN, worked out from the configuration. No torch here.

They are counted with the codecs' own functions on the shapes that level 2 will see, so they equal the
measured payload. Only with the distributed optimizer are they an estimate: its shards are cut by Megatron's
buffers, here each parameter is cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from dilocox.config.schema import Config
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CODECS, CodecEntry
from dilocox.outer.fragments import assign, group
from dilocox.outer.reduce.predicted import WireCodecs, allreduce_bytes
from dilocox.shapes import ParameterShape, stage_parameters
from dilocox.topology import Topology


@dataclass(frozen=True)
class OwnedShape:
    """What a rank owns of one parameter.

    Attributes:
        shape: of its shard.
        grid: blocks of its shard.
        replicated: the other tensor parallel ranks have equal copies.
    """

    shape: tuple[int, ...]
    grid: BlockGrid
    replicated: bool


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
        owned = self._owned(self.fragments[coordinate.pp][fragment], coordinate.dp)
        outer = self.config.outer
        carrier = CODECS.carrier(outer.codec)
        gather = CODECS.get(outer.gather_codec) if outer.gather_codec else carrier
        # Replicated matrices are averaged as they are, like vectors, see `codec/low_rank.py`.
        shapes = [(prod(one.shape),) if one.replicated else one.shape for one in owned]
        grids = [one.grid for one in owned]
        passes = CODECS.get(outer.codec).pass_grids(shapes, grids, outer.codec_rank)
        return sum(self._allreduce_bytes(carrier, gather, one_pass) for one_pass in passes)

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

    def edges(self, parameter: ParameterShape) -> list[int]:
        """Columns at which tensor parallel ranks or flat shards of a parameter meet."""
        whole = parameter.shape_on_rank(self.topology.tp)
        row = whole[-1]
        is_split = self.topology.tp > 1 and parameter.split_dim == len(whole) - 1
        starts = [self._cut(whole, dp_rank)[0] % row for dp_rank in range(self.topology.dp)]
        return [edge for edge in (row if is_split else 0, *starts) if edge]

    def _fp32_bytes(self, owned: Sequence[OwnedShape]) -> int:
        exact = CODECS.get("none")
        return self._allreduce_bytes(exact, exact, [one.grid for one in owned])

    def _allreduce_bytes(self, codec: CodecEntry, gather: CodecEntry, grids: Sequence[BlockGrid]) -> int:
        codecs = WireCodecs(codec, gather, self.config.outer.codec_block_size)
        return allreduce_bytes(codecs, grids, num_islands=self.topology.num_islands)

    def _owned(self, parameters: Sequence[ParameterShape], dp_rank: int) -> list[OwnedShape]:
        """Shards of a data parallel rank: row blocks, or flat shards."""
        found = []
        for parameter in parameters:
            whole = parameter.shape_on_rank(self.topology.tp)
            start, shape = self._cut(whole, dp_rank)
            if prod(shape):
                grid = BlockGrid.of_shape(whole, numel=prod(shape), start=start)
                replicated = self.topology.tp > 1 and parameter.split_dim is None
                found.append(OwnedShape(shape, grid, replicated))
        return found

    def _cut(self, whole: tuple[int, ...], dp_rank: int) -> tuple[int, tuple[int, ...]]:
        """First element and shape of a data parallel rank's shard of a tensor parallel rank's block."""
        dp = self.topology.dp
        if self.config.parallel.use_distributed_optimizer:
            whole = (prod(whole),)
        rows = whole[0] // dp + (dp_rank < whole[0] % dp)
        first = dp_rank * (whole[0] // dp) + min(dp_rank, whole[0] % dp)
        return first * prod(whole[1:]), (rows, *whole[1:])


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


def uneven_blocks(traffic: Traffic) -> str | None:
    """Tells which parameters are cut into other blocks under another layout, and what would help.

    Blocks start at rows and at the edges of tensor parallel ranks and shards; where an edge is no multiple
    of the block, the lossy values depend on the layout. With the distributed optimizer edges are estimated.

    Returns: one line; None if all layouts with this one's edges cut the same blocks, or the codec has none.
    """
    outer = traffic.config.outer
    entry = CODECS.get(outer.codec)
    if entry.carrier is not None or not entry.has_blocks or outer.method != "diloco":
        return None
    names, common = [], outer.codec_block_size
    for parameter in (parameter for stage in traffic.stages for parameter in stage):
        edges = traffic.edges(parameter)
        if any(edge % outer.codec_block_size for edge in edges):
            names.append(parameter.name)
        common = gcd(common, *edges)
    if not names:
        return None
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    help_text = f"use codec_block_size {common}" if common >= 8 and common % 8 == 0 else "no block size helps"
    return f"blocks differ between layouts for {listed}; {help_text}"
