"""Local error feedback: the error of a rank's own message is added to its next one. Level 2.

The residual is the error of the island's *own* reconstruction, never of the mean: `x - mean` would also store
the islands' disagreement, which is a random walk and ruins the scales (docs/algorithms.md#local-residual).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dilocox.errors import CheckpointError


class ErrorFeedback:
    """Residuals of one fragment, one fp32 tensor per shard.

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

    def commit(self, compensated: Sequence[Tensor], own_decoded: Sequence[Tensor]) -> None:
        """Sets the residual to `compensated - own_decoded`, for a committed sync. In place: `residual`.

        Not called for a sync in which this island abstained, nor for a discarded one: the residual stays.

        Args:
            compensated: what `compensate` returned.
            own_decoded: `MeanResult.own_decoded`, what the others decoded from it.
        """
        for residual, x, decoded in zip(self.residual, compensated, own_decoded, strict=True):
            torch.sub(x, decoded, out=residual)

    def clear(self) -> None:
        """Sets the residual to zero."""
        for residual in self.residual:
            residual.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the residual by shard name. Not copies."""
        return dict(zip(self._names, self.residual, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the residuals of a checkpoint.

        Raises:
            CheckpointError: a shard is missing, or a residual has another shape.
        """
        check_fits(state, self._names, self.residual)
        for name, residual in zip(self._names, self.residual, strict=True):
            residual.copy_(state[name])


def check_fits(state: Mapping[str, Tensor], names: Sequence[str], like: Sequence[Tensor]) -> None:
    """Raises a `CheckpointError` unless state has a residual of the right shape for every shard."""
    for name, tensor in zip(names, like, strict=True):
        if name not in state:
            raise CheckpointError(f"no residual of {name} is saved")
        if state[name].shape != tensor.shape:
            saved, wanted = tuple(state[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"residual of {name} has shape {saved}, the shard has {wanted}")
