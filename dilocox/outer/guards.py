"""Whether an island may bring its pseudo-gradient to a sync: finite, and no outlier. Level 2."""

from __future__ import annotations

import math
import statistics
from collections import deque

_WINDOW = 16
"""Norms that the median is taken of."""

_FEWEST = 4
"""Norms without which there is no median to compare with."""


class OutlierGuard:
    """Compares pseudo-gradient norms of one fragment with their running median.

    Args:
        factor: abstain above this times the median; 0 = only non-finite norms abstain.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def reason_to_abstain(self, norm: float) -> str | None:
        """Returns why to abstain with this norm, or None; remembers nothing.

        Equal on all ranks for equal norms.
        """
        if not math.isfinite(norm):
            return "the pseudo-gradient is not finite"
        if self._factor and len(self._norms) >= _FEWEST:
            median = statistics.median(self._norms)
            if norm > self._factor * median > 0:
                return f"norm {norm:.3g} is over {self._factor:g} times the running median {median:.3g}"
        return None

    def remember(self, norm: float) -> None:
        """Adds the norm of a sync that this island took part in."""
        self._norms.append(norm)

    def state_dict(self) -> list[float]:
        return list(self._norms)

    def load_state_dict(self, norms: list[float]) -> None:
        self._norms = deque(norms, maxlen=_WINDOW)
