"""New connections reach a rank that has moved: real TCP, translated by the kernel, between and within network namespaces."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from snapshotd.api.errors import Internal, Usage
from snapshotd.net import filter as packet_filter
from snapshotd.net import forward, nft, tracking
from snapshotd.net.flows import Address
from tests.net.hosts import Host, Hosts

pytestmark = pytest.mark.root

UID, OTHER = "job-0-0a1b2c3d", "job-1-0a1b2c3d"
PORT = 29500


def _listen(ip: str, port: int = PORT) -> socket.socket:
    server = socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
    server.settimeout(60.0)
    return server


def dial(host: Host, ip: str, port: int = PORT) -> socket.socket:
    return host.call(socket.create_connection, (ip, port), 60.0)


def expect_both_ways(near: socket.socket, far: socket.socket) -> None:
    far.settimeout(60.0)
    near.settimeout(60.0)
    near.sendall(b"question")
    assert far.recv(100) == b"question"
    far.sendall(b"answer")
    assert near.recv(100) == b"answer"


def expect_reaches(host: Host, ip: str, server: socket.socket, port: int = PORT) -> str:
    """A connection from `host` reaches `server` and carries data; returns the client's address as the server sees it."""
    with dial(host, ip, port) as near:
        far, caller = server.accept()
        with far:
            expect_both_ways(near, far)
            assert near.getpeername()[:2] == (ip, port)  # the client sees the address it connected to
    return str(caller[0])


