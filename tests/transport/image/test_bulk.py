"""Bulk connections: which peers are admitted, how long the port is open, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from migrator import pki
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Damaged, Denied, Internal, Unreachable, from_wire
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport import handshake, sealed
from snapshotd.transport.handshake import tls_context
from snapshotd.transport.image import bulk_receiver
from snapshotd.transport.image.bulk_receiver import BulkReceivers
from snapshotd.transport.image.bulk_sender import BulkStream, open_streams
from snapshotd.transport.image.frame import MAX_CHUNK_BYTES, Answer, Kind, data_frame
from snapshotd.transport.image.messages import send_end, send_frame, send_message
from snapshotd.transport.image.store import ImageStore
from snapshotd.transport.listener import KEY_BYTES
from snapshotd.transport.routes import Route
from tests.transport.image.targets import MOVE, NODE, BulkTarget, Serve, hang_up, issue, taken_from

GOOD = data_frame(1, "a.img", 0, b"good")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("image channel ", "bulk "))}


async def refused(connect: Callable[[], object]) -> str:
    with pytest.raises(Denied) as caught:
        await in_thread(connect)
    return caught.value.message


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.image.grpc_channel.HANG_UP_S", 0.05)


@pytest.mark.parametrize("key", [b"", b"k" * 32, b"k" * 64])
@pytest.mark.usefixtures("no_patience")
async def test_peer_without_the_key_is_denied(serve_bulk: Serve, key: bytes) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        assert "not the key" in await refused(partial(target.connect, key))
        assert target.authorised == []


@pytest.mark.usefixtures("no_patience")
async def test_another_node_is_denied_although_it_has_the_key(serve_bulk: Serve, authority: Path) -> None:
    operator = pki.issue_operator(authority, "node-2")
    others = [issue(authority, "node-3"), Credentials(operator.ca, operator.cert, operator.key)]
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        for credentials in others:
            assert "is not the source of the image channel" in await refused(
                partial(target.connect, target.key, credentials)
            )


async def test_certificate_of_another_authority_or_none_is_rejected(serve_bulk: Serve, tmp_path: Path) -> None:
    pki.init(tmp_path / "other")
    other = issue(tmp_path / "other", NODE)
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        half = Credentials(target.credentials.ca, other.cert, other.key)  # trusts the target, is not trusted by it
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            await in_thread(target.connect, target.key, half)
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await open_streams([Route("127.0.0.1", target.port)], target.key, other, NODE, 2)
        with pytest.raises(Unreachable, match="not valid for 'node-9'"):
            await open_streams([Route("127.0.0.1", target.port)], target.key, target.credentials, "node-9", 1)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.load_verify_locations(target.credentials.ca)
        with (
            socket.create_connection(("127.0.0.1", target.port)) as plain,
            anybody.wrap_socket(plain, server_hostname=NODE) as nameless,
            pytest.raises(ssl.SSLError, match="certificate required"),
        ):
            await in_thread(nameless.recv, 1)
        assert target.authorised == []


async def test_slow_rejected_peer_still_receives_the_alert(serve_bulk: Serve, tmp_path: Path) -> None:
    """The alert arrives before the peer has sent its key: a target that had closed by then would reset the connection."""
    pki.init(tmp_path / "other")
    other = issue(tmp_path / "other", NODE)

    def receive_alert(port: int, context: ssl.SSLContext) -> None:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname=NODE) as peer,
        ):
            select.select([peer], [], [])
            for _ in range(2):  # if the target has closed, the first is answered by a reset and the second fails
                peer.sendall(b"k" * KEY_BYTES)
            peer.recv(1)

    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        context = tls_context(Credentials(target.credentials.ca, other.cert, other.key), server_side=False)
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            await in_thread(receive_alert, target.port, context)


def shake_hands(target: BulkTarget, context: ssl.SSLContext) -> None:
    """Until the certificates are known to both."""
    with contextlib.suppress(Denied):
        handshake.connect(Route("127.0.0.1", target.port), target.key, context, target.credentials, NODE)[0].close()


async def test_connection_uses_tls_1_3(serve_bulk: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        versions: list[str | None] = []
        monkeypatch.setattr(handshake, "peer_node", lambda connection, _: versions.append(connection.version()))
        await in_thread(shake_hands, target, tls_context(target.credentials, server_side=False))
        assert versions[0] == "TLSv1.3"
        old = tls_context(target.credentials, server_side=False)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await in_thread(shake_hands, target, old)


@pytest.mark.usefixtures("no_patience")
async def test_revoked_certificate_is_denied_by_sender_and_receiver(store: ImageStore, tmp_path: Path) -> None:
    """Each side has its own copy of the CA's files; only one of them has the list of revoked certificates yet."""
    pki.init(tmp_path / "ca")
    issued = issue(tmp_path / "ca", NODE)
    sides = []
    for name in ("sender", "receiver"):
        (tmp_path / name).mkdir()
        for path in (issued.ca, issued.cert, issued.key):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        sides.append(Credentials(*(tmp_path / name / path.name for path in (issued.ca, issued.cert, issued.key))))
    sender, receiver = sides
    receivers = BulkReceivers(store, receiver, ["127.0.0.1"])
    port, key, _ = await in_thread(receivers.open, MOVE, NODE)

    def connect() -> None:
        context = tls_context(sender, server_side=False)
        handshake.connect(Route("127.0.0.1", port), key, context, sender, NODE)[0].close()

    try:
        await in_thread(connect)
        crl, _ = pki.revoke(tmp_path / "ca", f"node:{NODE}")
        (tmp_path / "receiver" / "ca.crl").write_bytes(crl.read_bytes())
        assert "has been revoked" in await refused(connect)
        (tmp_path / "sender" / "ca.crl").write_bytes(crl.read_bytes())
        with pytest.raises(Denied, match="has been revoked"):
            await in_thread(connect)
    finally:
        await in_thread(receivers.close_all)


