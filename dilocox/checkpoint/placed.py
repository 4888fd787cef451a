"""Shards as entries of Megatron's distributed checkpoint, written by one layout and read by any other.

Every entry is one whole parameter of one kind (`inner.master.NAME`, `inner.exp_avg.NAME`,
`outer.anchor.NAME` ...) in global coordinates. A shard may be any contiguous range of its block, which
megatron-core's `ShardedTensor` does not accept ("flattened_range is not supported"). Such a range is a few
rectangles, which it does accept, without a copy and without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dilocox.errors import CheckpointError
from dilocox.inner.initial_weights import EMBEDDING, TIED_OUTPUT
from dilocox.param_shard import ParamShard, ShardState

Shape = tuple[int, ...]
Contents = Mapping[str, TensorStorageMetadata]

_PADDED = (EMBEDDING, TIED_OUTPUT)
_WEIGHTS = ("anchor", "mode_reference")
"""Kinds of level 2 that are weights: padding rows that a checkpoint does not hold stay as they are."""


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Splits a range of the flattened tensor into rectangles, in the order of their elements.

    Args:
        shape: of the tensor.
        start, stop: the range, in elements.

    Yields:
        Offsets and shape of a rectangle, at most `2 * len(shape) - 1` of them.
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows in it are first ... last - 1
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def entries_to_save(prefix: str, kinds: Mapping[str, Iterable[ParamShard]]) -> dict[str, ShardedTensor]:
    """Returns this rank's part of the checkpoint; no other rank writes these elements.

    Args:
        prefix: `inner` or `outer`.
        kinds: shards of each kind, whose tensors are written. Views, no copies.
    """
    found: dict[str, ShardedTensor] = {}
    for kind, shards in kinds.items():
        for shard in shards:
            if shard.counted:  # of the equal copies of tensor parallel ranks one is written
                key = f"{prefix}.{kind}.{shard.name}"
                found.update(_entries(key, shard, shard.global_shape))
    return found


def entries_to_load(
    prefix: str, kinds: Mapping[str, Iterable[ParamShard]], contents: Contents
) -> dict[str, ShardedTensor]:
    """Returns what this rank reads: loading these entries fills the shards' tensors.

    Raises:
        CheckpointError: the checkpoint lacks one of them, or holds it with another shape. The vocabulary's
            padding is free: it depends on the tensor parallel size.
    """
    found: dict[str, ShardedTensor] = {}
    for kind, shards in kinds.items():
        for shard in shards:
            key = f"{prefix}.{kind}.{shard.name}"
            if key not in contents:
                raise CheckpointError(f"the checkpoint does not hold {key}")
            saved = tuple(contents[key].size)
            if saved != shard.global_shape and not _differs_in_padding(shard, saved):
                raise CheckpointError(
                    f"{key} has shape {saved} in the checkpoint, {shard.global_shape} in this run"
                )
            found.update(_entries(key, shard, saved))
    return found


def place(shards: Iterable[ParamShard], state: ShardState) -> dict[str, list[ParamShard]]:
    """Returns the tensors of level 2 as shards with global coordinates, by kind."""
    by_name = {shard.name: shard for shard in shards}
    if dotted := [kind for kind in state.tensors if "." in kind]:
        raise AssertionError(f"a kind ends at the first dot of its key, so {dotted} could not be read back")
    return {
        kind: [replace(by_name[name], tensor=tensor) for name, tensor in tensors.items()]
        for kind, tensors in state.tensors.items()
    }


def allocate(shards: Iterable[ParamShard], contents: Contents) -> ShardState:
    """Returns tensors on the CPU to load level 2 into, for what the checkpoint holds of these shards."""
    shards = list(shards)
    state = ShardState()
    for kind in sorted({key.split(".")[1] for key in contents if key.startswith("outer.")}):
        held = [shard for shard in shards if f"outer.{kind}.{shard.name}" in contents]
        state.tensors[kind] = {
            shard.name: shard.tensor.detach().to("cpu", copy=True)
            if kind in _WEIGHTS
            else torch.zeros_like(shard.tensor, device="cpu")
            for shard in held
        }
    return state


def read_contents(folder: Path) -> Contents:
    """Returns the tensors that a checkpoint holds, by key; reads no values."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    before = row * prod(shape[1:])
    for offsets, sizes in rectangles(shape[1:], start - before, stop - before):
        yield (row, *offsets), (1, *sizes)


def _entries(key: str, shard: ParamShard, global_shape: Shape) -> Iterator[tuple[str, ShardedTensor]]:
    """Yields the shard as rectangles of the global tensor, without rows beyond `global_shape`."""
    values = shard.tensor.detach().view(-1)
    done = 0
    rows = global_shape[0]
    for index, (inside, shape) in enumerate(
        rectangles(shard.block_shape, shard.start, shard.start + values.numel())
    ):
        part = values[done : done + prod(shape)].view(shape)
        done += prod(shape)
        offsets = tuple(first + more for first, more in zip(shard.offsets, inside, strict=True))
        part = part[: max(rows - offsets[0], 0)]
        if part.numel() > 0:
            yield (
                f"{key}/{index}",
                ShardedTensor(
                    key=key,
                    data=part,
                    dtype=part.dtype,
                    local_shape=tuple(part.shape),
                    global_shape=global_shape,
                    global_offset=offsets,
                    axis_fragmentations=None,  # the ranks' rectangles form no regular grid
                ),
            )


def _differs_in_padding(shard: ParamShard, saved: Shape) -> bool:
    return shard.name in _PADDED and saved[1:] == shard.global_shape[1:]
