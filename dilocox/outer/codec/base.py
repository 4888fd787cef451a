"""What a codec is: fp32 tensors to one message of bytes and back. Level 2, no process group.

Two shapes of compression meet here:

* a `Codec` turns a list of tensors into bytes, block by block; blocks never straddle tensors, so equal
  tensors give equal bytes wherever they are (replicas of a weight stay bit-identical);
* a `Compressor` says *what* is averaged: the pseudo-gradient itself (dense), or its low-rank factors in
  two rounds. It is a generator that yields tensors to average and is sent the result, so the collective
  stays outside and a test can drive several islands in lockstep from a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Average:
    """Result of one averaging round.

    Attributes:
        mean: weighted mean over the islands, as every island decodes it; fp32, shapes as put in.
        own: what the other islands decoded from this island's message; equals the input for `none`.
    """

    mean: list[Tensor]
    own: list[Tensor]


class Codec(ABC):
    """A stateless block codec.

    Attributes:
        name: name in the configuration.
        block_size: values that share one scale. Cutting a tensor at multiples of it changes no code.
    """

    name: str
    block_size: int

    @abstractmethod
    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns: uint8 [num_bytes(numels)] on the tensors' device. Tensors are fp32, any shape."""

    @abstractmethod
    def decode(self, message: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """Returns: one fp32 1-D tensor for each entry of numels.

        Raises:
            MessageError: the message's length does not fit numels.
        """

    @abstractmethod
    def num_bytes(self, numels: Sequence[int]) -> int:
        """Length of the message for tensors of these sizes."""

    def generator_state(self) -> Tensor | None:
        """State of the random generator (stochastic rounding), for checkpoints."""
        return None


AverageRounds = Generator[list[Tensor], Average, Average]


class Compressor(Protocol):
    """Averages a fragment's pseudo-gradient in one or more rounds."""

    def rounds(self, tensors: list[Tensor]) -> AverageRounds:
        """Yields tensors to average; is sent their `Average`; returns the `Average` of the input."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Warm-start state that must survive a checkpoint."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...
