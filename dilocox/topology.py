"""Pure integers: coordinates of ranks in their island. No torch, no process groups.

Megatron's order of ranks inside an island is tp fastest, then dp, then pp.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilocox.config.schema import ParallelConfig


@dataclass(frozen=True)
class Coordinate:
    """Position of a rank inside its island; equal coordinates of all islands form one WAN group."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True)
class Topology:
    """The layout of one island, which is the same on every island.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel sizes; their product is the island's ranks.
    """

    num_islands: int
    tp: int
    pp: int
    dp: int

    @classmethod
    def from_config(cls, config: ParallelConfig) -> Topology:
        return cls(
            num_islands=config.num_islands,
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            dp=config.data_parallel_size,
        )

    @property
    def ranks_per_island(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank of the island's own world (0 <= rank < ranks_per_island)."""
        if not 0 <= rank < self.ranks_per_island:
            raise ValueError(f"rank {rank} is not in 0..{self.ranks_per_island - 1}")
        return Coordinate(pp=rank // (self.tp * self.dp), tp=rank % self.tp, dp=rank // self.tp % self.dp)

    def rank(self, coordinate: Coordinate) -> int:
        """Inverse of `coordinate`."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def describe(self) -> str:
        return (
            f"{self.num_islands} islands x (TP {self.tp} x PP {self.pp} x DP {self.dp}) = "
            f"{self.num_islands * self.ranks_per_island} ranks"
        )
