"""The listening port that both data channels share: which connections it keeps, and that `close` leaves nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from snapshotd.api.errors import Busy, Denied, Internal
from snapshotd.transport import sockets
from snapshotd.transport.listener import MoveListener

WHAT = "channel under test"


def echo_until_closed(connection: socket.socket) -> None:
    while blob := connection.recv(100):
        connection.sendall(blob)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(WHAT)]


Listen = Callable[..., MoveListener]


@pytest.fixture
def listen() -> Iterator[Listen]:
    opened: list[MoveListener] = []

    def listen(serve: Callable[[socket.socket], None] = echo_until_closed, **options: float) -> MoveListener:
        listener = MoveListener(WHAT, ["192.0.2.1", "127.0.0.1"], serve, **options)  # type: ignore[arg-type]
        opened.append(listener)
        listener.start()
        return listener

    yield listen
    for listener in opened:
        listener.close()
    assert threads() == []


def connect(listener: MoveListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=30)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_oldest_unauthenticated_connection_is_replaced(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "CONNECT_S", 600.0)
    listener = listen(max_pending=2)
    first, second, third = connect(listener), connect(listener), connect(listener)
    with first, second, third:
        assert closed(first)
        for kept in (second, third):
            kept.sendall(b"x")
            assert kept.recv(1) == b"x"


def test_authenticated_connections_are_kept_and_limited(listen: Listen) -> None:
    refused: list[str] = []

    def serve(connection: socket.socket) -> None:
        try:
            listener.admit(connection)
        except Busy as error:
            refused.append(error.message)
            return
        connection.settimeout(None)
        echo_until_closed(connection)

    listener = listen(serve, max_pending=1, max_admitted=1)
    with connect(listener) as first:
        first.sendall(b"x")
        assert first.recv(1) == b"x"
        for _ in range(3):
            with connect(listener) as other:
                assert closed(other)
        assert refused == [f"{WHAT}: 1 connections are open already, no more are allowed"] * 3
        first.sendall(b"y")
        assert first.recv(1) == b"y"


def test_silent_connection_is_closed_after_the_time_limit(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_S", 0.05)
    listener = listen()
    with connect(listener) as connection:
        assert closed(connection)
    listener.close()
    assert "is rejected: it did not authenticate within" in caplog.text


def test_rejected_connection_is_logged_and_the_next_one_served(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(connection: socket.socket) -> None:
        if connection.recv(1) == b"x":
            raise Denied("wrong key")
        connection.sendall(b"welcome")

    listener = listen(serve)
    with connect(listener) as connection:
        connection.sendall(b"x")
        assert closed(connection)
    with connect(listener) as connection:
        connection.sendall(b"y")
        assert connection.recv(7) == b"welcome"
    assert "is rejected: wrong key" in caplog.text


def test_rejected_connections_cannot_fill_the_log(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    def serve(connection: socket.socket) -> None:
        raise Denied("wrong key")

    listener = listen(serve)
    for _ in range(50):
        with connect(listener) as connection:
            assert closed(connection)
    listener.close()
    assert caplog.text.count("is rejected") == 10
    assert caplog.text.count("leaving out the rest") == 1


def test_stopped_port_refuses_connections_at_once(listen: Listen) -> None:
    listener = listen()
    with connect(listener) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        listener.stop()
        with pytest.raises(ConnectionRefusedError):
            connect(listener)
        connection.sendall(b"y")  # what is connected stays
        assert connection.recv(1) == b"y"


def test_close_waits_for_a_thread_that_has_left_its_connection(listen: Listen) -> None:
    """A thread that has closed its connection still runs for a moment; `close` must join it as well."""
    listener = listen(lambda connection: None)
    for _ in range(50):
        with connect(listener) as connection:
            assert closed(connection)
    listener.close()
    assert threads() == []
    listener.close()


def test_no_address_of_this_machine_is_an_error() -> None:
    with pytest.raises(Internal, match=r"no port can be opened: 192\.0\.2\.1: Cannot assign"):
        MoveListener(WHAT, ["192.0.2.1"], echo_until_closed)
