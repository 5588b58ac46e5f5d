"""Frames survive encoding, and everything malformed is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.errors import Damaged
from snapshotd.transport.image.frame import (
    MAX_CHUNK_BYTES,
    MAX_FILE_BYTES,
    PAGE_BYTES,
    Answer,
    Frame,
    Kind,
    data_frame,
    hole_frame,
    parse_answer,
    parse_header,
    zero_bitmap,
)

#: Pages of a few kinds: zero, zero except for one byte, full.
PAGE = st.one_of(
    st.just(bytes(PAGE_BYTES)),
    st.integers(0, PAGE_BYTES - 1).map(lambda at: bytes(at) + b"\x01" + bytes(PAGE_BYTES - at - 1)),
    st.just(b"\xa5" * PAGE_BYTES),
)
DATA = st.tuples(st.lists(PAGE, max_size=40), st.binary(max_size=100)).map(lambda parts: b"".join(parts[0]) + parts[1])


def rebuilt(frame: Frame) -> bytes:
    out = bytearray(frame.length)
    at = 0
    for start, end in frame.runs():
        out[start:end] = frame.payload[at : at + end - start]
        at += end - start
    assert at == frame.payload_bytes
    return bytes(out)


def over_the_wire(frame: Frame) -> Frame:
    arrived = parse_header(frame.header())
    arrived.payload = frame.payload
    return arrived


@given(DATA, st.integers(0, MAX_FILE_BYTES // 2), st.integers(0, 2**64 - 1))
def test_chunk_survives_encoding_without_its_zero_pages(data: bytes, offset: int, sequence: int) -> None:
    frame = data_frame(sequence, "pages-1.img", offset, data)
    arrived = over_the_wire(frame)
    assert arrived == frame
    assert arrived.intact()
    assert rebuilt(arrived) == data
    pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
    assert arrived.payload_bytes == sum(len(page) for page in pages if any(page))


def test_chunk_without_zero_pages_has_no_bitmap() -> None:
    assert zero_bitmap(b"\x01" * (5 * PAGE_BYTES + 3)) == b""
    assert zero_bitmap(b"") == b""


@given(DATA.filter(any), st.data())
def test_every_flipped_bit_is_detected(data: bytes, choice: st.DataObject) -> None:
    frame = data_frame(7, "pages-1.img", 0, data, strong=choice.draw(st.booleans()))
    header, payload = bytearray(frame.header()), bytearray(frame.payload)
    bit = choice.draw(st.integers(0, (len(header) + len(payload)) * 8 - 1))
    part, at = (header, bit // 8) if bit < len(header) * 8 else (payload, bit // 8 - len(header))
    part[at] ^= 1 << bit % 8
    try:
        arrived = parse_header(bytes(header))
    except Damaged:
        return
    arrived.payload = bytes(payload)
    # The reserved byte of the header has no meaning: it is ignored.
    assert not arrived.intact() or arrived == frame


@given(st.binary(max_size=300))
def test_random_bytes_are_damaged(message: bytes) -> None:
    with pytest.raises(Damaged):
        parse_header(message)
    with pytest.raises(Damaged):
        parse_answer(message)


@given(
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=300),
)
def test_plausible_header_is_valid_or_damaged(
    kind: int, name_bytes: int, offset: int, length: int, payload_bytes: int, rest: bytes
) -> None:
    fixed = struct.pack(">4sBBBxQQQI", b"SNPI", 1, kind, name_bytes, 1, offset, length, payload_bytes)
    try:
        frame = parse_header(fixed + bytes(16) + rest)
    except Damaged:
        return
    assert frame.offset + frame.length <= MAX_FILE_BYTES
    assert frame.payload_bytes <= MAX_CHUNK_BYTES
    assert "/" not in frame.name


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc/passwd", "a/b", ".sealed", "..", "A.img", "a" * 65, "a\x00b", "x\n", "é.img", "-x"]
)
def test_invalid_file_name_is_damaged(name: str) -> None:
    with pytest.raises(Damaged, match="is not the name of an image file"):
        parse_header(hole_frame(1, name, 0, 1).header())


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Frame(Kind.DATA, 1, "a", 0, MAX_CHUNK_BYTES + 1, payload_bytes=MAX_CHUNK_BYTES + 1), "at most"),
        (Frame(Kind.DATA, 1, "a", 0, 2**63, payload_bytes=2**32 - 1), "beyond"),
        (Frame(Kind.DATA, 1, "a", MAX_FILE_BYTES, 1, payload_bytes=1), "beyond"),
        (Frame(Kind.DATA, 1, "a", 0, 10, payload_bytes=11), "announces 11 bytes"),
        (Frame(Kind.DATA, 1, "a", 0, 0), "a chunk of 0 bytes"),
        (Frame(Kind.DATA, 1, "a", 0, PAGE_BYTES, bitmap=b"\x00"), "must be a hole"),
        (Frame(Kind.DATA, 1, "a", 0, PAGE_BYTES, bitmap=b"\x03", payload_bytes=PAGE_BYTES), "beyond the chunk's 1"),
        (Frame(Kind.DATA, 1, "a", 0, PAGE_BYTES, bitmap=b"\x01\x00", payload_bytes=PAGE_BYTES), "bitmap of 2 bytes"),
        (Frame(Kind.HOLE, 1, "a", 0, 10, bitmap=b"\x01"), "a hole has a bitmap"),
        (Frame(Kind.HOLE, 1, "a", 0, 10, payload_bytes=10), "announces 10 bytes"),
        (Frame(Kind.OK, 1, "a", 0, 10), "where a chunk was expected"),
    ],
)
def test_absurd_header_is_refused_with_a_reason(frame: Frame, reason: str) -> None:
    frame.digest = bytes(16)
    with pytest.raises(Damaged, match=reason):
        parse_header(frame.header())


def test_truncated_header_is_damaged() -> None:
    header = data_frame(1, "pages-1.img", 0, bytes(PAGE_BYTES) + b"x" * PAGE_BYTES).header()
    for cut in range(len(header)):
        with pytest.raises(Damaged):
            parse_header(header[:cut])


@given(st.sampled_from([Kind.OK, Kind.BAD, Kind.ERROR]), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_answer_survives_encoding(kind: Kind, sequence: int, text: bytes) -> None:
    answer = Answer(kind, sequence, text)
    assert parse_answer(answer.message()) == answer


def test_long_answer_is_cut_to_what_can_be_parsed() -> None:
    assert len(parse_answer(Answer(Kind.ERROR, text=b"x" * 100_000).message()).text) == 16 << 10
