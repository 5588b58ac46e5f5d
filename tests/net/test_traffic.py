"""The bytes that the TCP connections of a process have carried."""

from __future__ import annotations

import os
import socket

import pytest

from snapshotd.net.traffic import carried_bytes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="borrowing descriptors needs root")


def test_every_byte_sent_or_received_counts() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        before = carried_bytes([os.getpid()])
        assert before is not None
        one.sendall(b"x" * 1000)
        received = b""
        while len(received) < 1000:
            received += other.recv(4096)
        after = carried_bytes([os.getpid()])
        assert after is not None
        assert after - before >= 1000  # received; and sent, as soon as it was acknowledged


def test_processes_that_have_ended_carry_nothing() -> None:
    assert carried_bytes([2**22 + 1]) is None
