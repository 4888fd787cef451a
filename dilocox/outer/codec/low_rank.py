"""`low_rank`: matrices cross the WAN as two thin factors, in two averaging passes. Level 2.

One step of power iteration (PowerSGD, arXiv 1905.13727) from the basis of the previous sync:

    pass 0   P = X Q           averaged
    pass 1   Q = X^T orth(P)   averaged        mean = orth(P) Q^T,  own = orth(P) Q_own^T

Both are linear in X, so averaging the factors averages the matrices. The factors are encoded by a block codec
like any other tensor; orth() is computed from the mean as *decoded*, so it is equal on all islands. Factors
are stored as rows ([rank, m], [rank, n]): a block then holds values of one singular direction, which are of
similar size.

Vectors, and matrices whose factors would not be smaller, are sent dense in pass 0. Error feedback keeps
`x - own`: what the reconstruction of the island's own contribution lost (docs/algorithms.md#local-residual).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilocox.outer.codec.adaptive_rank import AdaptiveRank, effective_rank
from dilocox.outer.codec.base import CompressorPasses, CompressorState, MeanResult
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.sizes import is_low_rank, low_rank_passes

if TYPE_CHECKING:
    from dilocox.config.schema import OuterConfig
    from dilocox.param_shard import ParamShard

_DEPENDENT = 1e-5
"""A row is linearly dependent if orthogonalising leaves less than this share of it: fp32 rounding noise."""


class LowRankCompressor:
    """Averages a fragment's matrices by their factors.

    Args:
        names: names of the tensors; they seed the first bases, equally on all islands and replicas.
        rank: r_1.
        adaptive: follow the effective rank of the mean.
        always_dense: names of matrices with replicas on other ranks of the island; those ranks may use
            another codec rank, and replicas must stay equal.
        seed: equal on all islands.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rank: int,
        adaptive: bool = False,
        always_dense: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        self._names = list(names)
        self._always_dense = frozenset(always_dense)
        self._seed = seed
        self._rank = AdaptiveRank(rank)
        self._adaptive = adaptive
        self._bases: dict[str, Tensor] = {}
        self._learned: dict[str, Tensor] = {}

    @property
    def codec_rank(self) -> int:
        """r_t, the rank used in the next sync."""
        return self._rank.rank

    @property
    def interval_scale(self) -> float:
        """r_t / r_1, by which the sync interval may follow."""
        return self._rank.interval_scale

    def passes(self, tensors: list[Tensor]) -> CompressorPasses:
        """See the module; `commit` or `discard` must follow."""
        shapes = self._effective([tensor.shape for tensor in tensors])
        low = [i for i, shape in enumerate(shapes) if is_low_rank(shape, self.codec_rank)]
        first = list(tensors)
        for i in low:
            first[i] = self._basis(self._names[i], tensors[i]) @ tensors[i].T
        averaged = yield first
        if not low:
            return averaged
        # From the decoded mean, not from this island's own factor: all islands must use the same basis.
        left = {i: orthonormal_rows(averaged.mean[i], self._seed_of(self._names[i])) for i in low}
        factors = yield [left[i] @ tensors[i] for i in low]
        mean, own = list(averaged.mean), list(averaged.own_decoded)
        for i, mean_factor, own_factor in zip(low, factors.mean, factors.own_decoded, strict=True):
            mean[i] = _product(left[i], mean_factor)
            own[i] = _product(left[i], own_factor)
        self._learned = {self._names[i]: factor for i, factor in zip(low, factors.mean, strict=True)}
        return MeanResult(mean, own)

    def pass_grids(
        self, shapes: Sequence[Sequence[int]], grids: Sequence[BlockGrid]
    ) -> list[list[BlockGrid]]:
        """See `Compressor.pass_grids`."""
        return low_rank_passes(self._effective(shapes), grids, self.codec_rank)

    def commit(self) -> None:
        """Makes the averaged factors the bases of the next sync, and adapts the rank to them."""
        learned, self._learned = self._learned, {}
        for name, factor in learned.items():
            self._bases[name] = orthonormal_rows(factor, self._seed_of(name))
        if self._adaptive and learned:
            ranks = [effective_rank(factor) for factor in learned.values()]
            self._rank.update(sum(ranks) / len(ranks))

    def discard(self) -> None:
        """Bases and rank stay."""
        self._learned = {}

    def state_dict(self) -> CompressorState:
        """Returns rank and bases; equal on all islands of one layout."""
        return CompressorState(self._rank.state_dict(), dict(self._bases))

    def load_state_dict(self, state: CompressorState) -> None:
        """Continues from a saved or received state; bases that are missing are drawn anew."""
        self._learned = {}
        self._rank.load_state_dict(state.common)
        self._bases = {name: basis.clone() for name, basis in state.layout_bound.items()}

    def _effective(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Returns the shapes, with tensors that are always dense as vectors."""
        return [
            (prod(shape),) if name in self._always_dense else tuple(shape)
            for name, shape in zip(self._names, shapes, strict=True)
        ]

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """Returns Q of the last sync, shortened or extended to the rank: fp32 [rank, n]."""
        basis = self._bases.get(name, matrix.new_empty(0, matrix.shape[1])).to(matrix.device)
        missing = self.codec_rank - len(basis)
        if missing > 0:
            # Zero rows are linearly dependent, so orthonormal_rows draws them.
            padded = torch.cat((basis, basis.new_zeros(missing, matrix.shape[1])))
            return orthonormal_rows(padded, self._seed_of(name))
        return basis[: self.codec_rank]

    def _seed_of(self, name: str) -> int:
        return zlib.crc32(name.encode(), self._seed)


def orthonormal_rows(rows: Tensor, seed: int) -> Tensor:
    """Returns an orthonormal basis of the row space; linearly dependent rows become seeded random ones.

    In fp64 and rounded at the end: another CPU or thread count may add in another order, and the fp32 result
    must be the same on all islands.

    Args:
        rows: fp32 [rank, n], rank <= n.

    Returns: fp32 [rank, n]; row k lies in the span of rows 0..k where they are independent.
    """
    wide = rows.to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    while True:
        orthonormal, triangle = torch.linalg.qr(wide.T)
        diagonal = triangle.diagonal()
        dependent = diagonal.abs() <= _DEPENDENT * wide.norm(dim=1)
        if not dependent.any():
            signs = torch.where(diagonal < 0, -1.0, 1.0)
            result: Tensor = (orthonormal * signs).T.to(torch.float32)
            return result.contiguous()
        fresh = torch.randn(wide.shape, generator=generator, dtype=torch.float64).to(wide.device)
        wide = torch.where(dependent.unsqueeze(1), fresh, wide)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Computes left^T right, in fp64 for the same reason. Returns: fp32 [m, n]."""
    return (left.to(torch.float64).T @ right.to(torch.float64)).to(torch.float32)


def build(config: OuterConfig, shards: Sequence[ParamShard]) -> LowRankCompressor:
    """See `CodecEntry.compressor`. Bases are seeded by the shards' labels, whose form is therefore fixed."""
    return LowRankCompressor(
        [shard.label for shard in shards],
        rank=config.codec_rank,
        adaptive=config.adaptive_rank,
        # Tensor parallel ranks adapt their codec rank independently, and copies must stay equal.
        always_dense=[shard.label for shard in shards if shard.replicated],
    )
