"""Which peers are admitted, and what happens to input that no honest peer sends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.errors import Damaged, Denied, Internal, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake
from snapshotd.transport.device.connection import SealedStripe, read_reply
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    MAX_STRIPE_BYTES,
    REPLY_BYTES,
    Kind,
    Record,
    StripeError,
    digest_of,
    error_reply,
    parse_error,
    parse_header,
    parse_reply,
    reply,
)
from snapshotd.transport.device.stripe_names import purpose_of
from snapshotd.transport.listener import KEY_BYTES
from snapshotd.transport.sealed import Connection
from tests.transport.device.channel import TARGET, Nodes, credentials_of, noise, until

HELLO = b"hello"


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[socket.socket]:
    with socket.socket() as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        yield connection


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def admitted(nodes: Nodes, incoming: Incoming, plain: socket.socket) -> Connection:
    plain.settimeout(60)
    with plain.dup() as same:
        about = (nodes.context(), nodes.source, TARGET, purpose_of(0, "a"))
        joined, keys = await in_thread(handshake.join, same, incoming.key, *about)
        joined.close()
    plain.settimeout(60)
    connection = SealedStripe(plain, keys) if nodes.encrypted else Connection(plain)
    assert await in_thread(read_reply, connection) == (Kind.HAVE, 0)
    return connection


async def arrives(nodes: Nodes, incoming: Incoming) -> None:
    """An honest source is still admitted."""
    content = noise(1000)
    nodes.fill({"a": content})
    async with nodes.outgoing(incoming.port, incoming.key, ["a"]) as outgoing:
        outgoing.finish({"a": 1000})
        await outgoing.wait()
        assert await incoming.wait(30) == {"a": 1000}
    assert nodes.arrived(["a"]) == {"a": content}


# ---------------------------------------------------------------- the key


async def test_source_without_the_key_is_denied(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    async with nodes.incoming(["a"]) as incoming:
        with pytest.raises(Denied, match="that is not the key of the device-memory channel"):
            async with nodes.outgoing(incoming.port, secrets.token_bytes(KEY_BYTES), ["a"]):
                pass
        await until(lambda: "is rejected: that is not the key" in caplog.text)
        await arrives(nodes, incoming)


async def test_another_node_is_denied_although_it_has_the_key(plain: Nodes, tmp_path: Path) -> None:
    async with plain.incoming(["a"]) as incoming:
        genuine, plain.source = plain.source, credentials_of(tmp_path / "ca", "node-3")
        with pytest.raises(Denied, match="node:node-3 is not the source of the device-memory channel"):
            async with plain.outgoing(incoming.port, incoming.key, ["a"]):
                pass
        plain.source = genuine
        await arrives(plain, incoming)


async def test_target_that_is_another_node_is_unreachable(plain: Nodes, tmp_path: Path) -> None:
    plain.target = credentials_of(tmp_path / "ca", "node-3")
    async with plain.incoming(["a"]) as incoming:
        with pytest.raises(Unreachable, match="not valid for 'node-2'"):
            async with plain.outgoing(incoming.port, incoming.key, ["a"]):
                pass


async def closed_by_target(connection: socket.socket) -> None:
    """The target has closed the connection and sent nothing."""
    async with asyncio.timeout(30):
        try:
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        except ConnectionResetError:
            return


async def test_nodes_with_different_stripe_names_are_denied(plain: Nodes) -> None:
    async with plain.incoming(["a", "b"]) as incoming:
        for names in (["b", "a"], ["a", "b", "c"], ["a", "c"]):
            with pytest.raises(Denied, match="has no stripe"):
                async with plain.outgoing(incoming.port, incoming.key, names):
                    pass


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", b"\x16\x03\x01" + bytes(100), bytes(100)],
    ids=["http", "tls", "zeros"],
)
async def test_peer_that_does_not_shake_hands_is_logged_and_rejected(
    plain: Nodes, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    loop = asyncio.get_running_loop()
    async with plain.incoming(["a"]) as incoming:
        async with connected(incoming.port) as connection:
            await loop.sock_sendall(connection, sent)
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.wait_for(loop.sock_recv(connection, 1000), 60):  # an alert
                    pass
        await until(lambda: "is rejected" in caplog.text)
        await arrives(plain, incoming)


async def test_silent_connections_are_closed_after_the_time_limit(
    plain: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotd.transport.sockets.CONNECT_S", 0.2)
    async with plain.incoming(["a"]) as incoming:
        silent = [socket.create_connection(("127.0.0.1", incoming.port)) for _ in range(40)]
        for connection in silent:
            connection.setblocking(False)
            await closed_by_target(connection)
            connection.close()
        await arrives(plain, incoming)


async def test_source_is_admitted_among_silent_connections(plain: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.sockets.CONNECT_S", 600.0)
    async with plain.incoming(["a"]) as incoming, AsyncExitStack() as silent:
        for _ in range(40):
            await silent.enter_async_context(connected(incoming.port))
        await arrives(plain, incoming)


async def test_connection_made_during_close_is_closed(plain: Nodes) -> None:
    """A socket that is never closed is a ResourceWarning, which fails the test."""
    for turns in range(5):
        async with plain.incoming(["a"]) as incoming:
            with socket.create_connection(("127.0.0.1", incoming.port)) as connection:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await incoming.close()
                connection.setblocking(False)
                await closed_by_target(connection)
    gc.collect()


async def test_connection_that_waited_for_a_descriptor_is_admitted(
    plain: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    async with plain.incoming(["a"]) as incoming:
        with socket.socket() as connection:
            connection.setblocking(False)
            with no_descriptor_left():
                await loop.sock_connect(connection, ("127.0.0.1", incoming.port))
                await until(lambda: "no connection can be accepted now: Too many open files" in caplog.text)
            await admitted(plain, incoming, connection)
        assert incoming.failed is None


# ---------------------------------------------------------------- encryption


async def test_encrypted_and_plain_nodes_do_not_connect(nodes: Nodes) -> None:
    nodes.fill({"a": HELLO})
    async with nodes.incoming(["a"]) as incoming:
        nodes.encrypted = not nodes.encrypted
        with pytest.raises((Unreachable, Damaged)):
            async with nodes.outgoing(incoming.port, incoming.key, ["a"]):
                pass
        assert incoming.failed is None
    assert nodes.arrived(["a"]) == {"a": b""}


@pytest.mark.parametrize("key", [b"", b"short"])
async def test_key_of_wrong_length_is_refused(nodes: Nodes, key: bytes) -> None:
    with pytest.raises(Internal, match=f"sent a key of {len(key)} bytes"):
        async with nodes.outgoing(1, key, ["a"]):
            pass


# ---------------------------------------------------------------- records


def data(content: bytes, offset: int = 0) -> tuple[bytes, bytes]:
    return Record(Kind.DATA, len(content), offset, 0, digest_of(content)).header(), content


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([Record(Kind.END, 0, 100).header()], "END record for 100 where 0 bytes have arrived"),
        ([Record(Kind.END, 7, 0).header()], "an END of 7 bytes"),
        (data(HELLO, 1), "DATA record for 1 where 0"),
        ([*data(HELLO), *data(HELLO, 4)], "DATA record for 4 where 5"),
        ([*data(HELLO), Record(Kind.SAME, 5, 5, 1, digest_of(HELLO)).header()], "repeats 1, which has not arrived yet"),
        ([Record(Kind.DATA, MAX_RECORD_BYTES + 1, 0).header()], "at most"),
        ([Record(Kind.ZERO, 0, 0).header()], "a record of 0 bytes"),
        ([Record(Kind.HAVE, 5, 0).header()], "a record of kind 16"),
        ([Record(Kind.END, 0, 0).header(), *data(HELLO)], "after the end"),
    ],
    ids=["size", "long end", "gap", "overlap", "twin", "large", "empty", "kind", "late"],
)
async def test_contradictory_record_fails_the_transfer(nodes: Nodes, sent: Sequence[bytes], why: str) -> None:
    async with nodes.incoming(["a"]) as incoming, connected(incoming.port) as plain:
        connection = await admitted(nodes, incoming, plain)
        connection.send(*sent)
        if sent[0] == Record(Kind.END, 0, 0).header():
            assert await in_thread(read_reply, connection) == (Kind.DONE, 0)
        with pytest.raises(StripeError, match=why) as caught:
            await in_thread(read_reply, connection)
        assert (caught.value.code, caught.value.retry) == ("damaged", False)
        if "after" not in why:
            with pytest.raises(Damaged, match=why):
                await incoming.wait(30)
    assert nodes.arrived(["a"])["a"] in (b"", HELLO)


@pytest.mark.parametrize(
    "sent",
    [
        [bytes(HEADER_BYTES)],
        [b"\xff" * HEADER_BYTES],
        [data(HELLO)[0], b"hellO"],
        [Record(Kind.ZERO, 5, 0, 0, digest_of(HELLO)).header()],
    ],
    ids=["zeros", "ones", "payload", "not zero"],
)
async def test_damaged_record_may_be_sent_again(plain: Nodes, sent: Sequence[bytes]) -> None:
    async with plain.incoming(["a"]) as incoming:
        async with connected(incoming.port) as peer:
            connection = await admitted(plain, incoming, peer)
            connection.send(*sent)
            with pytest.raises(StripeError) as caught:
                await in_thread(read_reply, connection)
            assert (caught.value.code, caught.value.retry) == ("damaged", True)
        await arrives(plain, incoming)


async def test_repetition_is_checked_against_its_digest(nodes: Nodes) -> None:
    async with nodes.incoming(["a"]) as incoming, connected(incoming.port) as plain:
        connection = await admitted(nodes, incoming, plain)
        connection.send(*data(HELLO))
        connection.send(Record(Kind.SAME, 5, 5, 0, digest_of(b"other")).header())
        with pytest.raises(StripeError, match="the record at 5 arrived damaged"):
            await in_thread(read_reply, connection)
    assert nodes.arrived(["a"]) == {"a": HELLO}


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.integers(0, MAX_STRIPE_BYTES))
def test_random_header_is_a_stripe_error(header: bytes, have: int) -> None:
    with pytest.raises(StripeError):
        parse_header(header, have)


@given(
    st.sampled_from([Kind.DATA, Kind.ZERO, Kind.SAME, Kind.END]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_accepted_record_fits_its_position(kind: Kind, length: int, offset: int, twin: int) -> None:
    record = Record(kind, length, offset, twin)
    try:
        found = parse_header(record.header(), offset)
    except StripeError:
        return
    assert found == record
    assert length <= MAX_RECORD_BYTES
    assert kind is Kind.END or (length and offset + length <= MAX_STRIPE_BYTES)
    assert kind is not Kind.SAME or twin + length <= offset


@given(st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES), st.binary())
def test_random_reply_is_a_stripe_error(header: bytes, text: bytes) -> None:
    with pytest.raises(StripeError):
        parse_reply(header)
    assert isinstance(parse_error(0, text), StripeError)


def test_error_survives_encoding() -> None:
    encoded, text = error_reply(StripeError("full", "ü" * 10_000, retry=True))
    kind, value, text_bytes = parse_reply(encoded)
    decoded = parse_error(value, text)
    assert (kind, text_bytes) == (Kind.ERROR, len(text))
    assert (decoded.code, decoded.retry, decoded.message) == ("full", True, "ü" * 1024)
    assert parse_reply(reply(Kind.DONE, 7)) == (Kind.DONE, 7, 0)
