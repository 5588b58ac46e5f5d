"""Finds every socket of a process tree, and the peer's socket of each connection with its holders."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from snapshotd.net import sockets
from snapshotd.net.flows import Address, Flow
from snapshotd.net.sockets import borrow, find_peers, listeners, own_addresses, tree_flows
from snapshotd.proc.tree import Process
from tests.net.hosts import Host, Hosts

pytestmark = pytest.mark.root


def address(name: object) -> Address:
    assert isinstance(name, tuple)
    return Address(name[0], name[1])


def listen(host: Host, ip: str, **options: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return host.call(lambda: socket.create_server((ip, 0), family=family, **options))


def connect(host: Host, server: socket.socket, ip: str) -> tuple[socket.socket, socket.socket]:
    """(client on `host`, what the server accepted)."""
    client = host.call(socket.create_connection, (ip, server.getsockname()[1]), 2.0)
    return client, server.accept()[0]


@contextlib.contextmanager
def held(host: Host, *sockets: socket.socket) -> Iterator[subprocess.Popen[str]]:
    """A process that holds these sockets, which the test has closed."""
    with host.program(["cat"], pass_fds=[sock.fileno() for sock in sockets]) as process:
        for sock in sockets:
            sock.close()
        yield process


def flows_of(host: Host, *processes: subprocess.Popen[str]) -> list[Flow]:
    return host.call(tree_flows, [process.pid for process in processes])


def test_listener_and_connections_are_found(hosts: Hosts) -> None:
    server = listen(hosts.h1, hosts.h1.ip4)
    client, accepted = connect(hosts.h2, server, hosts.h1.ip4)
    at, came_from, descriptor = address(server.getsockname()), address(client.getsockname()), accepted.fileno()
    client.sendall(b"unread")
    accepted.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
    with client, held(hosts.h1, server, accepted) as process:
        found = {flow.state: flow for flow in flows_of(hosts.h1, process)}
        assert found.keys() == {"listen", "established"}
        assert (found["listen"].local, found["listen"].remote) == (at, None)
        assert found["listen"].listens
        assert found["established"].endpoints == (at, came_from)
        assert found["established"].unread_bytes == 6
        assert [(holder.process, holder.fd) for holder in found["established"].holders] == [
            (Process.of(process.pid), descriptor)
        ]
        assert {(flow.protocol, flow.family) for flow in found.values()} == {("tcp", "inet")}


def test_pairs_that_are_in_use_are_found(hosts: Hosts) -> None:
    """Also those of connections that no process holds any more."""
    server = listen(hosts.h1, hosts.h1.ip4)
    client, accepted = connect(hosts.h2, server, hosts.h1.ip4)
    pair = address(accepted.getsockname()), address(accepted.getpeername())
    free = pair[0], pair[1].at("10.9.1.99")
    with server, client:
        assert hosts.h1.call(sockets.existing, [pair, free]) == [pair]
        accepted.close()  # this side closes first, and keeps the pair for a while
        assert hosts.h1.call(sockets.existing, [pair, free]) == [pair]
    assert sockets.existing([]) == []


def test_socket_shared_by_two_processes_is_one_flow(hosts: Hosts) -> None:
    server = listen(hosts.h1, hosts.h1.ip4)
    descriptor = server.fileno()
    with held(hosts.h1, server.dup()) as first, held(hosts.h1, server) as second:
        (flow,) = flows_of(hosts.h1, first, second)
        assert {holder.pid for holder in flow.holders} == {first.pid, second.pid}
        assert (second.pid, descriptor) in {(holder.pid, holder.fd) for holder in flow.holders}


def test_dual_stack_and_v4_mapped_sockets_are_found(hosts: Hosts) -> None:
    dual = listen(hosts.h1, "::", dualstack_ipv6=True)
    alone = listen(hosts.h1, "::")
    client, accepted = connect(hosts.h2, dual, hosts.h1.ip4)
    client6, accepted6 = connect(hosts.h2, alone, hosts.h1.ip6)
    at, at6 = dual.getsockname()[1], alone.getsockname()[1]
    with client, client6, held(hosts.h1, dual, alone, accepted, accepted6) as process:
        flows = flows_of(hosts.h1, process)
        assert {flow.family for flow in flows} == {"inet6"}
        assert {(flow.local, flow.v6only) for flow in flows if flow.listens} == {
            (Address("::", at), False),
            (Address("::", at6), True),
        }
        assert {flow.endpoints for flow in flows if flow.connected} == {
            (Address(hosts.h1.ip4, at), address(client.getsockname())),
            (Address(hosts.h1.ip6, at6), address(client6.getsockname())),
        }


def test_sockets_in_no_table_are_found(hosts: Hosts) -> None:
    """One neither bound nor connected, one only bound, and one whose connection was reset, which keeps its address."""
    server = listen(hosts.h1, hosts.h1.ip4)
    client, accepted = connect(hosts.h2, server, hosts.h1.ip4)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()  # a reset
    with pytest.raises(ConnectionResetError):
        accepted.recv(1)
    fresh, bound = hosts.h1.call(socket.socket), hosts.h1.call(socket.socket)
    bound.bind((hosts.h1.ip4, 0))
    expected = {Address("0.0.0.0", 0), address(bound.getsockname()), address(server.getsockname())}
    with server, held(hosts.h1, fresh, bound, accepted) as process:
        flows = flows_of(hosts.h1, process)
        assert {flow.local for flow in flows} == expected
        assert {(flow.state, flow.remote) for flow in flows} == {("close", None)}


def test_other_protocols_are_named(hosts: Hosts) -> None:
    def make() -> list[socket.socket]:
        bound, connected = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
        bound.bind((hosts.h1.ip4, 0))
        connected.connect((hosts.h2.ip4, 9))
        raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        multipath = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
        return [
            bound,
            connected,
            raw,
            multipath,
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
            *socket.socketpair(),
        ]

    sockets = hosts.h1.call(make)
    names = address(sockets[0].getsockname()), address(sockets[1].getsockname())
    with held(hosts.h1, *sockets) as process:
        flows = flows_of(hosts.h1, process)
        assert sorted(flow.protocol for flow in flows) == ["mptcp", "packet", "raw", "udp", "udp"]
        udp = {(flow.state, flow.local, flow.remote) for flow in flows if flow.protocol == "udp"}
        assert udp == {("close", names[0], None), ("established", names[1], Address(hosts.h2.ip4, 9))}


def test_socket_of_another_namespace_is_not_taken_for_a_closed_one(hosts: Hosts) -> None:
    server = listen(hosts.h1, hosts.h1.ip4)
    with held(hosts.h2, server) as process:
        assert [flow.state for flow in flows_of(hosts.h2, process)] == ["elsewhere"]


@pytest.mark.parametrize("kind", ["v4", "v6", "v4-mapped"])
def test_peers_sockets_are_found_with_their_holders(hosts: Hosts, kind: str) -> None:
    """Three connections between the same two hosts, one of them in the other direction, and one to a third host."""
    where: Callable[[Host], str] = lambda host: host.ip6 if kind == "v6" else host.ip4  # noqa: E731
    options = {"dualstack_ipv6": True} if kind == "v4-mapped" else {}
    server = listen(hosts.h1, "::" if options else where(hosts.h1), **options)
    back = listen(hosts.h2, "::" if options else where(hosts.h2), **options)
    endpoints = [connect(hosts.h2, server, where(hosts.h1)) for _ in range(2)]
    mine, theirs = connect(hosts.h1, back, where(hosts.h2))
    third, elsewhere = connect(hosts.h3, server, where(hosts.h1))
    rank = [accepted for _, accepted in endpoints] + [mine, elsewhere]
    peer = [client for client, _ in endpoints] + [theirs]
    numbers = [sock.fileno() for sock in peer]
    inodes = [os.fstat(number).st_ino for number in numbers]
    with server, back, third, held(hosts.h1, *rank) as ours, held(hosts.h2, *peer) as process:
        pairs = [flow.endpoints for flow in flows_of(hosts.h1, ours)]
        assert len(pairs) == 4
        found = hosts.h2.call(find_peers, pairs)
        assert {(pair[1], pair[0]) for pair in found} == {flow.endpoints for flow in found.values()}
        assert len(found) == 3
        assert {(flow.inode, *flow.holders) for flow in found.values()} == {
            (inode, _holder(process, number)) for inode, number in zip(inodes, numbers, strict=True)
        }
        assert [flow.holders for flow in hosts.h2.call(find_peers, pairs, None, [ours.pid]).values()] == [()] * 3
        assert hosts.h3.call(find_peers, pairs).keys() == set(pairs) - found.keys()


def _holder(process: subprocess.Popen[str], number: int) -> object:
    from snapshotd.net.flows import Holder

    return Holder(process.pid, Process.of(process.pid).start_ticks, number)


def test_socket_that_was_not_accepted_has_no_holder(hosts: Hosts) -> None:
    with (
        listen(hosts.h2, hosts.h2.ip4) as server,
        hosts.h1.call(socket.create_connection, (hosts.h2.ip4, server.getsockname()[1]), 2.0) as client,
    ):
        pair = address(client.getsockname()), address(client.getpeername())
        (flow,) = hosts.h2.call(find_peers, [pair]).values()
        assert (flow.state, flow.holders) == ("established", ())


def test_socket_connected_to_a_former_address_is_found(hosts: Hosts) -> None:
    """As a forwarding leaves it: the peer's socket has the rank's former address, the rank's socket the present one."""
    with listen(hosts.h2, hosts.h2.ip4) as server:
        client, accepted = connect(hosts.h1, server, hosts.h2.ip4)
        with client, accepted:
            former, peer = address(client.getpeername()), address(client.getsockname())
            pair = former.at(hosts.h3.ip4), peer
            assert hosts.h1.call(find_peers, [pair]) == {}
            assert hosts.h1.call(find_peers, [pair], {former: former.at("10.9.1.77")}) == {}
            found = hosts.h1.call(find_peers, [pair], {former: pair[0]})
            assert [flow.endpoints for flow in found.values()] == [(peer, former)]
            assert found.keys() == {pair}


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_socket_connected_over_loopback_is_found_by_its_port(hosts: Hosts, loopback: str) -> None:
    """The rank sees the node's real address where the peer's socket has a loopback one."""
    with listen(hosts.h1, loopback) as server:
        client, accepted = connect(hosts.h1, server, loopback)
        with client, accepted:
            former, peer = address(client.getpeername()), address(client.getsockname())
            here, there = (hosts.h1.ip6, hosts.h3.ip6) if ":" in loopback else (hosts.h1.ip4, hosts.h3.ip4)
            pair = former.at(there), peer.at(here)
            assert hosts.h1.call(find_peers, [pair]) == {}
            found = hosts.h1.call(find_peers, [pair], {former: pair[0]})
            assert {key: flow.endpoints for key, flow in found.items()} == {pair: (peer, former)}
            not_ours = former.at(there), peer.at(there)
            assert hosts.h1.call(find_peers, [not_ours], {former: pair[0]}) == {}