async def test_open_is_idempotent_and_close_leaves_nothing(store: ImageStore, certificates: Credentials) -> None:
    receivers = BulkReceivers(store, certificates, ["192.0.2.1", "127.0.0.1"])  # the first is not this machine's
    store.create(MOVE, 1)
    port, key, _ = receivers.open(MOVE, NODE)
    assert receivers.open(MOVE, NODE) == (port, key, [])
    streams = await open_streams([Route("127.0.0.1", port)], key, certificates, NODE, 3)
    assert await streams[0].send(GOOD)
    assert await streams[0].receive() == Answer(Kind.OK, 1)
    await in_thread(receivers.close, MOVE)
    for stream in streams:
        with pytest.raises(Unreachable):
            await stream.receive()
        with pytest.raises(Unreachable):  # the same for every further call
            await stream.receive()
        assert not await stream.send(GOOD)
        await hang_up(stream)
    assert not threads()
    with pytest.raises(Unreachable, match="refused"):
        await open_streams([Route("127.0.0.1", port)], key, certificates, NODE, 1)
    receivers.close(MOVE)
    again_port, again_key, _ = receivers.open(MOVE, NODE)
    assert again_key != key
    assert again_port
    await in_thread(receivers.close_all)
    assert not threads()


async def test_unused_port_closes_by_itself(
    store: ImageStore, certificates: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_receiver, "OPEN_S", 0.05)
    receivers = BulkReceivers(store, certificates, ["127.0.0.1"])
    port, key, _ = receivers.open(MOVE, NODE)
    for thread in threads():
        await in_thread(thread.join, 5)
    assert not threads()
    with pytest.raises(Unreachable, match="refused"):
        await open_streams([Route("127.0.0.1", port)], key, certificates, NODE, 1)
    monkeypatch.setattr(bulk_receiver, "OPEN_S", 30.0)
    assert receivers.open(MOVE, NODE) != (port, key, [])
    receivers.close(MOVE)


