"""A message is opened only where it belongs; the error names the field and both values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilocox.errors import MessageError
from dilocox.outer.codec.registry import CODECS, CodecEntry
from dilocox.outer.codec.sizes import HEADER_BYTES, ScaledSizes
from dilocox.outer.wan.header import Header, SyncId, open_message, seal

SYNC = SyncId("run-a", fragment=3, outer_step=17, pass_index=1)
INT4, NF4 = CODECS.get("int4"), CODECS.get("nf4")
TOY = CodecEntry("toy", 200, ScaledSizes(4), "toys:build")
HEADER = Header(SYNC, codec=INT4, block_size=64, shot="scatter", sender=2, numel=100)


def sealed(num_bytes=54):
    message = torch.zeros(HEADER_BYTES + num_bytes, dtype=torch.uint8)
    message[HEADER_BYTES:] = torch.arange(num_bytes) % 251
    seal(message, HEADER)
    return message


def test_a_good_message_gives_its_payload():
    assert torch.equal(open_message(sealed(), HEADER), torch.arange(54, dtype=torch.uint8))


def test_an_empty_payload_is_fine():
    assert open_message(sealed(0), HEADER).numel() == 0


def test_a_payload_at_an_odd_address_is_moved():
    message = torch.cat((torch.zeros(3, dtype=torch.uint8), sealed()))[3:]
    payload = open_message(message, HEADER)
    assert payload.storage_offset() % 8 == 0
    assert torch.equal(payload, torch.arange(54, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (replace(HEADER, codec=NF4), "codec is int4, expected nf4"),
        (replace(HEADER, codec=TOY), "codec is int4, expected toy"),
        (replace(HEADER, shot="gather"), "shot is scatter, expected gather"),
        (replace(HEADER, sender=1), "sender is 2, expected 1"),
        (replace(HEADER, block_size=32), "block_size is 64, expected 32"),
        (replace(HEADER, numel=99), "numel is 100, expected 99"),
        (replace(HEADER, sync=replace(SYNC, fragment=0)), "fragment is 3, expected 0"),
        (replace(HEADER, sync=replace(SYNC, outer_step=18)), "outer_step is 17, expected 18"),
        (replace(HEADER, sync=replace(SYNC, pass_index=0)), "pass_index is 1, expected 0"),
        (
            replace(HEADER, sync=replace(SYNC, run_id="run-b")),
            r"run id hash is \w{16}, expected \w{16}",
        ),
    ],
)
def test_another_sync_is_refused_by_field(expected, text):
    with pytest.raises(MessageError, match=text):
        open_message(sealed(), expected)


@pytest.mark.parametrize(
    ("byte", "text"),
    [
        (0, "magic is .*LCX.*, expected b'DLCX'"),
        (4, "version is 253, expected 2"),
        (5, "codec is 252, expected int4"),
        (6, "shot is 255, expected scatter"),
        (8, "run id hash"),
        (16, "fragment"),
        (20, "pass_index"),
        (24, "outer_step"),
        (32, "sender"),
        (36, "block_size"),
        (40, "numel"),
        (48, "payload_bytes"),
        (56, "checksum is .* over the payload, expected .* as in the header"),
        (HEADER_BYTES, "checksum"),
        (HEADER_BYTES + 53, "checksum"),
    ],
)
def test_a_damaged_byte_is_found(byte, text):
    message = sealed()
    message[byte] ^= 0xFF
    with pytest.raises(MessageError, match=text):
        open_message(message, HEADER)


def test_every_bit_of_a_message_matters():
    for byte in range(len(sealed())):
        if byte == 7 or 60 <= byte < HEADER_BYTES:
            continue  # reserved
        for bit in range(8):
            message = sealed()
            message[byte] ^= 1 << bit
            with pytest.raises(MessageError):
                open_message(message, HEADER)


@pytest.mark.parametrize("length", [0, 63, 64, 117])
def test_a_cut_message_is_refused(length):
    with pytest.raises(MessageError, match=r"length|payload_bytes"):
        open_message(sealed()[:length], HEADER)


def test_the_error_says_where_it_happened():
    with pytest.raises(MessageError, match=r"position 2 \(fragment 3, outer step 17\)"):
        open_message(sealed(), replace(HEADER, numel=1))


def test_wire_ids_are_these_for_ever():
    """They are in the messages of every version; a new codec takes a new number."""
    known = {"none": 0, "bf16": 1, "int8": 2, "int4": 3, "nf4": 4, "e3m0": 5}
    assert {name: CODECS.get(name).wire_id for name in CODECS.wire_names()} == known
    for name, wire_id in known.items():
        message = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        seal(message, replace(HEADER, codec=CODECS.get(name)))
        assert message[5] == wire_id
