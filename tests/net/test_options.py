"""Options that criu loses are restored after a real dump and restore, on connections and listeners of both families."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct

import pytest

from snapshotd.criu.inet import Endpoints, rewrite
from snapshotd.net.options import _OPTIONS, Kept, put_back
from snapshotd.net.options import keep as keep_options
from snapshotd.net.sockets import borrow, tree_flows
from snapshotd.proc.tree import Process
from tests.net.hosts import Hosts
from tests.net.ranks import Rank, address, connect, listen, needs_criu, silence

pytestmark = pytest.mark.root

SOCKET, TCP = socket.SOL_SOCKET, socket.IPPROTO_TCP
SETTINGS: list[tuple[int, int, int | bytes]] = [
    (TCP, socket.TCP_USER_TIMEOUT, 12345),
    (TCP, socket.TCP_NOTSENT_LOWAT, 65536),
    (TCP, socket.TCP_CONGESTION, b"reno"),
    (TCP, socket.TCP_LINGER2, 9),
    (SOCKET, 47, struct.pack("Q", 10**9)),
    (SOCKET, 60, 1),
]


def values(sock: socket.socket) -> dict[str, bytes]:
    found = {}
    for name, where in _OPTIONS.items():
        with contextlib.suppress(OSError):
            found[name] = sock.getsockopt(*where, 32)
    return found


@needs_criu
async def test_options_survive_dump_and_restore(hosts: Hosts, rank: Rank, keep: contextlib.ExitStack) -> None:
    h1, h2, h3 = hosts
    far = listen(keep, h3, h3.ip4)
    client, _ = connect(keep, h1, far, h3.ip4)
    server, untouched = listen(keep, h1, h1.ip6), listen(keep, h1, h1.ip4)
    for sock in (client, server):
        for setting in SETTINGS:
            sock.setsockopt(*setting)
    client.setsockopt(socket.IPPROTO_IP, 10, 2)
    server.setsockopt(TCP, socket.TCP_DEFER_ACCEPT, 7)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 0x20)
    before = {sock.fileno(): values(sock) for sock in (client, server, untouched)}
    kept = h1.call(keep_options, h1.call(tree_flows, [os.getpid()]))
    mine = {item.fd: item for item in kept if item.fd in before}
    assert mine.keys() == {client.fileno(), server.fileno()}
    assert {"TCP_USER_TIMEOUT", "IP_MTU_DISCOVER"} <= mine[client.fileno()].options.keys()
    assert "TCP_DEFER_ACCEPT" in mine[server.fileno()].options
    changes: dict[Endpoints, Endpoints] = {
        (address(client.getsockname()), address(client.getpeername())): (
            address(client.getsockname()).at(h2.ip4),
            address(client.getpeername()),
        ),
        (address(server.getsockname()), None): (address(server.getsockname()).at(h2.ip6), None),
        (address(untouched.getsockname()), None): (address(untouched.getsockname()).at(h2.ip4), None),
    }
    await rank.dump(h1, client, server, untouched)
    rewrite(rank.images, changes)
    h2.call(silence, h3)
    await rank.restore(h2)
    with borrow(rank.holder(min(before))) as sock:
        assert values(sock) != before[min(before)], "criu carries them all by now: this file has no purpose any more"
    carried = [Kept.from_json(json.loads(json.dumps(item.to_json()))) for item in mine.values()]
    inside = {item.pid_inside: Process.of(rank.pid) for item in carried}
    assert put_back(carried, inside) == []
    for number, expected in before.items():
        with borrow(rank.holder(number)) as sock:
            assert values(sock) == expected


def test_options_that_a_node_rejects_are_reported() -> None:
    with socket.socket() as sock:
        unknown = Kept(
            7, sock.fileno(), {"TCP_CONGESTION": b"nosuch".hex(), "TCP_USER_TIMEOUT": struct.pack("i", 5).hex()}
        )
        (result,) = put_back([unknown], {7: Process.of(os.getpid())})
        assert "TCP_CONGESTION" in result
        assert sock.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 5
