"""Local error feedback: what this rank's own message lost goes into its next one. Level 2.

The residual remembers the island's *own* reconstruction, never the mean: `x - mean` would also store the
islands' disagreement, which random-walks and ruins the scales (algorithms.md section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ErrorFeedback:
    """Residuals of one fragment, one fp32 tensor a shard.

    Args:
        names: shard names, the keys in a checkpoint.
        like: tensors with the shapes and the device of the shards.
    """

    def __init__(self, names: Sequence[str], like: Sequence[Tensor]) -> None:
        self._names = list(names)
        self.residual = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in like]

    def compensate(self, deltas: Sequence[Tensor]) -> list[Tensor]:
        """Returns: what to average, `delta + residual`; nothing changes."""
        return [delta + residual for delta, residual in zip(deltas, self.residual, strict=True)]

    def commit(self, sent: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """A committed sync: the residual becomes `sent - own`.

        Not for a sync in which this island abstained, and not for a discarded one.

        Args:
            sent: what `compensate` returned.
            own: `MeanResult.own`, what the others decoded from it.
        """
        for residual, x, decoded in zip(self.residual, sent, own, strict=True):
            torch.sub(x, decoded, out=residual)

    def state_dict(self) -> dict[str, Tensor]:
        """Residual by shard name."""
        return dict(zip(self._names, self.residual, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the residuals of a checkpoint.

        Raises:
            KeyError: a shard is missing.
        """
        for name, residual in zip(self._names, self.residual, strict=True):
            residual.copy_(state[name])
