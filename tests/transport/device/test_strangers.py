"""Who is let in, and what becomes of records that nobody honest would send."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.errors import Damaged, Denied, Internal, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.connection import Connection, SealedConnection, read_reply
from snapshotd.transport.device.handover import Keys
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.key import KEY_BYTES, prove_source, prove_target
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    MAX_STRIPE_BYTES,
    REPLY_BYTES,
    Kind,
    Record,
    Trouble,
    digest_of,
    parse_header,
    parse_reply,
    parse_trouble,
    reply,
    trouble_reply,
)
from tests.transport.device.lane import Ends, noise, until

HELLO = b"hello"
LANE_KEY = secrets.token_bytes(KEY_BYTES)


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


async def admitted(ends: Ends, incoming: Incoming, plain: socket.socket) -> Connection:
    keys = await prove_source(plain, incoming.key, 0, "a")
    plain.settimeout(30)
    connection = SealedConnection(plain, keys) if ends.encrypted else Connection(plain)
    assert await in_thread(read_reply, connection) == (Kind.HAVE, 0)
    return connection


async def arrives(ends: Ends, incoming: Incoming) -> None:
    """An honest source still gets through."""
    content = noise(1000)
    ends.fill({"a": content})
    async with ends.outgoing(incoming.port, incoming.key, ["a"]) as outgoing:
        outgoing.finish({"a": 1000})
        await outgoing.wait()
        assert await incoming.wait(30) == {"a": 1000}
    assert ends.arrived(["a"]) == {"a": content}


# ---------------------------------------------------------------- the key


async def test_a_target_that_has_another_key_gets_nothing(ends: Ends) -> None:
    async with ends.incoming(["a"]) as incoming:
        with pytest.raises(Denied, match="does not hold the key"):
            async with ends.outgoing(incoming.port, secrets.token_bytes(KEY_BYTES), ["a"]):
                pass
        await arrives(ends, incoming)


def greeting(stripe: int = 0) -> bytes:
    return b"SNSK" + bytes([2, stripe, 0, 0]) + secrets.token_bytes(32)


async def left_alone(connection: socket.socket) -> None:
    """The target has hung up without another word."""
    async with asyncio.timeout(30):
        try:
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        except ConnectionResetError:
            return


async def test_ends_that_call_a_stripe_differently_do_not_meet(plain: Ends) -> None:
    async with plain.incoming(["a", "b"]) as incoming:
        with pytest.raises(Denied, match=r"does not hold the key of [ab]"):
            async with plain.outgoing(incoming.port, incoming.key, ["b", "a"]):
                pass


async def test_who_does_not_hold_the_key_is_not_let_in(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    async with ends.incoming(["a"]) as incoming:
        async with connected(incoming.port) as connection:
            await loop.sock_sendall(connection, greeting())
            assert len(await loop.sock_recv(connection, 1000)) == 64
            await loop.sock_sendall(connection, secrets.token_bytes(32))
            await left_alone(connection)
        assert "who connects does not hold the key" in caplog.text
        await arrives(ends, incoming)


async def test_an_answer_serves_for_no_other_part_and_no_other_stripe(
    plain: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who only repeats what the target says."""
    loop = asyncio.get_running_loop()
    async with plain.incoming(["a"]) as incoming, connected(incoming.port) as connection:
        await loop.sock_sendall(connection, greeting())
        answer = await loop.sock_recv(connection, 1000)
        await loop.sock_sendall(connection, answer[32:])
        await left_alone(connection)
        assert "does not hold the key" in caplog.text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", "is no greeting"),
        (b"\x16\x03\x01" + bytes(100), "is no greeting"),
        (greeting(1), "there is no stripe 1"),
        (greeting(255), "there is no stripe 255"),
    ],
    ids=["http", "tls", "one too many", "many too many"],
)
async def test_strange_words_are_logged_and_forgotten(
    plain: Ends, caplog: pytest.LogCaptureFixture, words: bytes, why: str
) -> None:
    async with plain.incoming(["a"]) as incoming:
        async with connected(incoming.port) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, words)
            await left_alone(connection)
        assert why in caplog.text
        await arrives(plain, incoming)


