"""The 64 bytes in front of every message, and the checks when one is opened. Level 2.

Little-endian: magic `DLCX`, version, codec, shot, one reserved byte, run hash (8 bytes), fragment, pass,
outer step, sender, block size, number of values, payload bytes, CRC-32 of the payload, 4 reserved bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from dilocox.errors import MessageError
from dilocox.outer.codec.registry import CODECS, CodecEntry
from dilocox.outer.codec.sizes import HEADER_BYTES

MAGIC = b"DLCX"
VERSION = 2
"""Increased when the meaning of a message changes. 2: blocks start at rows."""
_LAYOUT = struct.Struct("<4sBBBx8sIIQIIQQI4x")
_SHOTS = ("scatter", "gather")

Shot = Literal["scatter", "gather"]
"""scatter = an island's own values; gather = an averaged part."""


@dataclass(frozen=True)
class SyncId:
    """Identity of a sync; equal on all of its members.

    Attributes:
        run_id: of the run; its hash travels.
        fragment, outer_step: what is averaged.
        pass_index: number of the averaging inside this sync (`low_rank` has two).
    """

    run_id: str
    fragment: int
    outer_step: int
    pass_index: int = 0


@dataclass(frozen=True)
class Header:
    """Everything that the receiver knows about a message before it arrives; all of it is compared.

    Attributes:
        codec: that the payload is encoded in; its wire id travels.
        sender: position of the sending island among the members.
        numel: values in the payload.
    """

    sync: SyncId
    codec: CodecEntry
    block_size: int
    shot: Shot
    sender: int
    numel: int


def seal(message: Tensor, header: Header) -> None:
    """Writes the header into the first 64 bytes; the payload behind it must be complete.

    Args:
        message: uint8 [HEADER_BYTES + payload], CPU.
    """
    payload = message[HEADER_BYTES:]
    fields = _fields(header, payload.numel()).values()
    packed = _LAYOUT.pack(MAGIC, VERSION, *fields, _checksum(payload))
    message[:HEADER_BYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def open_message(message: Tensor, expected: Header) -> Tensor:
    """Checks a received message.

    Args:
        message: uint8, CPU, as received.
        expected: header that it must have.

    Returns: the payload, a view that starts at a multiple of 8 bytes (a copy if it did not).

    Raises:
        MessageError: names the field, and both values.
    """
    if message.numel() < HEADER_BYTES:
        raise _error(expected, "length", message.numel(), f"at least {HEADER_BYTES} bytes")
    payload = message[HEADER_BYTES:]
    magic, version, *rest, checksum = _LAYOUT.unpack(message[:HEADER_BYTES].numpy().tobytes())
    if magic != MAGIC:
        raise _error(expected, "magic", magic, MAGIC)
    if version != VERSION:
        raise _error(expected, "version", version, VERSION)
    # Field by field before the checksum: a message of another sync is named as such, not as damaged.
    for (field, value), got in zip(_fields(expected, payload.numel()).items(), rest, strict=True):
        if got != value:
            raise _error(expected, field, _readable(field, got, expected), _readable(field, value, expected))
    actual = _checksum(payload)
    if actual != checksum:
        raise _error(
            expected, "checksum", f"{actual:08x} over the payload", f"{checksum:08x} as in the header"
        )
    return payload if payload.storage_offset() % 8 == 0 else payload.clone()


def _fields(header: Header, payload_bytes: int) -> dict[str, int | bytes]:
    """Fields between version and checksum, in the order of the layout."""
    assert header.codec.wire_id is not None, f"{header.codec.name} crosses in {header.codec.carrier}"
    return {
        "codec": header.codec.wire_id,
        "shot": _SHOTS.index(header.shot),
        "run id hash": _run_hash(header.sync.run_id),
        "fragment": header.sync.fragment,
        "pass_index": header.sync.pass_index,
        "outer_step": header.sync.outer_step,
        "sender": header.sender,
        "block_size": header.block_size,
        "numel": header.numel,
        "payload_bytes": payload_bytes,
    }


def _readable(field: str, value: int | bytes, expected: Header) -> object:
    """Returns the name behind a number, if there is one."""
    if isinstance(value, bytes):
        return value.hex()
    if field == "codec":
        return expected.codec.name if value == expected.codec.wire_id else CODECS.wire_name(value)
    return _SHOTS[value] if field == "shot" and value < len(_SHOTS) else value


def _error(expected: Header, field: str, got: object, wanted: object) -> MessageError:
    sync = expected.sync
    return MessageError(
        f"message from island at position {expected.sender} (fragment {sync.fragment}, outer step "
        f"{sync.outer_step}): {field} is {got}, expected {wanted}"
    )


def _run_hash(run_id: str) -> bytes:
    return blake2b(run_id.encode(), digest_size=8).digest()


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data)
