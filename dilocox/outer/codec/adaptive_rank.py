"""DiLoCoX's adaptive rank and interval: both follow the effective rank of the mean. Level 2.

arXiv 2506.21263 leaves the definition of the effective rank open. Here it is the number of singular values
that hold `ENERGY` of the squared norm of what was decoded (docs/algorithms.md#adaptive-rank-and-interval).
Unlike the entropy rank, it has a fixed point: a flat spectrum keeps its rank instead of shrinking a bit in
every sync. Everything is computed from averaged factors, so all islands compute the same rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ENERGY = 0.95
"""Share of the energy; below the 0.99 or so that int4 factors carry faithfully."""

WINDOW = 5
"""c: syncs that the rank is averaged over."""


def effective_rank(factor: Tensor) -> int:
    """Returns the number of singular values that hold `ENERGY` of the squared norm.

    Args:
        factor: fp32 [rank, n]; times an orthonormal factor it is the averaged matrix.

    Returns: 0 for a zero matrix.
    """
    wide = factor.to(torch.float64)
    energies = torch.linalg.eigvalsh(wide @ wide.T).flip(0).clamp(min=0)
    if energies.sum() == 0:
        return 0
    return int((energies.cumsum(0) < ENERGY * energies.sum()).sum()) + 1


class AdaptiveRank:
    """r_t = mean of the last c effective ranks, H_t = r_t / r_1 * H_1.

    Factors of rank r cannot show an effective rank above r. So that the rank can grow again, a spectrum that
    fills the whole rank counts as one eighth more, up to r_1.

    Args:
        initial: r_1.

    Attributes:
        rank: r_t, in 1 .. r_1.
    """

    def __init__(self, initial: int) -> None:
        self.rank = initial
        self._initial = initial
        self._window: deque[float] = deque(maxlen=WINDOW)

    @property
    def interval_scale(self) -> float:
        """alpha = r_t / r_1, by which the sync interval follows the rank."""
        return self.rank / self._initial

    def update(self, effective: float) -> None:
        """Takes note of a committed sync.

        Args:
            effective: its effective rank, equal on all islands and on the ranks of an island.
        """
        saturated = effective >= self.rank
        self._window.append(self.rank + max(1, self.rank // 8) if saturated else effective)
        # Until then r_1: the first bases are random, and their spectrum means little.
        if len(self._window) == WINDOW:
            self.rank = min(max(round(sum(self._window) / WINDOW), 1), self._initial)

    def state_dict(self) -> dict[str, Any]:
        """Returns rank and window, as plain values."""
        return {"rank": self.rank, "window": list(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state."""
        self.rank = int(state["rank"])
        self._window = deque(map(float, state["window"]), maxlen=WINDOW)
