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
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from dilocox.errors import MessageError
from dilocox.outer.codec.sizes import message_bytes


@dataclass(frozen=True)
class MeanResult:
    """Result of one averaging round.

    Attributes:
        mean: weighted mean over the islands, as every island decodes it; fp32, shapes as put in.
        own: what the other islands decoded from this island's message; equals the input for `none`.
    """

    mean: list[Tensor]
    own: list[Tensor]


class Codec(ABC):
    """A block codec: fp32 tensors to one message and back.

    Tensors must be finite: level 2 guards before it encodes. A NaN or an infinity decodes to NaN or
    infinity, so that nothing hides it; other blocks are not touched by it.

    Attributes:
        name: name in the configuration.
        block_size: values that share one scale. Cutting a tensor at multiples of it changes no code.
    """

    name: str
    block_size: int

    def num_bytes(self, numels: Sequence[int]) -> int:
        """Length of the message for tensors of these sizes."""
        return message_bytes(self.name, self.block_size, numels)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns: uint8 [num_bytes(numels)] on the tensors' device. Tensors are fp32, any shape."""
        device = tensors[0].device if tensors else torch.device("cpu")
        num_bytes = self.num_bytes([tensor.numel() for tensor in tensors])
        message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.encode_into(tensors, message)
        return message

    def decode(self, message: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """Returns: one fp32 1-D tensor for each entry of numels.

        Raises:
            MessageError: the message's length does not fit numels.
        """
        outputs = [torch.empty(numel, dtype=torch.float32, device=message.device) for numel in numels]
        self.decode_into(message, outputs)
        return outputs

    @abstractmethod
    def encode_into(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Encodes into a buffer of `num_bytes` that starts at a multiple of 8 bytes."""

    @abstractmethod
    def decode_into(self, message: Tensor, outputs: Sequence[Tensor]) -> None:
        """Decodes into contiguous fp32 tensors; the message starts at a multiple of 8 bytes.

        Raises:
            MessageError: the message's length does not fit the outputs.
        """

    def reseed(self, seed: int) -> None:  # noqa: B027  # most codecs have nothing to seed
        """Starts the random numbers of stochastic rounding anew; nothing where rounding is to nearest.

        With a seed for each message there is no generator state to checkpoint, and a message that is
        made again after a resume has the same bits.

        Args:
            seed: equal on the ranks of an island, different between islands.
        """

    def _check_length(self, message: Tensor, numels: Sequence[int]) -> None:
        expected = self.num_bytes(numels)
        if message.numel() != expected:
            raise MessageError(
                f"payload length is {message.numel()} bytes, expected {expected} ({self.name})"
            )


CompressorPasses = Generator[list[Tensor], MeanResult, MeanResult]


class Compressor(Protocol):
    """Averages a fragment's pseudo-gradient in one or more rounds.

    What it learns from a round (warm start, rank) takes effect in `commit`, equally on all islands; its
    `state_dict` is shared state and goes to an island that is healed.
    """

    def rounds(self, tensors: list[Tensor]) -> CompressorPasses:
        """Yields tensors to average; is sent their `MeanResult`; returns the `MeanResult` of the input."""

    def round_numels(self, shapes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sizes of the tensors that the next `rounds` yields, for predicted bytes."""

    def commit(self) -> None:
        """The sync of the last `rounds` was committed."""

    def discard(self) -> None:
        """The sync of the last `rounds` failed: nothing has changed."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Warm-start state that must survive a checkpoint."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


class DenseCompressor:
    """Averages the pseudo-gradient itself, in one round."""

    def rounds(self, tensors: list[Tensor]) -> CompressorPasses:
        """One round over the input."""
        return (yield tensors)

    def round_numels(self, shapes: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tensors themselves."""
        return [[prod(shape) for shape in shapes]]

    def commit(self) -> None:
        """Nothing to keep."""

    def discard(self) -> None:
        """Nothing to undo."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Accepts the empty state alone: anything else was saved by another compressor."""
        if state:
            raise ValueError(f"a dense compressor has no state, got {sorted(state)}")
