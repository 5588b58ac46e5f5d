"""Tests of the codec and of the daemon's end of a link with invalid input."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shim.keeper.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Decoder, Frame, FrameError, decode, encode
from snapshotd.api.errors import Damaged
from snapshotd.keepers.hello import parse_hello
from tests.keeper.nodes import Node

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
headers = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "t"), json_values, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=10), headers, st.binary(max_size=300)), max_size=4),
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
)
def test_frames_are_decoded_from_arbitrary_pieces(
    sent: list[tuple[str, dict[str, Any], bytes]], sizes: list[int]
) -> None:
    stream = b"".join(encode(*frame) for frame in sent)
    decoder, found = Decoder(), []
    for size in itertools.cycle(sizes):
        found += list(decoder.feed(stream[:size]))
        stream = stream[size:]
        if not stream:
            break
    assert found == [Frame({"t": kind, **fields}, payload) for kind, fields, payload in sent]
    assert decoder.pending_bytes == 0


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_or_raise_frame_error(noise: bytes) -> None:
    decoder = Decoder()
    try:
        for frame in decoder.feed(noise):
            assert isinstance(frame.header["t"], str)
    except FrameError:
        pass
    assert decoder.pending_bytes <= len(noise)


def _raw(head: bytes, payload: bytes = b"", head_bytes: int | None = None) -> bytes:
    rest = struct.pack("!H", len(head) if head_bytes is None else head_bytes) + head + payload
    return struct.pack("!I", len(rest)) + rest


@pytest.mark.parametrize(
    "broken",
    [
        struct.pack("!I", 0),
        struct.pack("!I", 0xFFFFFFFF),
        _raw(b"not json"),
        _raw(b"[]"),
        _raw(b"{}"),
        _raw(b'{"t": 5}'),
        _raw(b"\xff\xfe"),
        _raw(b"[" * 60000),
        _raw(b'{"t": "x"}', head_bytes=500),
        _raw(b'{"t": "x"}', bytes(MAX_PAYLOAD_BYTES + 1)),
    ],
)
def test_invalid_frames_are_refused(broken: bytes) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(broken))


def test_oversized_frame_is_not_encoded() -> None:
    assert decode(encode("x", {}, bytes(MAX_PAYLOAD_BYTES))).payload == bytes(MAX_PAYLOAD_BYTES)
    with pytest.raises(FrameError):
        encode("x", {}, bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(FrameError):
        encode("x", {"long": "y" * MAX_HEADER_BYTES})
    with pytest.raises(FrameError):
        decode(encode("x") + b"more")


GOOD = {"role": "home", "job": "job", "rank": 1, "relay_key": "0" * 32, "pid": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"role": "king"},
        {"uid": "../../etc/passwd"},
        {"uid": "a/b"},
        {"uid": "x" * 81},
        {"job": ".hidden"},
        {"job": 7},
        {"rank": -1},
        {"rank": True},
        {"rank": "1"},
        {"pid": 1 << 40},
        {"relay_key": "short"},
        {"move": "m-1\n"},
        {"home_endpoint": "host:1/../x"},
        {"stdio": []},
        {"inherit": [{"key": "pipe:[1]", "fd": 0}]},
        {"inherit": "all"},
        {"exited": 70000},
        {"started_unix_s": "yesterday"},
        {"moves": None},
    ],
)
def test_hello_with_an_invalid_field_is_refused(change: dict[str, Any]) -> None:
    parse_hello(decode(encode("hello", GOOD)), 0)
    with pytest.raises(FrameError):
        parse_hello(decode(encode("hello", {**GOOD, **change})), 0)


@given(st.dictionaries(st.sampled_from([*GOOD, "uid", "stdio", "inherit", "exited", "move", "cwd"]), json_values))
def test_arbitrary_hello_is_accepted_or_refused(fields: dict[str, Any]) -> None:
    try:
        hello = parse_hello(decode(encode("hello", {**GOOD, **fields})), 0)
    except FrameError:
        return
    assert hello.role in ("home", "guest")
    assert "/" not in hello.uid + hello.job + hello.move


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.binary(max_size=100)
        | st.builds(encode, st.sampled_from(["hello", "held", "stdio", "exited", "died", "out", "nonsense"]), headers),
        max_size=4,
    ),
    st.booleans(),
)
def test_invalid_bytes_on_one_link_do_not_affect_another(pieces: list[bytes], greets_first: bool) -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory() as folder:
            node = await Node(Path(folder)).start()
            _, quiet = await asyncio.open_unix_connection(node.socket)
            quiet.write(encode("hello", {**GOOD, "job": "quiet"}))
            link = await node.reported("connected")
            # Both links are from this process, and a keeper's new link replaces its old one, so the first is forgotten.
            node.links._links.clear()
            reader, noisy = await asyncio.open_unix_connection(node.socket)
            if greets_first:
                noisy.write(encode("hello", GOOD))
            noisy.writelines(pieces)
            noisy.write_eof()
            await reader.read()
            noisy.close()
            assert not link.closed.is_set()
            quiet.close()
            await node.stop()

    asyncio.run(scenario())


async def test_another_node_cannot_send_control_frames(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    for frame in (encode("kill"), encode("hold", {"move": "m-1"}), b"", b"noise", json.dumps({"t": "out"}).encode()):
        with pytest.raises(Damaged):
            await link.send_relay(frame)
    assert keeper.returncode is None
    await link.hold("m-0123456789ab")


async def test_invalid_relay_frames_do_not_end_a_keeper(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    await link.hold("m-0123456789ab")
    await link.drain("m-0123456789ab")
    await link.away("m-0123456789ab", "node-2")
    for fields in ({}, {"c": 5, "o": "x"}, {"c": "1", "o": -5}, {"in": 99, "sig": 0}, {"status": "bad", "id": []}):
        for kind in ("sync", "out", "ack", "in", "inack", "sig", "sigack", "exit", "win"):
            await link.send_relay(encode(kind, fields))
    await link.send_relay(encode("sync", {"in": 0, "sig": 0}))
    await link.send_relay(encode("exit", {"status": 4 << 8}))
    assert await keeper.wait() == 4
