"""An undone move leaves no trace on sockets: every option of both ends of every connection is what it was before."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from functools import partial

import pytest

from integration.connections import Endpoints, in_node, no_filters
from integration.drill import node_of
from integration.harness import SHORT_LEASE, Cluster, until
from snapshotd.net import sockets
from snapshotd.runtime.faults import Point

SOURCE, PEER, TARGET = "node-1", "node-2", "spare-1"
SOL, IP, IPV6, TCP = socket.SOL_SOCKET, socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.IPPROTO_TCP
#: What changes by itself, or what reading changes.
LEFT_OUT = {
    *((SOL, option) for option in (4, 49, 55, 56, 77)),  # SO_ERROR, INCOMING_CPU, MEMINFO, INCOMING_NAPI_ID, PEERPIDFD
    *(
        (TCP, option) for option in (11, 12, 24, 26, 28, 35)
    ),  # TCP_INFO, QUICKACK, TIMESTAMP, CC_INFO, SAVED_SYN, ZEROCOPY
    (TCP, 10),  # TCP_WINDOW_CLAMP, which follows the receive buffer
    *((TCP, option) for option in (20, 21)),  # of repair mode: which queue was selected last, and its sequence number
}
#: Set on every connection before the move, so that no value is the default.
SET: list[tuple[int, int, int | bytes]] = [
    (SOL, socket.SO_REUSEADDR, 1),
    (SOL, socket.SO_KEEPALIVE, 1),
    (SOL, socket.SO_RCVBUF, 150_000),
    (SOL, socket.SO_SNDBUF, 140_000),
    (SOL, socket.SO_PRIORITY, 3),
    (SOL, socket.SO_LINGER, struct.pack("ii", 1, 5)),
    (SOL, socket.SO_RCVTIMEO, struct.pack("qq", 7000, 0)),
    (TCP, socket.TCP_NODELAY, 1),
    (TCP, socket.TCP_USER_TIMEOUT, 54_321),
    (TCP, socket.TCP_KEEPIDLE, 77),
    (TCP, socket.TCP_KEEPINTVL, 11),
    (TCP, socket.TCP_KEEPCNT, 5),
    (TCP, socket.TCP_NOTSENT_LOWAT, 65_536),
    (IP, socket.IP_TOS, 0x10),
    (IP, socket.IP_TTL, 33),
]

Options = dict[str, bytes]


@pytest.fixture
def ends(nodes: Cluster, request: pytest.FixtureRequest) -> Iterator[Endpoints]:
    made = Endpoints(nodes, "u" + request.node.name.translate(str.maketrans("[]-_", "....")).replace(".", "")[-30:])
    yield made
    made.until.touch()


def borrowed(ends: Endpoints) -> Iterator[tuple[str, socket.socket]]:
    """The TCP sockets of rank and peer, each with a name that stays."""
    for node in (SOURCE, PEER):
        pids = [pid for pid in ends.copies() if node_of(pid) == node]
        for flow in in_node(ends.nodes, node, partial(sockets.tree_flows, pids)):
            if flow.protocol == "tcp":
                with sockets.borrow(flow.holders[0], flow.inode) as sock:
                    yield f"{node}: {'listener' if flow.listens else 'connection'} {flow.inode}", sock


def options(ends: Endpoints) -> Options:
    found = {}
    for name, sock in borrowed(ends):
        for level in (SOL, IP, IPV6, TCP):
            for option in range(1, 90):
                if (level, option) not in LEFT_OUT:
                    with contextlib.suppress(OSError):
                        found[f"{name}: level {level} option {option}"] = sock.getsockopt(level, option, 64)
    return found


def differences(before: Options, now: Options) -> list[str]:
    return [
        f"{name}: {before.get(name, b'').hex()} became {now.get(name, b'').hex()}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("node", "point", "action"),
    [
        (SOURCE, Point.DUMPING, "kill"),  # criu has the connections in repair mode
        (SOURCE, Point.STREAM, "fail"),  # criu has ended by itself
        (SOURCE, Point.BEFORE_COMMIT, "fail"),  # the peer's sockets name the target already
        (SOURCE, Point.BEFORE_COMMIT, "kill"),
    ],
)
def test_every_socket_option_is_the_same_after_an_undone_move(
    nodes: Cluster, ends: Endpoints, node: str, point: Point, action: str
) -> None:
    rank = ends.rank(SOURCE, "--serve", "0.0.0.0:7003", "--engine", "epoll")
    ends.peer(PEER, "--connect", f"{nodes.lab.address(SOURCE)}:7003", "--connections", "2", "--engine", "epoll")
    ends.flow()
    for name, sock in borrowed(ends):
        for level, option, value in SET if "connection" in name else SET[:1]:
            sock.setsockopt(level, option, value)
    ends.flow()
    before = options(ends)
    assert len({name.partition(": level")[0] for name in before}) == 5
    nodes.fault(node, point, action)
    with nodes.begin_move(rank, TARGET, more=SHORT_LEASE) as asked:
        until(f"{point} on {node}", lambda: nodes.fired(node))
        if action == "kill":
            until(f"the end of the daemon of {node}", lambda: nodes.lab.daemon_pid(node) is None)
            nodes.lab.start_daemon(node)
        out, _ = asked.communicate(timeout=120)
    assert asked.returncode == 11, f"{out}\n{nodes.logs()}"
    no_filters(nodes)
    ends.flow()
    until(
        f"the options to be as before: {differences(before, options(ends))[:20]}",
        lambda: not differences(before, options(ends)),
    )
    ends.end()