def expect_refused(host: Host, ip: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        dial(host, ip)


def set_switch(host: Host, name: str, value: str) -> None:
    host.call(Path("/proc/sys/net", name).write_text, value)


def switch(host: Host, name: str) -> str:
    return host.call(Path("/proc/sys/net", name).read_text).strip()


def local_routes_to_loopback(host: Host) -> list[int]:
    def look() -> list[int]:
        with IPRoute() as netlink:
            routes = netlink.get_routes(family=socket.AF_INET6, table=255)
            return [route.get_attr("RTA_OIF") for route in routes if route.get_attr("RTA_DST") == "::1"]

    return host.call(look)


@pytest.mark.parametrize("family", ["ip4", "ip6"])
def test_new_connections_reach_the_new_address_from_every_node(hosts: Hosts, family: str) -> None:
    old, new = (getattr(host, family) for host in (hosts.h1, hosts.h2))
    with hosts.h2.call(_listen, new) as server:
        for host in hosts:  # the source, the target, and a third node
            with pytest.raises((ConnectionRefusedError, TimeoutError)):
                dial(host, old)
            host.call(forward.forward, UID, {Address(old, PORT): Address(new, PORT)})
            assert expect_reaches(host, old, server) == getattr(host, family)
            assert expect_reaches(host, new, server) == getattr(host, family)


@pytest.mark.parametrize(("loopback", "family"), [("127.0.0.1", "ip4"), ("::1", "ip6")])
def test_loopback_reaches_the_new_address_and_nothing_stays_open(hosts: Hosts, loopback: str, family: str) -> None:
    new = getattr(hosts.h2, family)
    routes = local_routes_to_loopback(hosts.h1)
    with hosts.h2.call(_listen, new) as server, hosts.h1.call(_listen, loopback, PORT + 1) as neighbour:
        hosts.h1.call(forward.forward, UID, {Address(loopback, PORT): Address(new, PORT)}, os.getuid())
        hosts.h1.call(forward.forward, OTHER, {Address(loopback, PORT + 9): Address(new, PORT)}, os.getuid())
        assert expect_reaches(hosts.h1, loopback, server) == getattr(hosts.h1, family)
        assert (
            expect_reaches(hosts.h1, loopback, neighbour, PORT + 1) == loopback
        )  # other local services are not affected
        hosts.h1.call(forward.forget, UID)
        expect_refused(hosts.h1, loopback)
        assert expect_reaches(hosts.h1, loopback, server, PORT + 9)  # what another rank needs stays open
        hosts.h1.call(forward.forget, OTHER)
    assert switch(hosts.h1, "ipv4/conf/eth0/route_localnet") == "0"
    assert local_routes_to_loopback(hosts.h1) == routes


def test_neighbour_cannot_reach_loopback(hosts: Hosts) -> None:
    """`route_localnet` alone would accept packets for 127.0.0.1 that a neighbour sends to this node's hardware address."""

    def misuse(through: str) -> None:
        with IPRoute() as netlink:
            cable = netlink.link_lookup(ifname="eth0")[0]
            Path("/proc/sys/net/ipv4/conf/eth0/route_localnet").write_text("1")
            netlink.route("del", dst="127.0.0.0/8", table=255, type=2, scope=254)
            netlink.route("del", dst="127.0.0.1/32", table=255, type=2, scope=254)
            netlink.route("add", dst="127.0.0.0/8", gateway=through, oif=cable)

    hosts.h3.call(misuse, hosts.h1.ip4)
    setting = "ipv4/conf/eth0/route_localnet"
    with hosts.h1.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.bind(("127.0.0.1", PORT))
        door.settimeout(3)

        def knock() -> bytes:
            with hosts.h3.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as caller:
                caller.bind((hosts.h3.ip4, 0))
                caller.sendto(b"knock", ("127.0.0.1", PORT))
            return door.recv(100)

        set_switch(hosts.h1, setting, "1")
        assert knock() == b"knock"  # without the rule it gets through, so this test can fail
        set_switch(hosts.h1, setting, "0")
        hosts.h1.call(forward.forward, UID, {Address("127.0.0.1", 1): Address(hosts.h2.ip4, 1)}, os.getuid())
        assert switch(hosts.h1, setting) == "1"
        with pytest.raises(TimeoutError):
            knock()


def test_interface_is_closed_when_no_map_needs_it(hosts: Hosts) -> None:
    routes, new = local_routes_to_loopback(hosts.h1), Address(hosts.h2.ip4, PORT)
    hosts.h1.call(forward.forward, UID, {Address("127.0.0.1", PORT): new}, os.getuid())
    assert local_routes_to_loopback(hosts.h1) != routes
    hosts.h1.call(forward.forward, UID, {Address(hosts.h1.ip4, PORT): new})
    assert switch(hosts.h1, "ipv4/conf/eth0/route_localnet") == "0"
    assert local_routes_to_loopback(hosts.h1) == routes


def test_interface_opened_by_the_administrator_is_not_closed(hosts: Hosts) -> None:
    set_switch(hosts.h1, "ipv4/conf/eth0/route_localnet", "1")
    hosts.h1.call(forward.forward, UID, {Address("127.0.0.1", PORT): Address(hosts.h2.ip4, PORT)}, os.getuid())
    hosts.h1.call(forward.forget, UID)
    assert switch(hosts.h1, "ipv4/conf/eth0/route_localnet") == "1"


@pytest.mark.parametrize(
    ("family", "setting"), [("ip4", "ipv4/ip_forward"), ("ip6", "ipv6/conf/all/forwarding")], ids=["ipv4", "ipv6"]
)
def test_host_without_daemon_is_redirected_if_the_old_node_forwards_packets(
    hosts: Hosts, family: str, setting: str
) -> None:
    old, new = (getattr(host, family) for host in (hosts.h1, hosts.h2))
    addresses = {Address(old, PORT): Address(new, PORT)}
    with hosts.h2.call(_listen, new) as server:
        hosts.h1.call(forward.forward, UID, addresses)
        expect_refused(hosts.h3, old)  # refused at once instead of a time-out
        set_switch(hosts.h1, setting, "1")
        hosts.h1.call(forward.forward, UID, addresses)
        assert expect_reaches(hosts.h3, old, server) == old


def test_existing_connections_are_not_affected(hosts: Hosts) -> None:
    """Neither an earlier one, nor a translated one when the map is replaced, nor one to the new address."""
    old, middle, new = (Address(host.ip4, PORT) for host in hosts)
    caller = hosts.h3
    first, second, third = (host.call(_listen, host.ip4) for host in hosts)
    with first, second, third, dial(caller, old.ip) as direct:
        direct_end, _ = first.accept()
        caller.call(forward.forward, UID, {old: middle})
        with direct_end, dial(caller, old.ip) as translated:
            translated_end, _ = second.accept()
            with translated_end:
                expect_both_ways(direct, direct_end)
                expect_both_ways(translated, translated_end)
                caller.call(forward.forward, UID, {old: new, middle: new})
                expect_both_ways(direct, direct_end)
                expect_both_ways(translated, translated_end)
                assert expect_reaches(caller, old.ip, third)
                assert expect_reaches(caller, middle.ip, third)


def test_held_syn_reaches_the_new_address(hosts: Hosts) -> None:
    """A SYN sent during the move reaches the rank by retransmission, without a new connect."""
    move, old, new = "m-0123456789ab", Address(hosts.h1.ip4, PORT), Address(hosts.h2.ip4, PORT)
    hosts.h3.call(forward.forward, OTHER, {Address(old.ip, 1): Address(new.ip, 1)})  # connection tracking is active
    hosts.h3.call(packet_filter.hold_listeners, move, [old])
    with hosts.h3.call(socket.socket) as caller, hosts.h2.call(_listen, new.ip) as server:
        caller.setblocking(False)
        caller.connect_ex((old.ip, old.port))
        hosts.h3.call(forward.forward, UID, {old: new})
        hosts.h3.call(packet_filter.drop_table, move)
        server.settimeout(60.0)
        far, _ = server.accept()
        with far:
            expect_both_ways(caller, far)


def test_syn_held_at_the_old_address_reaches_the_new_one(hosts: Hosts) -> None:
    """The client's kernel has tracked the SYN that was dropped at the old address; that entry must be removed."""
    move, old, new = "m-0123456789ab", Address(hosts.h1.ip4, PORT), Address(hosts.h2.ip4, PORT)
    hosts.h3.call(forward.forward, OTHER, {Address(old.ip, 1): Address(new.ip, 1)})  # connection tracking is active
    hosts.h1.call(packet_filter.hold_listeners, move, [old])
    with (
        hosts.h3.call(socket.socket) as caller,
        hosts.h2.call(_listen, new.ip) as server,
        dial_held(hosts.h3, hosts.h2, server) as untouched,
    ):
        caller.setblocking(False)
        caller.connect_ex((old.ip, old.port))
        hosts.h3.call(forward.forward, UID, {old: new})
        for _ in range(2):
            hosts.h3.call(tracking.untrack_calls, {old: new})
        server.settimeout(60.0)
        far, _ = server.accept()
        with far:
            expect_both_ways(caller, far)
        expect_both_ways(*untouched)


def test_syn_that_went_to_the_new_address_stays_tracked(hosts: Hosts) -> None:
    """Its answer may arrive at any moment, and the new connection needs the entry."""
    move, old, new = "m-0123456789ab", Address(hosts.h1.ip4, PORT), Address(hosts.h2.ip4, PORT)
    hosts.h2.call(packet_filter.hold_listeners, move, [new])
    hosts.h3.call(forward.forward, UID, {old: new})
    with hosts.h3.call(socket.socket) as caller:
        caller.setblocking(False)
        caller.connect_ex((old.ip, old.port))
        here = Address(*caller.getsockname())
        hosts.h3.call(tracking.untrack_calls, {old: new})
        assert tracking.Translation((here, old), (here, new)) in hosts.h3.call(tracking.translations)
        hosts.h3.call(tracking.untrack_calls, {old: old})
        assert tracking.Translation((here, old), (here, new)) not in hosts.h3.call(tracking.translations)


@contextlib.contextmanager
def dial_held(caller: Host, callee: Host, server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """An existing connection, which must not be affected when unanswered SYNs are forgotten."""
    with dial(caller, callee.ip4) as near:
        far, _ = server.accept()
        with far:
            yield near, far


@pytest.mark.parametrize(("called", "family"), [("", "ip4"), ("", "ip6"), ("127.0.0.1", "ip4"), ("::1", "ip6")])
def test_translated_connection_is_listed_until_it_is_untracked(hosts: Hosts, called: str, family: str) -> None:
    old, new = Address(called or getattr(hosts.h1, family), PORT), Address(getattr(hosts.h2, family), PORT)
    hosts.h1.call(forward.forward, UID, {old: new}, os.getuid())
    with hosts.h2.call(_listen, new.ip) as server, dial(hosts.h1, old.ip) as near:
        far, _ = server.accept()
        with far:
            socket_name = (Address(*near.getsockname()[:2]), old)
            wire_name = (Address(*far.getpeername()[:2]), new)
            known = tracking.Translation(socket=socket_name, wire=wire_name)
            assert hosts.h1.call(tracking.translations) == [known]
            hosts.h1.call(tracking.untrack, [(Address("10.0.0.9", 1), new)])
            assert hosts.h1.call(tracking.translations) == [known]
            for _ in range(2):
                hosts.h1.call(tracking.untrack, [wire_name])
            assert hosts.h1.call(tracking.translations) == []


def test_address_to_which_the_rank_returned_is_not_forwarded() -> None:
    a, b, c = (Address(f"10.0.0.{n}", PORT) for n in (1, 2, 3))
    after_one = forward.collapse({}, {a: b})
    after_two = forward.collapse(after_one, {b: c})
    assert (after_one, after_two) == ({a: b}, {a: c, b: c})
    assert forward.collapse(after_two, {c: a}) == {b: a, c: a}
    assert forward.collapse(after_one, {b: a}) == {b: a}
    loopback = Address("127.0.0.1", PORT)
    assert forward.collapse({loopback: b}, {b: c}) == {loopback: c, b: c}


def test_last_map_is_listed_and_forget_is_idempotent(hosts: Hosts) -> None:
    old, new = Address(hosts.h1.ip4, PORT), Address(hosts.h2.ip4, PORT)
    old6, new6 = Address(hosts.h1.ip6, PORT), Address(hosts.h2.ip6, PORT)
    host = hosts.h3
    host.call(forward.forward, UID, {old: new})
    for _ in range(2):
        host.call(forward.forward, UID, {old6: new6, new: new})
    host.call(forward.forward, OTHER, {old: new, old6: new6})
    assert host.call(forward.listed) == {UID: {old6: new6}, OTHER: {old: new, old6: new6}}
    for _ in range(2):
        host.call(forward.forget, OTHER)
    host.call(forward.forward, UID, {})
    assert host.call(forward.listed) == {}
    assert host.call(nft.tables) == []


def test_probes_find_support_and_leave_nothing(hosts: Hosts) -> None:
    hosts.h1.call(forward.check_support)
    hosts.h1.call(packet_filter.check_support)
    assert hosts.h1.call(nft.tables) == []


@pytest.mark.parametrize(
    "refused",
    ["add rule inet snapshotd-probe nowhere drop", "add chain inet t c { type route hook prerouting priority 0 ; }"],
    ids=["ENOENT", "EOPNOTSUPP"],
)
def test_kernel_without_nat_is_reported(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Such a kernel gives one of these two answers to an unknown chain type or expression."""
    monkeypatch.setattr(forward, "_rules", lambda *_: f"add table inet t\n{refused}\n")
    with pytest.raises(nft.NotSupported, match="this kernel lacks"):
        hosts.h1.call(forward.forward, UID, {Address("10.0.0.1", 1): Address("10.0.0.2", 1)})
    assert hosts.h1.call(nft.ask, "list tables") == []


def test_invalid_arguments_change_nothing(hosts: Hosts) -> None:
    four, six = Address("10.0.0.1", 1), Address("fd00::1", 1)
    for old, new in [(four, six), (Address("0.0.0.0", 1), four), (four, Address("127.0.0.1", 1))]:
        with pytest.raises(Internal, match="cannot be forwarded"):
            hosts.h1.call(forward.forward, UID, {old: new})
    with pytest.raises(Usage):
        hosts.h1.call(forward.forward, "job; flush ruleset", {four: Address("10.0.0.2", 1)})
    assert hosts.h1.call(nft.tables) == []
