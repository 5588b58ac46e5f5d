"""The keys of a connection: only the two daemons have them. Anything else that a peer sends is an error."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from migrator import pki
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Busy, Damaged, SnapshotError
from snapshotd.transport import handshake
from snapshotd.transport.handshake import tls_context
from snapshotd.transport.keys import Keys
from snapshotd.transport.routes import Route
from snapshotd.transport.sealed import SealedConnection
from tests.transport.image.targets import issue

KEY = b"k" * 32
NODE = "node-2"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder: Path = tmp_path_factory.mktemp("ca")
    pki.init(folder)
    return issue(folder, NODE)


@contextlib.contextmanager
def target(credentials: Credentials, serve: Callable[[ssl.SSLSocket], object]) -> Iterator[tuple[int, list[Any]]]:
    """A port where `serve` gets one connection after TLS's own handshake; its result is in the list at the end."""
    context = tls_context(credentials, server_side=True)
    done: list[Any] = []

    def run() -> object:
        plain, _ = server.accept()
        plain.settimeout(60)
        with context.wrap_socket(plain, server_side=True) as connection:
            return serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        serving = thread.submit(run)
        yield server.getsockname()[1], done
        done.append(serving.result(60))


def connect(port: int, credentials: Credentials) -> tuple[socket.socket, Keys]:
    return handshake.connect(
        Route("127.0.0.1", port), KEY, tls_context(credentials, server_side=False), credentials, NODE
    )


def proven(connection: ssl.SSLSocket, credentials: Credentials) -> Keys:
    handshake.prove_source(connection, KEY, credentials, NODE, "channel")
    return handshake.welcome(connection)


def test_both_sides_have_the_same_fresh_keys_and_leave_tls(credentials: Credentials) -> None:
    seen = {KEY}
    for _ in range(3):

        def serve(connection: ssl.SSLSocket) -> tuple[Keys, bytes]:
            keys = proven(connection, credentials)
            sealed = SealedConnection(connection, keys)
            sealed.send(b"first")  # at once: the source must not take it for the end of TLS
            return keys, sealed.read(100_000)

        with target(credentials, serve) as (port, done):
            connection, ours = connect(port, credentials)
            with SealedConnection(connection, ours) as sealed:
                sealed.send(b"x" * 100_000)
                assert sealed.read(5) == b"first"
        ((theirs, arrived),) = done
        assert arrived == b"x" * 100_000
        assert (ours.sends, ours.reads) == (theirs.reads, theirs.sends)
        for key in (ours.sends, ours.reads):
            assert len(key) == 32
            assert key not in seen
            seen.add(key)
        assert ours.sends.hex() not in repr(ours)
        assert Keys.of(ours.message()) == ours


def test_refusal_arrives_instead_of_keys(credentials: Credentials) -> None:
    def serve(connection: ssl.SSLSocket) -> None:
        handshake.prove_source(connection, KEY, credentials, NODE, "channel")
        handshake.refuse(connection, Busy("too many connections"), 60)

    with target(credentials, serve) as (port, _), pytest.raises(Busy, match="too many connections"):
        connect(port, credentials)


@pytest.mark.parametrize(
    "answer",
    [b"K" + struct.pack(">I", 63) + bytes(63), b"X" + struct.pack(">I", 64) + bytes(64), b"E\xff\xff\xff\xff"],
    ids=["short keys", "unknown", "endless reason"],
)
def test_invalid_answer_of_the_target_is_damaged(credentials: Credentials, answer: bytes) -> None:
    with (
        target(credentials, lambda connection: connection.sendall(answer)) as (port, _),
        pytest.raises(Damaged, match="invalid answer"),
    ):
        connect(port, credentials)


def test_invalid_reason_is_still_an_error_of_the_taxonomy(credentials: Credentials) -> None:
    answer = b"E" + struct.pack(">I", 7) + b"rubbish"
    with (
        target(credentials, lambda connection: connection.sendall(answer)) as (port, _),
        pytest.raises(SnapshotError),
    ):
        connect(port, credentials)


def test_target_that_does_not_leave_tls_is_given_up(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends more inside TLS instead of the end of TLS, or nothing more."""
    monkeypatch.setattr(handshake, "CONNECT_S", 0.5)
    welcome = b"K" + struct.pack(">I", 64) + bytes(64)

    def stay(connection: ssl.SSLSocket) -> None:
        connection.sendall(welcome)
        with contextlib.suppress(OSError):
            while connection.recv(1000):
                pass

    for serve in (stay, lambda connection: connection.sendall(welcome + b"more")):
        with target(credentials, serve) as (port, _), pytest.raises(OSError):  # noqa: PT011 - of several kinds
            connect(port, credentials)


def test_source_that_ends_in_the_middle_leaves_no_keys(credentials: Credentials) -> None:
    def serve(connection: ssl.SSLSocket) -> str:
        try:
            proven(connection, credentials)
        except OSError:
            return "broken"
        return "admitted"

    with target(credentials, serve) as (port, done):
        context = tls_context(credentials, server_side=False)
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname=NODE) as connection,
        ):
            connection.sendall(struct.pack(">I", len(KEY)) + KEY[:10])
    assert done == ["broken"]
