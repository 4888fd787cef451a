"""Interfaces of codecs: fp32 tensors to one message of bytes and back. Level 2, no process group.

Two shapes of compression meet here:

* a `Codec` turns a list of tensors into bytes, block by block; blocks never straddle tensors, so equal
  tensors give equal bytes wherever they are (replicas of a weight stay bit-identical);
* a `Compressor` decides *what* is averaged: the pseudo-gradient itself (dense), or its low-rank factors in
  two passes. It is a generator that yields tensors to average and receives the result, so the collective
  stays outside and a test can drive several islands in lockstep from a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dilocox.errors import MessageError
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.registry import CodecEntry

if TYPE_CHECKING:
    from dilocox.config.schema import OuterConfig
    from dilocox.param_shard import ParamShard


@dataclass(frozen=True)
class MeanResult:
    """Result of one averaging pass.

    Attributes:
        mean: weighted mean over the islands, as every island decodes it; fp32, shapes as put in.
        own_decoded: what the other islands decoded from this island's message; equals the input for
            `none`.
    """

    mean: list[Tensor]
    own_decoded: list[Tensor]


class Codec(ABC):
    """fp32 tensors to one message and back.

    Tensors must be finite: the guard of level 2 runs before. A NaN or an infinity decodes to NaN or infinity,
    so that it stays visible; other blocks are not changed by it.

    Args:
        entry: its entry in the registry: name, wire id and length of the messages.
        block_size: values that share one scale. Splitting a tensor at blocks changes no code.
    """

    def __init__(self, entry: CodecEntry, block_size: int) -> None:
        self.entry = entry
        self.block_size = block_size

    @property
    def name(self) -> str:
        """Name in the configuration."""
        return self.entry.name

    @property
    def num_fallbacks(self) -> int:
        """Calls that ran uncompiled because compiling had failed."""
        return 0

    def num_bytes(self, grids: Sequence[BlockGrid]) -> int:
        """Returns the length of the message for tensors with these blocks."""
        return self.entry.num_bytes(grids, self.block_size)

    def encode(self, tensors: Sequence[Tensor], grids: Sequence[BlockGrid]) -> Tensor:
        """Returns: uint8 [num_bytes(grids)] on the tensors' device. Tensors are fp32, any shape."""
        device = tensors[0].device if tensors else torch.device("cpu")
        message = torch.empty(self.num_bytes(grids), dtype=torch.uint8, device=device)
        self.encode_into(tensors, grids, message)
        return message

    def decode(self, message: Tensor, grids: Sequence[BlockGrid]) -> list[Tensor]:
        """Returns: one fp32 1-D tensor for each grid.

        Raises:
            MessageError: the message's length does not fit the grids.
        """
        outputs = [torch.empty(grid.numel, dtype=torch.float32, device=message.device) for grid in grids]
        self.decode_into(message, grids, outputs)
        return outputs

    @abstractmethod
    def encode_into(self, tensors: Sequence[Tensor], grids: Sequence[BlockGrid], message: Tensor) -> None:
        """Encodes into a buffer of `num_bytes` that starts at a multiple of 8 bytes."""

    @abstractmethod
    def decode_into(self, message: Tensor, grids: Sequence[BlockGrid], outputs: Sequence[Tensor]) -> None:
        """Decodes into contiguous fp32 tensors; the message starts at a multiple of 8 bytes.

        Raises:
            MessageError: the message's length does not fit the grids.
        """

    def reseed(self, seed: int) -> None:  # noqa: B027  # most codecs have nothing to seed
        """Seeds the random numbers of stochastic rounding; no-op where rounding is to nearest.

        With a seed for each message there is no generator state to save, and a message that is encoded again
        after a resume has the same bits.

        Args:
            seed: equal on the ranks of an island, different between islands.
        """

    def check_length(self, message: Tensor, grids: Sequence[BlockGrid]) -> None:
        """Raises a `MessageError` if the message's length does not fit the grids."""
        expected = self.num_bytes(grids)
        if message.numel() != expected:
            raise MessageError(
                f"payload length is {message.numel()} bytes, expected {expected} ({self.name})"
            )


CompressorPasses = Generator[list[Tensor], MeanResult, MeanResult]


@dataclass(frozen=True)
class CompressorState:
    """State of a compressor; equal on all islands of one layout.

    Attributes:
        common: plain JSON-able values, equal on all ranks of the island.
        layout_bound: tensors that only ranks of the same layout can read.
    """

    common: dict[str, Any] = field(default_factory=dict)
    layout_bound: dict[str, Tensor] = field(default_factory=dict)


class Compressor(Protocol):
    """Averages a fragment's pseudo-gradient in one or more passes.

    Changes of its state by a sync (warm start, rank) take effect in `commit`, equally on all islands; its
    `state_dict` is shared state, which an island that is behind receives.

    Attributes:
        interval_scale: sync interval over its initial value, as the compressor suggests; None = as set.
    """

    @property
    def interval_scale(self) -> float | None: ...

    def passes(self, tensors: list[Tensor]) -> CompressorPasses:
        """Yields tensors to average, receives their `MeanResult`, returns the `MeanResult` of the input."""

    def pass_grids(
        self, shapes: Sequence[Sequence[int]], grids: Sequence[BlockGrid]
    ) -> list[list[BlockGrid]]:
        """Returns the grids of the tensors that each pass of the next `passes` yields."""

    def commit(self) -> None:
        """Takes over what the last `passes` changed: its sync was committed."""

    def discard(self) -> None:
        """Drops what the last `passes` changed: its sync failed."""

    def state_dict(self) -> CompressorState:
        """Returns the state that a checkpoint must hold. Not copies."""

    def load_state_dict(self, state: CompressorState) -> None:
        """Continues from a saved or received state; layout-bound tensors that are missing are made anew."""


class DenseCompressor:
    """Averages the pseudo-gradient itself, in one pass."""

    interval_scale = None

    def passes(self, tensors: list[Tensor]) -> CompressorPasses:
        """Averages the input in one pass."""
        return (yield tensors)

    def pass_grids(
        self, shapes: Sequence[Sequence[int]], grids: Sequence[BlockGrid]
    ) -> list[list[BlockGrid]]:
        """Returns the grids of the input."""
        return [list(grids)]

    def commit(self) -> None:
        """No-op: there is no state."""

    def discard(self) -> None:
        """No-op: there is no state."""

    def state_dict(self) -> CompressorState:
        """Returns the empty state."""
        return CompressorState()

    def load_state_dict(self, state: CompressorState) -> None:
        """Accepts only the empty state: anything else was saved by another compressor."""
        if state.common or state.layout_bound:
            held = sorted([*state.common, *state.layout_bound])
            raise ValueError(f"a dense compressor has no state, got {held}")


def build_dense(config: OuterConfig, shards: Sequence[ParamShard]) -> DenseCompressor:
    """See `CodecEntry.compressor`."""
    return DenseCompressor()
