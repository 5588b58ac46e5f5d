"""Connections that a killed process has left are removed; those of processes are not."""

from __future__ import annotations

import os
import socket

import pytest

from snapshotd.net import orphans, sockets
from snapshotd.net.flows import Address, Pair

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.getuid() != 0, reason="ending a connection needs root")]


def _pair(sock: socket.socket) -> Pair:
    return Address(*sock.getsockname()[:2]), Address(*sock.getpeername()[:2])


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connection_that_no_process_has_is_removed(family: socket.AddressFamily) -> None:
    with socket.create_server(("localhost" if family == socket.AF_INET else "::1", 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
        with accepted:
            orphan, held = _pair(client), _pair(accepted)
            assert orphans.remove([orphan, held]) == 0
            client.close()  # the other end stays open, so the kernel waits for it
            assert sockets.existing([orphan, held]) == sorted([orphan, held])
            assert orphans.remove([orphan, held]) == 1
            assert sockets.existing([orphan, held]) == [held]
            assert sockets.inode_of(accepted) in {flow.inode for flow in sockets.tree_flows([os.getpid()])}


def test_nothing_is_asked_for_nothing() -> None:
    assert orphans.remove([]) == 0
