"""Held flows are silent, not broken: real TCP through real packet filters, between and within network namespaces."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from snapshotd.api.errors import Internal, Usage
from snapshotd.net import filter as packet_filter
from snapshotd.net import nft
from snapshotd.net.flows import Address, Pair
from tests.net.hosts import Host, Hosts

pytestmark = pytest.mark.root

MOVE, OTHER = "m-0123456789ab", "m-ba9876543210"
SILENCE_S = 0.3  # the first retransmission comes after 0.2 s, a RST at once
BACK_OFF_S = 15.0  # far beyond the back-off that such a silence causes


def _listen(ip: str) -> socket.socket:
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)


@contextlib.contextmanager
def connection(client: Host, server: Host, ip: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with server.call(_listen, ip) as listener:
        near = client.call(socket.create_connection, listener.getsockname()[:2], 60.0)
        far, _ = listener.accept()
    with near, far:
        far.settimeout(60.0)
        yield near, far


def pair(end: socket.socket) -> Pair:
    return Address(*end.getsockname()[:2]), Address(*end.getpeername()[:2])


def expect_silence(*ends: socket.socket) -> None:
    """Neither data nor an error, which a RST would be."""
    assert select.select(ends, [], [], SILENCE_S)[0] == []


def expect(end: socket.socket, data: bytes) -> None:
    end.settimeout(BACK_OFF_S)
    got = b""
    while len(got) < len(data):
        piece = end.recv(len(data) - len(got))
        assert piece, "the connection was closed"
        got += piece
    assert got == data


HOW_REACHED: list[Callable[[Hosts], tuple[Host, str]]] = [
    lambda hosts: (hosts.h2, hosts.h2.ip4),
    lambda hosts: (hosts.h2, hosts.h2.ip6),
    lambda hosts: (hosts.h1, hosts.h1.ip4),
    lambda hosts: (hosts.h1, "127.0.0.1"),
    lambda hosts: (hosts.h1, "::1"),
]


@pytest.mark.parametrize("reached", HOW_REACHED, ids=["ipv4", "ipv6", "own-address", "loopback", "loopback6"])
def test_held_flow_is_silent_and_continues_after_release(
    hosts: Hosts, reached: Callable[[Hosts], tuple[Host, str]]
) -> None:
    server, ip = reached(hosts)
    with connection(hosts.h1, server, ip) as (near, far), connection(hosts.h1, server, ip) as (free, unheld):
        hosts.h1.call(packet_filter.hold, MOVE, [pair(near)])
        near.sendall(b"there")
        far.sendall(b"back")
        expect_silence(far, near)
        free.sendall(b"untouched")
        expect(unheld, b"untouched")
        hosts.h1.call(packet_filter.release, MOVE, [pair(near)])
        expect(far, b"there")
        expect(near, b"back")


def test_pair_means_both_directions(hosts: Hosts) -> None:
    with connection(hosts.h1, hosts.h2, hosts.h2.ip4) as (near, far):
        hosts.h1.call(packet_filter.hold, MOVE, [pair(far)])
        assert hosts.h1.call(packet_filter.held, MOVE) == {pair(near), pair(far)}
        near.sendall(b"x")
        expect_silence(far)
        hosts.h1.call(packet_filter.release, MOVE, [pair(far)])
        assert hosts.h1.call(packet_filter.held, MOVE) == set()
        expect(far, b"x")


def test_reset_does_not_pass(hosts: Hosts) -> None:
    with connection(hosts.h1, hosts.h2, hosts.h2.ip4) as (near, far):
        hosts.h1.call(packet_filter.hold, MOVE, [pair(near)])
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()  # sends one RST
        expect_silence(far)
        hosts.h1.call(packet_filter.drop_table, MOVE)
        far.settimeout(BACK_OFF_S)
        far.send(b"hello?")
        with pytest.raises(ConnectionResetError):  # the filter is gone: the other host answers
            far.recv(1)


def test_held_listener_gets_no_new_connections_and_keeps_existing_ones(hosts: Hosts) -> None:
    with hosts.h2.call(_listen, hosts.h2.ip4) as listener:
        address = Address(*listener.getsockname())
        with hosts.h1.call(socket.create_connection, (address.ip, address.port), 2.0) as near:
            far, _ = listener.accept()
            hosts.h2.call(packet_filter.hold_listeners, MOVE, [address])
            with pytest.raises(TimeoutError):
                hosts.h1.call(socket.create_connection, (address.ip, address.port), SILENCE_S)
            with far:
                near.sendall(b"old")
                expect(far, b"old")
            caller = hosts.h1.call(socket.socket)
            with caller:
                caller.setblocking(False)
                assert caller.connect_ex((address.ip, address.port)) != 0  # its first SYN is dropped
                hosts.h2.call(packet_filter.drop_table, MOVE)
                listener.settimeout(BACK_OFF_S)
                accepted, _ = listener.accept()  # the second is not
                accepted.close()


def test_every_call_is_idempotent(hosts: Hosts) -> None:
    host = hosts.h1
    flows = [(Address("10.0.0.1", 1), Address("10.0.0.2", 2)), (Address("fd00::1", 1), Address("fd00::2", 2))]
    both_ways = {*flows, *((b, a) for a, b in flows)}
    listener = [Address("10.0.0.1", 1)]
    for _ in range(2):
        host.call(packet_filter.hold, MOVE, flows)
        host.call(packet_filter.hold_listeners, MOVE, listener)
    assert host.call(packet_filter.held, MOVE) == both_ways
    rules = [found for found in host.call(nft.ask, f"list table inet snapshotd-{MOVE}") if "rule" in found]
    assert len(rules) == 8  # four for each direction, not sixteen
    for _ in range(2):
        host.call(packet_filter.release, MOVE, flows[:1])
    assert host.call(packet_filter.held, MOVE) == both_ways - {flows[0], flows[0][::-1]}
    host.call(packet_filter.release, OTHER, flows)
    for _ in range(2):
        host.call(packet_filter.drop_table, MOVE)
    assert host.call(packet_filter.held, MOVE) == set()


def test_tables_lists_only_moves_that_hold_flows(hosts: Hosts) -> None:
    host = hosts.h1
    for move in (MOVE, OTHER):
        host.call(packet_filter.hold, move, [])
    host.call(nft.apply, "add table inet snapshotd-fwd-job-0-aaaa\nadd table inet theirs\nadd table ip snapshotd-m-00")
    assert host.call(packet_filter.tables) == [MOVE, OTHER]
    host.call(packet_filter.drop_table, MOVE)
    assert host.call(packet_filter.tables) == [OTHER]
    assert hosts.h2.call(packet_filter.tables) == []


def test_thousands_of_flows_are_one_rule(hosts: Hosts) -> None:
    flows = [(Address("10.0.0.1", port), Address("10.0.0.2", 80)) for port in range(1000, 3000)]
    with connection(hosts.h1, hosts.h2, hosts.h2.ip4) as (near, far):
        hosts.h1.call(packet_filter.hold, MOVE, [*flows, pair(near)])
        near.sendall(b"x")
        expect_silence(far)
        hosts.h1.call(packet_filter.release, MOVE, [pair(near)])
        expect(far, b"x")
        assert len(hosts.h1.call(packet_filter.held, MOVE)) == 2 * len(flows)


def test_two_moves_do_not_release_each_others_flows(hosts: Hosts) -> None:
    with connection(hosts.h1, hosts.h2, hosts.h2.ip4) as (near, far):
        for move in (MOVE, OTHER):
            hosts.h1.call(packet_filter.hold, move, [pair(near)])
        hosts.h1.call(packet_filter.drop_table, MOVE)
        near.sendall(b"x")
        expect_silence(far)
        hosts.h1.call(packet_filter.drop_table, OTHER)
        expect(far, b"x")


def test_invalid_arguments_change_nothing(hosts: Hosts) -> None:
    with pytest.raises(Usage):
        hosts.h1.call(packet_filter.hold, "m-1; flush ruleset", [])
    with pytest.raises(Internal, match="family"):
        hosts.h1.call(packet_filter.hold, MOVE, [(Address("10.0.0.1", 1), Address("fd00::1", 1))])
    with pytest.raises(Internal, match="an address to listen on"):
        hosts.h1.call(packet_filter.hold_listeners, MOVE, [Address("0.0.0.0", 1)])
    assert hosts.h1.call(nft.tables) == []


def test_transaction_is_atomic(hosts: Hosts) -> None:
    with pytest.raises(nft.NftFailed, match="No such file"):
        hosts.h1.call(nft.apply, "add table inet snapshotd-x\nadd rule inet snapshotd-x nowhere drop")
    assert hosts.h1.call(nft.tables) == []


def test_missing_library_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nft, "LIBRARY", "libnftables.so.nowhere")
    nft._library.cache_clear()
    try:
        with pytest.raises(nft.NotSupported) as caught:
            nft.tables()
    finally:
        nft._library.cache_clear()
    assert "libnftables1" in caught.value.advice
