"""Rewrites addresses in real images: the real CRIU dumps a process on one host and restores it on another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct

import pytest

from snapshotd.api.errors import Internal
from snapshotd.criu.inet import Endpoints, listed, rewrite
from snapshotd.net.flows import Address
from snapshotd.net.reset import reset
from snapshotd.net.sockets import borrow, own_addresses, tree_flows
from tests.net.hosts import Hosts
from tests.net.ranks import Rank, address, connect, listen, needs_criu, silence

pytestmark = [pytest.mark.root, needs_criu]


async def test_listeners_and_connections_get_their_new_addresses(
    hosts: Hosts, rank: Rank, keep: contextlib.ExitStack
) -> None:
    """Connections within the rank, from and to h3, and one that is ended; moved from h1 to h2."""
    h1, h2, h3 = hosts
    mapped = listen(keep, h1, "::", dualstack_ipv6=True)
    plain, plain6 = listen(keep, h1, h1.ip4), listen(keep, h1, h1.ip6)
    far, far6 = listen(keep, h3, h3.ip4), listen(keep, h3, h3.ip6)
    ended, _ = connect(keep, h1, far, h3.ip4)
    sender, reader = connect(keep, h3, plain, h1.ip4)
    connected = [
        reader,
        connect(keep, h3, mapped, h1.ip4)[1],
        connect(keep, h3, plain6, h1.ip6)[1],
        connect(keep, h1, far, h3.ip4)[0],
        connect(keep, h1, far6, h3.ip6)[0],
        *connect(keep, h1, plain, h1.ip4),
        *connect(keep, h1, mapped, "127.0.0.1"),
    ]
    bound = keep.enter_context(h1.call(socket.socket))
    bound.bind((h1.ip4, 0))

    def moved(name: Address) -> Address:
        return name.at({h1.ip4: h2.ip4, h1.ip6: h2.ip6}.get(name.ip, name.ip))

    changes: dict[Endpoints, Endpoints] = {}
    expected: dict[int, Endpoints] = {}
    for sock in connected:
        local, remote = address(sock.getsockname()), address(sock.getpeername())
        expected[sock.fileno()] = moved(local), moved(remote)
        if not local.loopback:
            changes[local, remote] = expected[sock.fileno()]
    for sock in (plain, plain6, bound):
        changes[address(sock.getsockname()), None] = expected[sock.fileno()] = moved(address(sock.getsockname())), None
    expected[mapped.fileno()] = address(mapped.getsockname()), None
    queued = b"unread before the move"
    sender.sendall(queued)
    reader.recv(len(queued), socket.MSG_PEEK | socket.MSG_WAITALL)
    reading, ended_pair = reader.fileno(), (address(ended.getsockname()), address(ended.getpeername()))
    everything = [*connected, plain, plain6, bound, mapped]
    ended_number, families = ended.fileno(), {sock.fileno(): sock.family for sock in everything}
    await rank.dump(h1, ended, *everything)

    before = sorted(map(str, listed(rank.images)))
    own = h2.call(own_addresses)
    with pytest.raises(Internal, match="does not have"):
        rewrite(rank.images, {}, own=own)
    with pytest.raises(Internal, match="lacks the connections"):
        rewrite(rank.images, {(Address("10.0.0.1", 1), None): (Address("10.0.0.2", 1), None)})
    assert sorted(map(str, listed(rank.images))) == before
    done = rewrite(rank.images, changes, [ended_pair], own)
    assert done.changed == len(changes)
    assert [number for _, number in done.closed] == [ended_number]
    assert rewrite(rank.images, changes, [ended_pair], own) == done  # as after a daemon that was killed in between
    assert (rank.images / "files.img.dumped").stat().st_size

    h2.call(silence, h3)
    await rank.restore(h2)
    assert [pid for pid, _ in done.closed] == [rank.pid]
    found: dict[int, Endpoints] = {}
    for flow in h2.call(tree_flows, [rank.pid]):
        for holder in flow.holders:
            found[holder.fd] = flow.local, flow.remote
            assert flow.state in ("established" if flow.connected else "listen", "close")
            if holder.fd in families:
                assert flow.family == ("inet6" if families[holder.fd] == socket.AF_INET6 else "inet")
    assert found.pop(ended_number) == (Address("0.0.0.0", 0), None)
    assert found == expected
    with borrow(rank.holder(reading)) as sock:
        assert sock.recv(100, socket.MSG_PEEK) == queued


async def test_dead_connection_stays_dead_beside_its_listener(
    hosts: Hosts, rank: Rank, keep: contextlib.ExitStack
) -> None:
    server = listen(keep, hosts.h1, hosts.h1.ip4)
    client, dead = connect(keep, hosts.h3, server, hosts.h1.ip4)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    with pytest.raises(ConnectionResetError):
        dead.recv(1)
    at, number = address(server.getsockname()), dead.fileno()
    await rank.dump(hosts.h1, dead, server)
    done = rewrite(rank.images, {(at, None): (at.at(hosts.h2.ip4), None)}, own=hosts.h2.call(own_addresses))
    assert (done.changed, done.closed) == (1, ())
    await rank.restore(hosts.h2)
    flows = {flow.holders[0].fd: flow for flow in hosts.h2.call(tree_flows, [rank.pid])}
    assert flows.pop(number).state == "close"
    assert [(flow.state, flow.local) for flow in flows.values()] == [("listen", at.at(hosts.h2.ip4))]
    with borrow(rank.holder(number)) as sock:
        assert sock.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            sock.send(b"x")


@pytest.mark.parametrize("kind", ["v4", "v6", "v4-mapped"])
@pytest.mark.parametrize("with_reset", [True, False])
async def test_ended_connection_reports_a_reset(
    hosts: Hosts, rank: Rank, keep: contextlib.ExitStack, kind: str, with_reset: bool
) -> None:
    """By epoll and by its calls. The image alone would make it a normal end of the stream."""
    ip = hosts.h3.ip6 if kind == "v6" else hosts.h3.ip4
    server = listen(keep, hosts.h3, ip)
    if kind == "v4-mapped":
        client = keep.enter_context(hosts.h1.call(socket.socket, socket.AF_INET6))
        client.connect((f"::ffff:{ip}", server.getsockname()[1]))
        far = keep.enter_context(server.accept()[0])
    else:
        client, far = connect(keep, hosts.h1, server, ip)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    number, pair = client.fileno(), (address(client.getsockname()), address(client.getpeername()))
    await rank.dump(hosts.h1, client)
    (place,) = rewrite(rank.images, {}, [pair], hosts.h2.call(own_addresses)).closed
    await rank.restore(hosts.h2)
    assert place == (rank.pid, number)
    if with_reset:
        hosts.h2.call(reset, rank.holder(number))
    with borrow(rank.holder(number)) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\7"
    os.kill(rank.pid, signal.SIGCONT)
    rank.until(lambda: rank.output.read_text().count("\n") == 2)
    met = rank.output.read_text().split("\n")[1]
    events = select.EPOLLHUP | select.EPOLLRDHUP
    if with_reset:
        assert met == f"{events | select.EPOLLERR} ConnectionResetError b'' BrokenPipeError"
    else:
        assert met == f"{events} b'' b'' BrokenPipeError"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):  # the peer received nothing
        far.recv(1)