async def test_node_without_a_usable_address_is_an_error(store: ImageStore, certificates: Credentials) -> None:
    with pytest.raises(Internal, match=r"192\.0\.2\.1: Cannot assign"):
        BulkReceivers(store, certificates, ["192.0.2.1"]).open(MOVE, NODE)
    assert not threads()


async def test_silent_port_is_given_up(certificates: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="timed out"):
        await open_streams([Route("127.0.0.1", silent.getsockname()[1])], b"", certificates, NODE, 2)


async def test_peers_that_say_nothing_do_not_stay_and_do_not_keep_others_out(
    serve_bulk: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotd.transport.sockets.CONNECT_S", 0.3)
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1)
        silent = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(5)]
        for peer in silent:
            peer.settimeout(60)
            assert await in_thread(peer.recv, 100) == b""
            peer.close()
        monkeypatch.setattr("snapshotd.transport.sockets.CONNECT_S", 60.0)
        assert await target.answers(GOOD.header(), b"good") == [Answer(Kind.OK, 1)]


async def test_oversized_message_is_refused_unread(serve_bulk: Serve) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        with await in_thread(target.connect) as connection:
            connection.send((MAX_CHUNK_BYTES + 1).to_bytes(4, "big"))
            (answer,) = await in_thread(taken_from, connection)
        error = from_wire(answer.text)
        assert isinstance(error, Damaged)
        assert "where a header was expected" in error.message


async def test_invalid_answer_is_damaged(certificates: Credentials) -> None:
    """Whatever a target sends, the sender raises an error of the taxonomy."""
    context = tls_context(certificates, server_side=True)
    for invalid, text in ((b"hello", "an answer of 5 bytes"), (bytes(100_000), "an answer of 100000 bytes")):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server: socket.socket = server, invalid: bytes = invalid) -> sealed.Connection:
                plain, _ = server.accept()
                connection = context.wrap_socket(plain, server_side=True)
                connection.recv(4)
                sealing = sealed.SealedConnection(connection, handshake.welcome(connection))
                with contextlib.suppress(OSError):  # the sender closes early
                    send_message(sealing, invalid)
                return sealing

            serving = asyncio.create_task(in_thread(serve))
            (stream,) = await open_streams([Route("127.0.0.1", server.getsockname()[1])], b"", certificates, NODE, 1)
            with pytest.raises(Damaged, match=text):
                await stream.receive()
            await hang_up(stream)
            (await serving).close()


async def test_stream_is_cancelled_in_the_middle_of_a_write(serve_bulk: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target reads nothing, both buffers are full, and the thread is blocked in a write. It still ends."""
    go_on = threading.Event()
    monkeypatch.setattr(ImageStore, "write", lambda *_: go_on.wait(30))
    async with serve_bulk(streams=1) as target:
        (stream,) = await target.streams()
        assert isinstance(stream, BulkStream)
        frame = data_frame(1, "a.img", 0, b"x" * MAX_CHUNK_BYTES)
        for _ in range(8):
            assert await stream.send(frame)
        await asyncio.wait_for(hang_up(stream), 60)
        go_on.set()


async def test_payload_buffer_is_reused_safely(serve_bulk: Serve) -> None:
    async with serve_bulk() as target:
        assert isinstance(target, BulkTarget)
        target.store.create(MOVE, 1)
        frames = [data_frame(n, f"f-{n}.img", 0, bytes([n]) * (9000 - 1000 * n)) for n in range(1, 5)]
        with await in_thread(target.connect) as connection:
            for frame in frames:
                send_frame(connection, frame)
            send_end(connection)
            assert await in_thread(taken_from, connection) == [Answer(Kind.OK, frame.sequence) for frame in frames]
        for frame in frames:
            assert (target.store.path(MOVE) / frame.name).read_bytes() == frame.payload


def test_missing_certificate_is_a_bad_configuration(tmp_path: Path) -> None:
    missing = Credentials(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    with pytest.raises(BadConfig, match="cannot be used"):
        tls_context(missing, server_side=True)
