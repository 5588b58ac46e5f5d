"""The forwardings of a rank's listeners after each of its moves: a pure function of the plan."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.peers.forwarding import moved_listeners
from snapshotd.moves.peers.new_connections import reached_at
from snapshotd.net.flows import Address
from snapshotd.net.places import Places

A, B, C = "a", "b", "c"
NODES = {A: ["10.0.0.1/24", "fd00::1/64"], B: ["10.0.0.2/24"], C: ["10.0.0.3/24", "fd00::3/64"]}


def listener(old: str, new: str) -> pb.Rewire:
    endpoints = [pb.Endpoint(ip=address.ip, port=address.port) for address in (Address.parse(old), Address.parse(new))]
    return pb.Rewire(kind=pb.Rewire.LISTENER, old_local=endpoints[0], new_local=endpoints[1])


def test_every_former_address_of_a_listener_is_forwarded() -> None:
    first = moved_listeners([], [listener("10.0.0.1:80", "10.0.0.2:80")], Places(NODES, A, B), leaves_home=True)
    second = moved_listeners(first, [listener("10.0.0.2:80", "10.0.0.3:80")], Places(NODES, B, C))
    back = moved_listeners(second, [listener("10.0.0.3:80", "10.0.0.1:80")], Places(NODES, C, A), comes_home=True)
    assert first == [["10.0.0.1:80", "10.0.0.2:80"]]
    assert second == [["10.0.0.1:80", "10.0.0.3:80"], ["10.0.0.2:80", "10.0.0.3:80"]]
    assert back == [["10.0.0.2:80", "10.0.0.1:80"], ["10.0.0.3:80", "10.0.0.1:80"]]


def test_wildcard_listener_is_forwarded_from_loopback_until_it_returns() -> None:
    first = moved_listeners([], [listener("0.0.0.0:80", "0.0.0.0:80")], Places(NODES, A, B), leaves_home=True)
    assert ["127.0.0.1:80", "10.0.0.2:80"] in first
    second = moved_listeners(first, [listener("0.0.0.0:80", "0.0.0.0:80")], Places(NODES, B, C))
    assert ["127.0.0.1:80", "10.0.0.3:80"] in second
    back = moved_listeners(second, [listener("0.0.0.0:80", "0.0.0.0:80")], Places(NODES, C, A), comes_home=True)
    assert not [old for old, _ in back if old.startswith("127.")]


def test_ipv6_address_is_not_forwarded_to_a_target_without_ipv6() -> None:
    to_b = moved_listeners([], [listener("[::]:80", "[::]:80")], Places(NODES, A, B))
    assert to_b == [["10.0.0.1:80", "10.0.0.2:80"]]
    to_c = moved_listeners([], [listener("[::]:80", "[::]:80")], Places(NODES, A, C))
    assert ["[fd00::1]:80", "[fd00::3]:80"] in to_c


def test_loopback_listener_is_not_forwarded() -> None:
    assert moved_listeners([], [listener("127.0.0.1:80", "127.0.0.1:80")], Places(NODES, A, B), leaves_home=True) == []


def test_ipv6_listener_is_forwarded_for_ipv4_too_unless_v6only() -> None:
    everywhere = Address("::", 80)
    assert reached_at(everywhere, ["10.0.0.1", "fd00::1"], v6only=False) == [
        Address("10.0.0.1", 80),
        Address("fd00::1", 80),
    ]
    assert reached_at(everywhere, ["10.0.0.1", "fd00::1"], v6only=True) == [Address("fd00::1", 80)]
    assert reached_at(Address("0.0.0.0", 80), ["10.0.0.1", "fd00::1"], v6only=False) == [Address("10.0.0.1", 80)]


def test_listener_of_ipv6_alone_takes_no_connections_of_ipv4_along() -> None:
    """Another user may listen at that port over IPv4."""
    alone = listener("[::]:80", "[::]:80")
    alone.v6only = True
    assert moved_listeners([], [alone], Places(NODES, A, C), leaves_home=True) == [
        ["[::1]:80", "[fd00::3]:80"],
        ["[fd00::1]:80", "[fd00::3]:80"],
    ]
    assert moved_listeners([], [alone], Places(NODES, A, B), leaves_home=True) == []


def test_address_that_several_nodes_have_is_not_forwarded() -> None:
    nodes = {A: ["172.17.0.1/16", "10.0.0.1/24"], B: ["172.17.0.1/16", "10.0.0.2/24"]}
    found = moved_listeners([], [listener("0.0.0.0:80", "0.0.0.0:80")], Places(nodes, A, B))
    assert found == [["10.0.0.1:80", "10.0.0.2:80"]]
    assert moved_listeners([], [listener("172.17.0.1:80", "172.17.0.1:80")], Places(nodes, A, B)) == []


def test_wildcard_listener_is_forwarded_within_each_network() -> None:
    nodes = {A: ["10.0.0.1/24", "10.1.0.1/24"], B: ["10.0.0.2/24", "10.1.0.2/24"]}
    found = moved_listeners([], [listener("0.0.0.0:80", "0.0.0.0:80")], Places(nodes, A, B))
    assert found == [["10.0.0.1:80", "10.0.0.2:80"], ["10.1.0.1:80", "10.1.0.2:80"]]
