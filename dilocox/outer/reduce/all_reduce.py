"""The average over the islands: two shots, quantised, in fixed order. Level 2.

Three islands and more (algorithms.md section 12.2): every island encodes each shard for its owner,
all-to-all, the owner decodes and averages in fp32 in island order, encodes again, all-gather. Two islands
swap whole messages: the same bytes, one quantisation. One island: its values are the mean, nothing is
sent and nothing is quantised.

Everybody, the owner included, uses what the others decode, so the mean has equal bits on all islands.
Sums take multiplications and additions one by one: a fused multiply-add would round differently elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.errors import WanError
from dilocox.outer.codec.base import Codec, MeanResult
from dilocox.outer.codec.sizes import HEADER_BYTES, Slice, cut_shards
from dilocox.outer.reduce.gather_feedback import GatherErrorFeedback, scaled
from dilocox.outer.wan.base import Transport
from dilocox.outer.wan.header import Header, Shot, SyncId, open_message, seal


def average(
    tensors: Sequence[Tensor],
    *,
    transport: Transport,
    codec: Codec,
    gather_codec: Codec,
    identity: SyncId,
    server: GatherErrorFeedback | None = None,
) -> MeanResult:
    """Averages tensors over the members of a round, weighted by `transport.weights`.

    A member of weight 0 abstains: it sends no values, owns its shard and takes the result.

    Args:
        tensors: fp32, any shapes, equal on all islands; not written to.
        transport: of the open round.
        codec: for values on their way to the owner, and for the swap.
        gather_codec: for averaged shards; used at three islands and more.
        identity: of this sync; goes into every header.
        server: residual of the gather half; None = what requantising loses is lost.

    Returns: mean and own share. `own` is such that `tensors - own` is the local residual; of an island
        that abstains it is zero.

    Raises:
        WanError: everybody abstains, or the exchange failed.
        MessageError: a message does not belong here or is damaged.
    """
    if not any(weight > 0 for weight in transport.weights):
        raise WanError("every island abstains from this sync")
    shapes = [tensor.shape for tensor in tensors]
    flat = [tensor.reshape(-1) for tensor in tensors]
    forwarded = _foreign_residual(transport, server)
    job = _CompressedAllReduce(_plus(flat, forwarded), transport, codec=codec, identity=identity)
    num_islands = len(transport.weights)
    if num_islands == 1:
        mean, own = [tensor.clone() for tensor in job.flat], job.flat
    elif num_islands == 2:
        mean, own = job.swap()
    else:
        mean, own = job.two_shots(gather_codec, server)
    if server is not None:
        server.stage(
            num_islands, transport.index, lost=job.lost, forwarded=transport.weights[transport.index] > 0
        )
    # What was passed on is in `own` but not in `tensors`.
    own = _plus(own, scaled(forwarded, -1.0))
    return MeanResult(_shaped(mean, shapes), _shaped(own, shapes))


class _CompressedAllReduce:
    """One averaging under way.

    Attributes:
        flat: what this island sends, fp32 1-D.
        lost: what requantising the owned shard lost, by slice.
    """

    def __init__(self, flat: list[Tensor], transport: Transport, *, codec: Codec, identity: SyncId) -> None:
        self.flat = flat
        self.lost: list[tuple[Slice, Tensor]] = []
        self._transport = transport
        self._weights = transport.weights
        self._me = transport.index
        self._codec = codec
        self._identity = identity
        self._device = flat[0].device if flat else torch.device("cpu")

    def swap(self) -> tuple[list[Tensor], list[Tensor]]:
        """Two islands: each sends its whole message. Returns: mean, own."""
        numels = [tensor.numel() for tensor in self.flat]
        message = self._scatter_message(self.flat)
        received = self._send([message, message], [self._scatter_bytes(k, numels) for k in range(2)])
        own = self._own([message], cut_shards(numels, self._codec.block_size, 1))
        return self._mean(received, numels), own

    def two_shots(
        self, gather_codec: Codec, server: GatherErrorFeedback | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Three islands and more. Returns: mean, own. In place: `lost`."""
        num_islands = len(self._weights)
        cut = cut_shards([tensor.numel() for tensor in self.flat], self._codec.block_size, num_islands)
        numels = [[place.numel for place in places] for places in cut]
        messages = [self._scatter_message(_slices(self.flat, places)) for places in cut]
        sizes = [self._scatter_bytes(k, numels[self._me]) for k in range(num_islands)]
        owned = self._mean(self._send(messages, sizes), numels[self._me])
        own = self._own(messages, cut)
        if server is not None:
            server.add_to_shard(num_islands, self._me, owned)
        mean = self._gather(gather_codec, owned, cut)
        if server is not None:
            decoded = _slices(mean, cut[self._me])
            differences = [exact - seen for exact, seen in zip(owned, decoded, strict=True)]
            self.lost = list(zip(cut[self._me], differences, strict=True))
        return mean, own

    def _gather(self, codec: Codec, owned: list[Tensor], cut: list[list[Slice]]) -> list[Tensor]:
        """Hands the owned shard to everybody. Returns: the whole mean, as everybody decodes it."""
        reply = self._message(codec, owned, "gather")
        numels = [[place.numel for place in places] for places in cut]
        sizes = [HEADER_BYTES + codec.num_bytes(shard) for shard in numels]
        replies = self._send([reply] * len(cut), sizes)
        mean = [torch.empty_like(tensor) for tensor in self.flat]
        for sender, (places, data) in enumerate(zip(cut, replies, strict=True)):
            payload = self._open(data, codec, "gather", sender, numels[sender])
            codec.decode_into(payload, _slices(mean, places))
        return mean

    def _scatter_message(self, values: Sequence[Tensor]) -> Tensor:
        if self._weights[self._me] > 0:
            return self._message(self._codec, values, "scatter")
        return torch.empty(0, dtype=torch.uint8)

    def _scatter_bytes(self, sender: int, numels: Sequence[int]) -> int:
        return HEADER_BYTES + self._codec.num_bytes(numels) if self._weights[sender] > 0 else 0

    def _message(self, codec: Codec, values: Sequence[Tensor], shot: Shot) -> Tensor:
        numels = [value.numel() for value in values]
        message = torch.empty(
            HEADER_BYTES + codec.num_bytes(numels), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        if self._device.type == "cpu":
            codec.encode_into(values, message[HEADER_BYTES:])
        else:
            message[HEADER_BYTES:].copy_(codec.encode(values))
        seal(message, self._header(codec, shot, self._me, sum(numels)))
        return message

    def _open(self, message: Tensor, codec: Codec, shot: Shot, sender: int, numels: Sequence[int]) -> Tensor:
        """Returns: the payload on the tensors' device."""
        payload = open_message(message, self._header(codec, shot, sender, sum(numels)))
        return payload.to(self._device)

    def _header(self, codec: Codec, shot: Shot, sender: int, numel: int) -> Header:
        return Header(self._identity, codec.name, codec.block_size, shot, sender, numel)

    def _send(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = self._transport.all_to_all(messages, sizes)
        for sender, (message, size) in enumerate(zip(received, sizes, strict=True)):
            if message.numel() != size:
                raise WanError(f"{message.numel()} bytes from member {sender}, expected {size}")
        return received

    def _mean(self, messages: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """Decodes in island order and averages in fp32."""
        total: list[Tensor] = []
        for sender, weight in enumerate(self._weights):
            if weight <= 0:
                continue
            payload = self._open(messages[sender], self._codec, "scatter", sender, numels)
            values = self._codec.decode(payload, numels)
            if weight != 1:
                values = [value.mul_(weight) for value in values]
            total = [t.add_(v) for t, v in zip(total, values, strict=True)] if total else values
        return [value.mul_(1.0 / sum(self._weights)) for value in total]

    def _own(self, messages: Sequence[Tensor], cut: Sequence[Sequence[Slice]]) -> list[Tensor]:
        """What the others decode from this island's messages, one a shard."""
        if self._weights[self._me] <= 0:
            return [torch.zeros_like(tensor) for tensor in self.flat]
        if self._codec.name == "none":
            return self.flat
        own = [torch.empty_like(tensor) for tensor in self.flat]
        for message, places in zip(messages, cut, strict=True):
            payload = message[HEADER_BYTES:].to(self._device)
            self._codec.decode_into(payload, _slices(own, places))
        return own


def _slices(flat: Sequence[Tensor], places: Sequence[Slice]) -> list[Tensor]:
    """Views."""
    return [flat[place.tensor][place.start : place.stop] for place in places]


def _plus(flat: list[Tensor], parts: Sequence[tuple[Slice, Tensor]]) -> list[Tensor]:
    """Adds values at their places; tensors that change are copied first."""
    result = list(flat)
    for tensor in {place.tensor for place, _ in parts}:
        result[tensor] = result[tensor].clone()
    for place, values in parts:
        result[place.tensor][place.start : place.stop] += values
    return result


def _foreign_residual(transport: Transport, server: GatherErrorFeedback | None) -> list[tuple[Slice, Tensor]]:
    """Residuals of an earlier cut, scaled so that the mean gains them in full through this island's share."""
    weight = transport.weights[transport.index]
    if server is None or weight <= 0:
        return []
    foreign = server.foreign(len(transport.weights), transport.index)
    return scaled(foreign, sum(transport.weights) / weight)


def _shaped(flat: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]
