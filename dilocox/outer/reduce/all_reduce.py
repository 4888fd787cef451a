"""The average over the islands: two shots, quantised, in fixed order. Level 2.

Three islands and more (docs/algorithms.md#two-shots): every island encodes each part of the fragment for the
part's owner, all-to-all; the owner decodes, aggregates in fp32 in island order and encodes again, all-gather.
Two islands swap whole messages: the same bytes, one quantisation. One island: its values are the mean;
nothing is sent and nothing is quantised.

Every island, the owner included, uses what the others decode, so the mean has equal bits on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from dilocox.errors import WanError
from dilocox.outer.codec.base import Codec, MeanResult
from dilocox.outer.codec.grid import BlockGrid, Slice, part_grids, partition
from dilocox.outer.codec.sizes import HEADER_BYTES
from dilocox.outer.reduce.aggregate import Aggregator, mean
from dilocox.outer.reduce.gather_feedback import GatherErrorFeedback, scaled
from dilocox.outer.wan.base import Transport
from dilocox.outer.wan.header import Header, Shot, SyncId, open_message, seal


@dataclass(frozen=True)
class Wire:
    """How values cross the WAN.

    Attributes:
        codec: for values on their way to the owner, and for the swap; names the collective strategy.
        gather_codec: for averaged parts; used at three islands and more.
        aggregate: what the owner makes of the islands' values.
    """

    codec: Codec
    gather_codec: Codec
    aggregate: Aggregator = mean


def all_reduce_mean(
    tensors: Sequence[Tensor],
    grids: Sequence[BlockGrid],
    *,
    transport: Transport,
    wire: Wire,
    sync: SyncId,
    feedback: GatherErrorFeedback | None = None,
) -> MeanResult:
    """Averages tensors over the members of a session, weighted by `transport.weights`.

    A member of weight 0 abstains: it sends no values, owns its part and takes the result.

    Args:
        tensors: fp32, any shapes, equal on all islands; not written to.
        grids: their blocks.
        transport: of the open session.
        wire: codecs and aggregation rule.
        sync: goes into every header.
        feedback: residual of the gather half; None: what requantising loses is dropped.

    Returns: the mean, and `own_decoded` such that `tensors - own_decoded` is the local residual; it is zero
        if this island abstains.

    Raises:
        WanError: all members abstain, or the collective failed.
        MessageError: a message does not belong here or is damaged.
    """
    if not any(weight > 0 for weight in transport.weights):
        raise WanError("every island abstains from this sync")
    shapes = [tensor.shape for tensor in tensors]
    flat = [tensor.reshape(-1) for tensor in tensors]
    forwarded = _stale_residual(transport, feedback)
    job = _CompressedAllReduce(_plus(flat, forwarded), grids, transport=transport, wire=wire, sync=sync)
    num_islands = len(transport.weights)
    if num_islands == 1:
        averaged, own = [tensor.clone() for tensor in job.flat], job.flat
    else:
        averaged, own = COLLECTIVES[wire.codec.entry.collective](job, feedback)
    if feedback is not None:
        # Staged, not kept: the vote that follows decides whether this sync counts.
        contributed = transport.weights[transport.index] > 0
        feedback.stage(num_islands, transport.index, lost=job.lost, forwarded=contributed)
    # What was forwarded is in `own` but not in `tensors`: it must not be taken for an error of the codec.
    own = _plus(own, scaled(forwarded, -1.0))
    return MeanResult(_shaped(averaged, shapes), _shaped(own, shapes))


class _CompressedAllReduce:
    """One averaging pass, for two islands or more.

    Attributes:
        flat: values of this island, stale residuals included, fp32 1-D.
        lost: what requantising the owned part lost, by slice.
    """

    def __init__(
        self,
        flat: list[Tensor],
        grids: Sequence[BlockGrid],
        *,
        transport: Transport,
        wire: Wire,
        sync: SyncId,
    ) -> None:
        self.flat = flat
        self.lost: list[tuple[Slice, Tensor]] = []
        self._grids = list(grids)
        self._transport = transport
        self._weights = transport.weights
        self._me = transport.index
        self._wire = wire
        self._sync = sync
        self._device = flat[0].device if flat else torch.device("cpu")

    def dense(self, feedback: GatherErrorFeedback | None) -> tuple[list[Tensor], list[Tensor]]:
        """Sends every value. Returns: mean, own decoded. In place: `lost`."""
        return self._swap() if len(self._weights) == 2 else self._two_shot(feedback)

    def _swap(self) -> tuple[list[Tensor], list[Tensor]]:
        """Swaps whole messages between two islands."""
        message = self._scatter_message(self.flat, self._grids)
        received = self._send([message, message], [self._scatter_bytes(k, self._grids) for k in range(2)])
        own = self._own([message], partition(self._grids, self._wire.codec.block_size, 1))
        return self._aggregate(received, self._grids), own

    def _two_shot(self, feedback: GatherErrorFeedback | None) -> tuple[list[Tensor], list[Tensor]]:
        """Sends values to the owners of the parts, and their means back: three islands and more."""
        num_islands = len(self._weights)
        parts = partition(self._grids, self._wire.codec.block_size, num_islands)
        grids = [part_grids(self._grids, slices) for slices in parts]
        messages = [
            self._scatter_message(_views(self.flat, slices), part)
            for slices, part in zip(parts, grids, strict=True)
        ]
        sizes = [self._scatter_bytes(k, grids[self._me]) for k in range(num_islands)]
        owned = self._aggregate(self._send(messages, sizes), grids[self._me])
        # From the messages themselves, the own part's included: the owner uses what the others decode.
        own = self._own(messages, parts)
        if feedback is not None:
            # Before the second encoding, so that this mean carries what the last one lost ...
            feedback.add_to_part(num_islands, self._me, parts[self._me], owned)
        averaged = self._gather(owned, parts)
        if feedback is not None:
            # ... and `lost` is what this encoding loses of both.
            decoded = _views(averaged, parts[self._me])
            differences = [exact - seen for exact, seen in zip(owned, decoded, strict=True)]
            self.lost = list(zip(parts[self._me], differences, strict=True))
        return averaged, own

    def _gather(self, owned: list[Tensor], parts: list[list[Slice]]) -> list[Tensor]:
        """Sends the owned part to all islands. Returns: the whole mean, as all of them decode it."""
        codec = self._wire.gather_codec
        grids = [part_grids(self._grids, slices) for slices in parts]
        reply = self._message(codec, owned, grids[self._me], "gather")
        sizes = [HEADER_BYTES + codec.num_bytes(part) for part in grids]
        replies = self._send([reply] * len(parts), sizes)
        averaged = [torch.empty_like(tensor) for tensor in self.flat]
        for sender, (slices, data) in enumerate(zip(parts, replies, strict=True)):
            # The own reply is decoded as well: the mean must have equal bits on all islands.
            payload = self._open(data, codec, "gather", sender, grids[sender])
            codec.decode_into(payload, grids[sender], _views(averaged, slices))
        return averaged

    def _scatter_message(self, values: Sequence[Tensor], grids: Sequence[BlockGrid]) -> Tensor:
        if self._weights[self._me] > 0:
            return self._message(self._wire.codec, values, grids, "scatter")
        return torch.empty(0, dtype=torch.uint8)

    def _scatter_bytes(self, sender: int, grids: Sequence[BlockGrid]) -> int:
        return HEADER_BYTES + self._wire.codec.num_bytes(grids) if self._weights[sender] > 0 else 0

    def _message(
        self, codec: Codec, values: Sequence[Tensor], grids: Sequence[BlockGrid], shot: Shot
    ) -> Tensor:
        message = torch.empty(
            HEADER_BYTES + codec.num_bytes(grids), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        if self._device.type == "cpu":
            codec.encode_into(values, grids, message[HEADER_BYTES:])
        else:
            message[HEADER_BYTES:].copy_(codec.encode(values, grids))
        seal(message, self._header(codec, shot, self._me, grids))
        return message

    def _open(
        self, message: Tensor, codec: Codec, shot: Shot, sender: int, grids: Sequence[BlockGrid]
    ) -> Tensor:
        """Returns: the payload on the tensors' device."""
        payload = open_message(message, self._header(codec, shot, sender, grids))
        return payload.to(self._device)

    def _header(self, codec: Codec, shot: Shot, sender: int, grids: Sequence[BlockGrid]) -> Header:
        numel = sum(grid.numel for grid in grids)
        return Header(self._sync, codec.entry, codec.block_size, shot, sender, numel)

    def _send(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = self._transport.all_to_all(messages, sizes)
        for sender, (message, size) in enumerate(zip(received, sizes, strict=True)):
            if message.numel() != size:
                raise WanError(f"{message.numel()} bytes from member {sender}, expected {size}")
        return received

    def _aggregate(self, messages: Sequence[Tensor], grids: Sequence[BlockGrid]) -> list[Tensor]:
        """Decodes in island order, one message at a time, and aggregates in fp32."""
        return self._wire.aggregate(self._contributions(messages, grids))

    def _contributions(
        self, messages: Sequence[Tensor], grids: Sequence[BlockGrid]
    ) -> Iterator[tuple[float, list[Tensor]]]:
        for sender, weight in enumerate(self._weights):
            if weight > 0:
                payload = self._open(messages[sender], self._wire.codec, "scatter", sender, grids)
                yield weight, self._wire.codec.decode(payload, grids)

    def _own(self, messages: Sequence[Tensor], parts: Sequence[Sequence[Slice]]) -> list[Tensor]:
        """Returns what the others decode from this island's messages, one message per part."""
        if self._weights[self._me] <= 0:
            return [torch.zeros_like(tensor) for tensor in self.flat]
        if self._wire.codec.name == "none":
            return self.flat
        own = [torch.empty_like(tensor) for tensor in self.flat]
        for message, slices in zip(messages, parts, strict=True):
            payload = message[HEADER_BYTES:].to(self._device)
            self._wire.codec.decode_into(payload, part_grids(self._grids, slices), _views(own, slices))
        return own


Collective = Callable[[_CompressedAllReduce, GatherErrorFeedback | None], tuple[list[Tensor], list[Tensor]]]

COLLECTIVES: Mapping[str, Collective] = MappingProxyType({"dense": _CompressedAllReduce.dense})
"""Strategies by the name in a codec's entry; their bytes are predicted in `predicted.py`."""


def _views(flat: Sequence[Tensor], slices: Sequence[Slice]) -> list[Tensor]:
    """Returns the values of slices, not copied."""
    return [flat[span.tensor][span.start : span.stop] for span in slices]


def _plus(flat: list[Tensor], parts: Sequence[tuple[Slice, Tensor]]) -> list[Tensor]:
    """Adds values at their slices; tensors that change are copied first."""
    result = list(flat)
    for tensor in {span.tensor for span, _ in parts}:
        result[tensor] = result[tensor].clone()
    for span, values in parts:
        result[span.tensor][span.start : span.stop] += values
    return result


def _stale_residual(transport: Transport, feedback: GatherErrorFeedback | None) -> list[tuple[Slice, Tensor]]:
    """Returns residuals of an earlier partition, scaled so that the mean gains exactly what they hold."""
    weight = transport.weights[transport.index]
    if feedback is None or weight <= 0:
        return []
    stale = feedback.stale(len(transport.weights), transport.index)
    return scaled(stale, sum(transport.weights) / weight)


def _shaped(flat: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]