def test_borrow_refuses_a_reused_descriptor(hosts: Hosts) -> None:
    server = listen(hosts.h1, hosts.h1.ip4)
    with held(hosts.h1, server) as process:
        (flow,) = flows_of(hosts.h1, process)
        with borrow(flow.holders[0], flow.inode) as sock:
            assert address(sock.getsockname()) == flow.local
        with pytest.raises(ProcessLookupError, match="is another file now"):
            borrow(flow.holders[0], flow.inode + 1)
    with pytest.raises(ProcessLookupError):
        borrow(flow.holders[0], flow.inode)


def test_listeners_and_own_addresses_are_listed(hosts: Hosts) -> None:
    with listen(hosts.h1, hosts.h1.ip4) as server, listen(hosts.h1, "::") as other:
        port = server.getsockname()[1]
        assert [flow.local for flow in hosts.h1.call(listeners, {port})] == [Address(hosts.h1.ip4, port)]
        assert {flow.local.port for flow in hosts.h1.call(listeners)} == {port, other.getsockname()[1]}
        assert hosts.h2.call(listeners) == []
    own = hosts.h1.call(own_addresses)
    assert own >= {"127.0.0.1", "::1", hosts.h1.ip4, hosts.h1.ip6}
    assert hosts.h2.ip4 not in own