async def test_strangers_who_say_nothing_keep_nobody_out(plain: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.device.incoming.CONNECT_S", 0.2)
    async with plain.incoming(["a"]) as incoming:
        silent = [socket.create_connection(("127.0.0.1", incoming.port)) for _ in range(40)]
        for connection in silent:
            connection.setblocking(False)
            await left_alone(connection)
            connection.close()
        await arrives(plain, incoming)


async def test_the_source_is_let_in_among_strangers_who_hang_on(plain: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.device.incoming.CONNECT_S", 600.0)
    async with plain.incoming(["a"]) as incoming, AsyncExitStack() as silent:
        for _ in range(40):
            await silent.enter_async_context(connected(incoming.port))
        await arrives(plain, incoming)


async def test_who_comes_while_it_closes_is_not_forgotten(plain: Ends) -> None:
    """A connection that nobody closes is a warning, and that an error."""
    for turns in range(5):
        async with plain.incoming(["a"]) as incoming:
            with socket.create_connection(("127.0.0.1", incoming.port)) as connection:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await incoming.close()
                connection.setblocking(False)
                await left_alone(connection)
    gc.collect()


async def test_a_daemon_without_descriptors_lets_in_who_waited(plain: Ends, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    async with plain.incoming(["a"]) as incoming:
        with socket.socket() as connection:
            connection.setblocking(False)
            with no_descriptor_left():
                await loop.sock_connect(connection, ("127.0.0.1", incoming.port))
                await until(lambda: "nobody can be let in now: Too many open files" in caplog.text)
            await admitted(plain, incoming, connection)
        assert incoming.failed is None


# ---------------------------------------------------------------- seals


async def proven(name: str = "a") -> tuple[Keys, Keys]:
    """What both ends derive for a connection: the source's, the target's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        sources, (_, targets) = await asyncio.gather(
            prove_source(ours, LANE_KEY, 0, name), prove_target(theirs, LANE_KEY, [name])
        )
    return sources, targets


async def test_every_connection_and_direction_has_a_key_of_its_own() -> None:
    seen: set[bytes] = {LANE_KEY}
    for _ in range(3):
        sources, targets = await proven()
        assert (sources.sends, sources.reads) == (targets.reads, targets.sends)
        for key in (sources.sends, sources.reads):
            assert len(key) == 32
            assert key not in seen
            seen.add(key)
        assert sources.sends.hex() not in repr(sources)
        assert Keys.of(sources.message()) == sources


def sealed_by(key: bytes, messages: Sequence[bytes]) -> list[bytes]:
    """Each as it travels."""
    ours, theirs = socket.socketpair()
    with SealedConnection(ours, Keys(key, key)) as sender, theirs:
        travelled = []
        for message in messages:
            sender.send(message)
            travelled.append(theirs.recv(1 << 16))
    return travelled


def opened_by(key: bytes, stream: bytes, lengths: Sequence[int]) -> tuple[list[bytes], bool]:
    """(what a reader that expects messages of these lengths takes for true, whether it says why that is not all)."""
    ours, theirs = socket.socketpair()
    read = []
    with SealedConnection(ours, Keys(key, key)) as reader:
        with theirs:
            theirs.sendall(stream)
        try:
            for length in lengths:
                blob = bytearray(length)
                reader.read_into(memoryview(blob))
                read.append(bytes(blob))
        except (Trouble, ConnectionResetError) as error:
            return read, not isinstance(error, Trouble) or (error.code, error.again) == ("damaged", True)
    return read, False


MESSAGES = st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=6)


@given(MESSAGES, st.data())
def test_whatever_a_stranger_changes_is_noticed(messages: list[bytes], draw: st.DataObject) -> None:
    key = secrets.token_bytes(32)
    lengths = [len(message) for message in messages]
    travelled = sealed_by(key, messages)
    assert opened_by(key, b"".join(travelled), lengths) == (messages, False)
    assert not any(message in sealed for message, sealed in zip(messages, travelled, strict=True) if len(message) > 8)

    number = draw.draw(st.integers(0, len(messages) - 1), "message")
    at = draw.draw(st.integers(0, len(travelled[number]) - 1), "byte")
    bit = draw.draw(st.integers(0, 7), "bit")
    other = draw.draw(st.integers(0, len(messages) - 1), "other message")
    changed = bytearray(travelled[number])
    changed[at] ^= 1 << bit
    before, behind = travelled[:number], travelled[number + 1 :]
    swapped = list(travelled)
    swapped[number], swapped[other] = swapped[other], swapped[number]
    ways = {
        "changed": [*before, bytes(changed), *behind],
        "cut": [*before, travelled[number][:at]],
        "left out": [*before, *behind],
        "repeated": [*before, travelled[number], travelled[number], *behind],
        "swapped": swapped,
        "of another connection": [*before, sealed_by(secrets.token_bytes(32), messages)[number], *behind],
    }
    for way, stream in ways.items():
        if way == "swapped" and other == number:
            continue
        # One more is asked for than was sent: what comes behind the last one is not taken for a message either.
        read, said = opened_by(key, b"".join(stream), [*lengths, lengths[number]])
        assert said, way
        untouched = min(number, other) if way == "swapped" else number + (way == "repeated")
        assert read == messages[:untouched], way


async def test_what_an_end_said_itself_is_no_answer() -> None:
    sources, _ = await proven()
    (travelled,) = sealed_by(sources.sends, [HELLO])
    assert opened_by(sources.sends, travelled, [5]) == ([HELLO], False)
    assert opened_by(sources.reads, travelled, [5]) == ([], True)


async def test_ends_of_which_one_does_not_seal_do_not_meet(ends: Ends) -> None:
    ends.fill({"a": HELLO})
    async with ends.incoming(["a"]) as incoming:
        ends.encrypted = not ends.encrypted
        with pytest.raises((Unreachable, Damaged)):
            async with ends.outgoing(incoming.port, incoming.key, ["a"]):
                pass
        assert incoming.failed is None
    assert ends.arrived(["a"]) == {"a": b""}


@pytest.mark.parametrize("key", [b"", b"short"])
async def test_a_key_that_is_none_is_not_used(ends: Ends, key: bytes) -> None:
    with pytest.raises(Internal, match=f"gave a key of {len(key)} bytes"):
        async with ends.outgoing(1, key, ["a"]):
            pass


# ---------------------------------------------------------------- records


def data(content: bytes, offset: int = 0) -> tuple[bytes, bytes]:
    return Record(Kind.DATA, len(content), offset, 0, digest_of(content)).header(), content


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([Record(Kind.END, 0, 100).header()], "END record for 100 where 0 bytes have arrived"),
        ([Record(Kind.END, 7, 0).header()], "an END of 7 bytes"),
        (data(HELLO, 1), "DATA record for 1 where 0"),
        ([*data(HELLO), *data(HELLO, 4)], "DATA record for 4 where 5"),
        ([*data(HELLO), Record(Kind.SAME, 5, 5, 1, digest_of(HELLO)).header()], "repeats 1, where nothing is yet"),
        ([Record(Kind.DATA, MAX_RECORD_BYTES + 1, 0).header()], "at most"),
        ([Record(Kind.ZERO, 0, 0).header()], "a record of 0 bytes"),
        ([Record(Kind.HAVE, 5, 0).header()], "a record of kind 16"),
        ([Record(Kind.END, 0, 0).header(), *data(HELLO)], "after the end"),
    ],
    ids=["size", "long end", "gap", "overlap", "twin", "large", "empty", "kind", "late"],
)
async def test_a_record_that_contradicts_ends_the_move(ends: Ends, said: Sequence[bytes], why: str) -> None:
    async with ends.incoming(["a"]) as incoming, connected(incoming.port) as plain:
        connection = await admitted(ends, incoming, plain)
        connection.send(*said)
        if said[0] == Record(Kind.END, 0, 0).header():
            assert await in_thread(read_reply, connection) == (Kind.DONE, 0)
        with pytest.raises(Trouble, match=why) as caught:
            await in_thread(read_reply, connection)
        assert (caught.value.code, caught.value.again) == ("damaged", False)
        if "after" not in why:
            with pytest.raises(Damaged, match=why):
                await incoming.wait(30)
    assert ends.arrived(["a"])["a"] in (b"", HELLO)


@pytest.mark.parametrize(
    "said",
    [
        [bytes(HEADER_BYTES)],
        [b"\xff" * HEADER_BYTES],
        [data(HELLO)[0], b"hellO"],
        [Record(Kind.ZERO, 5, 0, 0, digest_of(HELLO)).header()],
    ],
    ids=["zeros", "ones", "payload", "not zero"],
)
async def test_a_record_that_is_damaged_may_be_sent_again(plain: Ends, said: Sequence[bytes]) -> None:
    async with plain.incoming(["a"]) as incoming:
        async with connected(incoming.port) as stranger:
            connection = await admitted(plain, incoming, stranger)
            connection.send(*said)
            with pytest.raises(Trouble) as caught:
                await in_thread(read_reply, connection)
            assert (caught.value.code, caught.value.again) == ("damaged", True)
        await arrives(plain, incoming)


async def test_a_repetition_is_checked_whatever_the_way(ends: Ends) -> None:
    async with ends.incoming(["a"]) as incoming, connected(incoming.port) as plain:
        connection = await admitted(ends, incoming, plain)
        connection.send(*data(HELLO))
        connection.send(Record(Kind.SAME, 5, 5, 0, digest_of(b"other")).header())
        with pytest.raises(Trouble, match="the record at 5 arrived damaged"):
            await in_thread(read_reply, connection)
    assert ends.arrived(["a"]) == {"a": HELLO}


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.integers(0, MAX_STRIPE_BYTES))
def test_any_bytes_are_trouble_and_nothing_else(header: bytes, have: int) -> None:
    with pytest.raises(Trouble):
        parse_header(header, have)


@given(
    st.sampled_from([Kind.DATA, Kind.ZERO, Kind.SAME, Kind.END]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_a_record_that_passes_fits_its_place(kind: Kind, length: int, offset: int, twin: int) -> None:
    record = Record(kind, length, offset, twin)
    try:
        found = parse_header(record.header(), offset)
    except Trouble:
        return
    assert found == record
    assert length <= MAX_RECORD_BYTES
    assert kind is Kind.END or (length and offset + length <= MAX_STRIPE_BYTES)
    assert kind is not Kind.SAME or twin + length <= offset


@given(st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES), st.binary())
def test_any_reply_is_understood_or_trouble(header: bytes, text: bytes) -> None:
    with pytest.raises(Trouble):
        parse_reply(header)
    assert isinstance(parse_trouble(0, text), Trouble)


def test_trouble_arrives_as_it_was_said() -> None:
    said, text = trouble_reply(Trouble("full", "ü" * 10_000, again=True))
    kind, value, text_bytes = parse_reply(said)
    heard = parse_trouble(value, text)
    assert (kind, text_bytes) == (Kind.TROUBLE, len(text))
    assert (heard.code, heard.again, heard.message) == ("full", True, "ü" * 1024)
    assert parse_reply(reply(Kind.DONE, 7)) == (Kind.DONE, 7, 0)
