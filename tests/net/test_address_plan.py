"""The addresses that each socket gets on the target: the pure plan."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.address_plan import Places, plan
from snapshotd.net.flows import Address, Family, Flow

NODES = {
    "node-1": ["10.0.0.1/24", "192.168.9.1/16", "fd00::1/64"],
    "node-2": ["10.0.0.2/24", "fd00::2/64"],
    "spare-1": ["192.168.9.3/16", "10.0.0.3/24", "fd00::3/64"],
}
PLACES = Places(NODES, "node-1", "spare-1")


def flow(local: str, remote: str = "", *, family: Family = "inet", inode: int = 1) -> Flow:
    state = "established" if remote else "listen"
    return Flow("tcp", family, state, Address.parse(local), Address.parse(remote) if remote else None, inode)


def described(rewire: pb.Rewire) -> tuple[str, str, str, str]:
    def endpoints(local: pb.Endpoint, remote: pb.Endpoint) -> str:
        return f"{local.ip}:{local.port}-{remote.ip}:{remote.port}"

    kind = pb.Rewire.Kind.Name(rewire.kind)
    old, new = endpoints(rewire.old_local, rewire.old_remote), endpoints(rewire.new_local, rewire.new_remote)
    return kind, old, new, rewire.peer_node


def test_connection_to_a_peer_gets_the_targets_address_of_the_same_network() -> None:
    (rewire,), problems = plan([flow("10.0.0.1:5000", "10.0.0.2:6000")], PLACES)
    assert problems == []
    assert described(rewire) == ("PEER", "10.0.0.1:5000-10.0.0.2:6000", "10.0.0.3:5000-10.0.0.2:6000", "node-2")
    (other,), _ = plan([flow("192.168.9.1:5000", "10.0.0.2:6000")], PLACES)
    assert other.new_local.ip == "192.168.9.3"


def test_loopback_connection_to_a_process_that_stays_gets_real_addresses() -> None:
    (rewire,), _ = plan([flow("127.0.0.1:5000", "127.0.0.1:29500")], PLACES)
    kind, _, new, peer = described(rewire)
    assert (kind, new, peer) == ("PEER", "10.0.0.3:5000-10.0.0.1:29500", "node-1")


def test_connections_within_the_rank_stay_within_it() -> None:
    rewires, _ = plan(
        [
            flow("127.0.0.1:1", "127.0.0.1:2"),
            flow("127.0.0.1:2", "127.0.0.1:1", inode=2),
            flow("10.0.0.1:3", "10.0.0.1:4", inode=3),
            flow("10.0.0.1:4", "10.0.0.1:3", inode=4),
        ],
        PLACES,
    )
    assert [described(rewire)[0] for rewire in rewires] == ["INSIDE"] * 4
    assert described(rewires[0])[2] == "127.0.0.1:1-127.0.0.1:2"
    assert described(rewires[2])[2] == "10.0.0.3:3-10.0.0.3:4"


def test_host_without_daemon_is_outside() -> None:
    (rewire,), _ = plan([flow("10.0.0.1:5000", "8.8.8.8:443")], PLACES)
    assert described(rewire)[0] == "OUTSIDE"


def test_listeners_keep_wildcard_and_loopback_and_change_node_addresses() -> None:
    rewires, _ = plan(
        [flow("0.0.0.0:1"), flow("127.0.0.1:2"), flow("10.0.0.1:3"), flow("[::]:4", family="inet6")], PLACES
    )
    assert [rewire.new_local.ip for rewire in rewires] == ["0.0.0.0", "127.0.0.1", "10.0.0.3", "::"]
    assert {rewire.kind for rewire in rewires} == {pb.Rewire.LISTENER}


def test_family_that_the_target_lacks_is_a_problem() -> None:
    places = Places({**NODES, "spare-1": ["10.0.0.3/24"]}, "node-1", "spare-1")
    rewires, problems = plan([flow("[fd00::1]:5", "[fd00::2]:6", family="inet6")], places)
    assert rewires == []
    assert "spare-1 has no address that can replace fd00::1" in problems[0]


def test_unconnected_socket_changes_only_its_own_address() -> None:
    bound = Flow("tcp", "inet", "close", Address.parse("10.0.0.1:5000"), None, 1)
    datagrams = Flow("udp", "inet", "established", Address.parse("10.0.0.1:5001"), Address.parse("8.8.8.8:53"), 2)
    unbound = Flow("tcp", "inet", "close", Address("0.0.0.0", 0), None, 3)
    rewires, problems = plan([bound, datagrams, unbound], PLACES)
    assert problems == []
    assert [described(rewire)[0] for rewire in rewires] == ["OWN", "OWN"]
    assert not rewires[0].HasField("old_remote")
    assert rewires[0].new_local.ip == "10.0.0.3"
    assert described(rewires[1])[2] == "10.0.0.3:5001-8.8.8.8:53"


def test_datagram_sockets_within_the_rank_stay_within_it() -> None:
    one, other = Address.parse("10.0.0.1:1"), Address.parse("10.0.0.1:2")
    rewires, _ = plan(
        [Flow("udp", "inet", "established", one, other, 1), Flow("udp", "inet", "established", other, one, 2)], PLACES
    )
    assert [described(rewire)[2] for rewire in rewires] == ["10.0.0.3:1-10.0.0.3:2", "10.0.0.3:2-10.0.0.3:1"]


def test_listener_whose_address_cannot_be_replaced_is_a_problem() -> None:
    places = Places({"node-1": ["10.0.0.1/24", "fd00::1/64"], "spare-1": ["10.0.0.3/24"]}, "node-1", "spare-1")
    rewires, problems = plan([flow("[fd00::1]:80", family="inet6")], places)
    assert rewires == []
    assert "[fd00::1]:80" in problems[0]
