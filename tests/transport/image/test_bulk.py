"""The bulk lane's own ways: who is let in, how long it is open, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path

import pytest

from migrator import pki
from snapshotd.api.channel import Credentials
from snapshotd.api.errors import BadConfig, Damaged, Denied, Internal, Unreachable, from_wire
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image import bulk_receiver, bulk_sender
from snapshotd.transport.image.bulk_receiver import KEY_BYTES, BulkLanes
from snapshotd.transport.image.bulk_sender import BulkStream, open_streams
from snapshotd.transport.image.frame import MAX_CHUNK_BYTES, Answer, Kind, data_frame
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.image.tls_connection import send_frame, send_message, tls_context
from tests.transport.image.targets import MOVE, NODE, BulkTarget, Serve, hang_up, issue, taken_from

GOOD = data_frame(1, "a.img", 0, b"good")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("lane ", "bulk "))}


async def refused(connection: ssl.SSLSocket) -> str:
    with connection:
        (answer,) = await in_thread(taken_from, connection)
    error = from_wire(answer.text)
    assert isinstance(error, Denied)
    return error.message


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.image.grpc_channel.HANG_UP_S", 0.05)


@pytest.mark.parametrize("key", [b"", b"k" * 32, b"k" * 64])
@pytest.mark.usefixtures("no_patience")
async def test_nobody_is_let_in_without_the_key(serve_bulk: Serve, key: bytes) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        assert "not the key" in await refused(await in_thread(target.connect, key))
        assert target.authorised == []


@pytest.mark.usefixtures("no_patience")
async def test_another_node_is_not_let_in_although_it_has_the_key(serve_bulk: Serve, authority: Path) -> None:
    operator = pki.issue_operator(authority, "node-2")
    strangers = [issue(authority, "node-3"), Credentials(operator.ca, operator.cert, operator.key)]
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        for credentials in strangers:
            connection = await in_thread(target.connect, target.key, credentials)
            assert "is not the source of move" in await refused(connection)


async def test_a_certificate_of_another_authority_or_none_gets_nothing(serve_bulk: Serve, tmp_path: Path) -> None:
    pki.init(tmp_path / "other")
    other = issue(tmp_path / "other", NODE)
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        half = Credentials(target.credentials.ca, other.cert, other.key)  # believes the target; is not believed
        connection = await in_thread(target.connect, target.key, half)
        with connection, pytest.raises(ssl.SSLError, match="unknown ca"):
            await in_thread(taken_from, connection)
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await open_streams("127.0.0.1", target.port, target.key, other, NODE, 2)
        with pytest.raises(Unreachable, match="not valid for 'node-9'"):
            await open_streams("127.0.0.1", target.port, target.key, target.credentials, "node-9", 1)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.load_verify_locations(target.credentials.ca)
        with (
            socket.create_connection(("127.0.0.1", target.port)) as plain,
            anybody.wrap_socket(plain, server_hostname=NODE) as nameless,
            pytest.raises(ssl.SSLError, match="certificate required"),
        ):
            await in_thread(taken_from, nameless)
        assert target.authorised == []


async def test_a_stranger_who_is_slow_still_hears_why(serve_bulk: Serve, tmp_path: Path) -> None:
    """The alert is there before the stranger has sent its key: a target that had hung up by then would break that."""
    pki.init(tmp_path / "other")
    other = issue(tmp_path / "other", NODE)

    def hear(port: int, context: ssl.SSLContext) -> None:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname=NODE) as stranger,
        ):
            select.select([stranger], [], [])
            for _ in range(2):  # the first is answered by a reset where nobody reads, the second fails
                send_message(stranger, b"k" * KEY_BYTES)
            taken_from(stranger)

    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        context = tls_context(Credentials(target.credentials.ca, other.cert, other.key), server_side=False)
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            await in_thread(hear, target.port, context)


async def test_the_connection_is_encrypted_with_what_is_best(serve_bulk: Serve) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        with await in_thread(target.connect) as connection:
            assert connection.version() == "TLSv1.3"
            assert "GCM" in str(connection.cipher())
        old = tls_context(target.credentials, server_side=False)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await in_thread(bulk_sender._connect, "127.0.0.1", target.port, target.key, old, NODE)


async def test_asked_twice_a_lane_is_the_same_and_closed_it_is_gone(
    store: ImageStore, certificates: Credentials
) -> None:
    lanes = BulkLanes(store, certificates, ["192.0.2.1", "127.0.0.1"])  # the first is not this machine's
    store.create(MOVE, 1)
    port, key = lanes.open(MOVE, NODE)
    assert lanes.open(MOVE, NODE) == (port, key)
    streams = await open_streams("127.0.0.1", port, key, certificates, NODE, 3)
    assert await streams[0].send(GOOD)
    assert await streams[0].receive() == Answer(Kind.OK, 1)
    await in_thread(lanes.close, MOVE)
    for stream in streams:
        with pytest.raises(Unreachable):
            await stream.receive()
        with pytest.raises(Unreachable):  # whoever asks again hears the same
            await stream.receive()
        assert not await stream.send(GOOD)
        await hang_up(stream)
    assert not threads()
    with pytest.raises(Unreachable, match="refused"):
        await open_streams("127.0.0.1", port, key, certificates, NODE, 1)
    lanes.close(MOVE)
    again_port, again_key = lanes.open(MOVE, NODE)
    assert again_key != key
    assert again_port
    await in_thread(lanes.close_all)
    assert not threads()


async def test_a_lane_nobody_comes_to_closes_by_itself(
    store: ImageStore, certificates: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_receiver, "OPEN_S", 0.05)
    lanes = BulkLanes(store, certificates, ["127.0.0.1"])
    port, key = lanes.open(MOVE, NODE)
    for thread in threads():
        await in_thread(thread.join, 5)
    assert not threads()
    with pytest.raises(Unreachable, match="refused"):
        await open_streams("127.0.0.1", port, key, certificates, NODE, 1)
    monkeypatch.setattr(bulk_receiver, "OPEN_S", 30.0)
    assert lanes.open(MOVE, NODE) != (port, key)
    lanes.close(MOVE)


async def test_a_node_without_an_address_of_its_own_says_so(store: ImageStore, certificates: Credentials) -> None:
    with pytest.raises(Internal, match=r"192\.0\.2\.1: Cannot assign"):
        BulkLanes(store, certificates, ["192.0.2.1"]).open(MOVE, NODE)
    assert not threads()


async def test_a_port_that_does_not_speak_is_given_up(
    certificates: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_sender, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="timed out"):
        await open_streams("127.0.0.1", silent.getsockname()[1], b"", certificates, NODE, 2)


async def test_strangers_that_say_nothing_do_not_stay_and_do_not_keep_others_out(
    serve_bulk: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_receiver, "CONNECT_S", 0.3)
    monkeypatch.setattr(bulk_receiver, "_MAX_STRANGERS", 3)
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1)
        silent = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(5)]
        for stranger in silent:  # three after their time, two at once
            stranger.settimeout(5)
            assert await in_thread(stranger.recv, 100) == b""
            stranger.close()
        assert await target.answers(GOOD.header(), b"good") == [Answer(Kind.OK, 1)]


async def test_a_message_that_announces_too_much_is_damaged_unread(serve_bulk: Serve) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        with await in_thread(target.connect) as connection:
            connection.sendall((MAX_CHUNK_BYTES + 1).to_bytes(4, "big"))
            error = from_wire((await in_thread(_one, connection)).text)
        assert isinstance(error, Damaged)
        assert "where a header was expected" in error.message


def _one(connection: ssl.SSLSocket) -> Answer:
    from snapshotd.transport.image.frame import parse_answer
    from snapshotd.transport.image.tls_connection import Inlet

    inlet = Inlet(connection)
    return parse_answer(inlet.read(inlet.next_bytes() or 0))


async def test_answers_that_make_no_sense_are_damaged(certificates: Credentials) -> None:
    """A target that is no target: whatever it says, the sender has an error of the taxonomy."""
    context = tls_context(certificates, server_side=True)
    for nonsense, words in ((b"hello", "an answer of 5 bytes"), (bytes(100_000), "an answer of 100000 bytes")):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server: socket.socket = server, nonsense: bytes = nonsense) -> ssl.SSLSocket:
                plain, _ = server.accept()
                connection = context.wrap_socket(plain, server_side=True)
                with contextlib.suppress(OSError):  # whoever has seen enough hangs up
                    send_message(connection, nonsense)
                return connection

            serving = asyncio.create_task(in_thread(serve))
            (stream,) = await open_streams("127.0.0.1", server.getsockname()[1], b"", certificates, NODE, 1)
            with pytest.raises(Damaged, match=words):
                await stream.receive()
            await hang_up(stream)
            (await serving).close()


async def test_a_stream_is_cancelled_in_the_middle_of_a_write(
    serve_bulk: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads nothing, both buffers are full, the thread hangs in a write: it ends all the same."""
    go_on = threading.Event()
    monkeypatch.setattr(ImageStore, "write", lambda *_: go_on.wait(30))
    async with serve_bulk(streams=1) as target:
        (stream,) = await target.streams()
        assert isinstance(stream, BulkStream)
        frame = data_frame(1, "a.img", 0, b"x" * MAX_CHUNK_BYTES)
        for _ in range(8):
            assert await stream.send(frame)
        await asyncio.wait_for(hang_up(stream), 5)
        go_on.set()


async def test_a_payload_may_lie_in_a_buffer_that_is_used_again(serve_bulk: Serve) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1)
        frames = [data_frame(n, f"f-{n}.img", 0, bytes([n]) * (9000 - 1000 * n)) for n in range(1, 5)]
        with await in_thread(target.connect) as connection:
            for frame in frames:
                send_frame(connection, frame)
            connection.sendall(b"\xff" * 4)
            assert await in_thread(taken_from, connection) == [Answer(Kind.OK, frame.sequence) for frame in frames]
        for frame in frames:
            assert (target.store.path(MOVE) / frame.name).read_bytes() == frame.payload


def test_certificates_that_are_none_are_a_bad_configuration(tmp_path: Path) -> None:
    missing = Credentials(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    with pytest.raises(BadConfig, match="cannot be used"):
        tls_context(missing, server_side=True)
