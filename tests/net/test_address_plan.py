"""The addresses that each socket gets on the target: the pure plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.address_plan import plan
from snapshotd.net.flows import Address, Family, Flow
from snapshotd.net.places import Places

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


@pytest.mark.parametrize(
    ("state", "shutdown", "ended"),
    [
        ("established", "", False),
        ("close-wait", "read", True),
        ("established", "read", True),
        ("fin-wait-2", "", False),
    ],
)
def test_connection_that_the_peer_has_closed_is_marked(state: str, shutdown: str, ended: bool) -> None:
    one = replace(flow("10.0.0.1:5000", "10.0.0.2:6000"), state=state, shutdown=shutdown)
    other = flow("10.0.0.2:6000", "10.0.0.1:5000", inode=2)
    (rewire,), _ = plan([one], PLACES)
    assert (rewire.kind, rewire.ended) == (pb.Rewire.PEER, ended)
    inside, _ = plan([one, other], PLACES)
    assert not any(rewire.ended for rewire in inside)


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
    where = Places({**NODES, "spare-1": ["10.0.0.3/24"]}, "node-1", "spare-1")
    rewires, problems = plan([flow("[fd00::1]:5", "[fd00::2]:6", family="inet6")], where)
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
    where = Places({"node-1": ["10.0.0.1/24", "fd00::1/64"], "spare-1": ["10.0.0.3/24"]}, "node-1", "spare-1")
    rewires, problems = plan([flow("[fd00::1]:80", family="inet6")], where)
    assert rewires == []
    assert "[fd00::1]:80" in problems[0]


def test_only_connections_to_hosts_without_a_daemon_are_outside() -> None:
    assert PLACES.is_outside(flow("10.0.0.1:5000", "8.8.8.8:443"))
    for remote in ("10.0.0.2:443", "192.168.9.3:443", "127.0.0.1:443"):
        assert not PLACES.is_outside(flow("10.0.0.1:5000", remote))
    assert not PLACES.is_outside(flow("10.0.0.1:5000"))


# ---------------------------------------------------------------- clusters that are not flat

DOCKER = "172.17.0.1/16"


def places(
    source: dict[str, str],
    target: dict[str, str],
    networks: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    **others: dict[str, str],
) -> Places:
    """Nodes with their addresses and the interfaces of these."""
    nodes = {"node-1": source, "spare-1": target, **others}
    return Places(
        {name: list(own) for name, own in nodes.items()},
        "node-1",
        "spare-1",
        {name: list(own.values()) for name, own in nodes.items()},
        {"node-1": networks[0], "spare-1": networks[1]},
    )


def new_local(local: str, remote: str, where: Places) -> str:
    rewires, problems = plan([flow(local, remote)], where)
    assert problems == []
    return rewires[0].new_local.ip


def problem(local: str, remote: str, where: Places) -> str:
    rewires, (found,) = plan([flow(local, remote)], where)
    assert rewires == []
    return found


def test_address_that_several_nodes_have_replaces_no_other() -> None:
    nodes = {"node-1": [DOCKER, "10.0.1.1/24"], "spare-1": [DOCKER, "10.0.3.1/24"]}
    (rewire,), _ = plan([flow("127.0.0.1:5000", "127.0.0.1:29500")], Places(nodes, "node-1", "spare-1"))
    assert described(rewire)[2] == "10.0.3.1:5000-10.0.1.1:29500", "not 172.17.0.1 on both sides"
    (rewire,), _ = plan([flow("10.0.1.1:5000", "10.0.1.1:29500")], Places(nodes, "node-1", "spare-1"))
    assert rewire.new_local.ip == "10.0.3.1"


def test_connection_to_an_address_of_several_nodes_is_a_problem() -> None:
    where = places({DOCKER: "docker0", "10.0.0.1/24": "eth0"}, {DOCKER: "docker0", "10.0.0.3/24": "eth0"})
    assert "172.17.0.1 is an address of several nodes: node-1, spare-1" in problem(
        "172.17.0.1:5000", "172.17.0.1:6000", where
    )
    assert not where.is_outside(flow("172.17.0.1:5000", "172.17.0.1:6000"))


def test_address_of_the_node_itself_stays_for_what_does_not_leave_it() -> None:
    where = places({DOCKER: "docker0", "10.0.0.1/24": "eth0"}, {DOCKER: "docker0", "10.0.0.3/24": "eth0"})
    pair = [flow("172.17.0.1:1", "172.17.0.1:2"), flow("172.17.0.1:2", "172.17.0.1:1", inode=2)]
    rewires, problems = plan([*pair, flow("172.17.0.1:80", inode=3)], where)
    assert problems == []
    assert [rewire.new_local.ip for rewire in rewires] == ["172.17.0.1"] * 3


def test_connection_to_a_container_on_the_node_is_reset_and_needs_no_new_address() -> None:
    where = places({DOCKER: "docker0", "10.0.0.1/24": "eth0"}, {DOCKER: "docker0", "10.0.0.3/24": "eth0"})
    (rewire,), problems = plan([flow("172.17.0.1:5000", "172.17.0.2:6379")], where)
    assert (described(rewire)[0], problems) == ("OUTSIDE", [])


def test_routed_data_network_is_paired_by_interface_name() -> None:
    where = places(
        {"10.0.0.1/24": "eth0", "10.1.1.1/24": "ib0"},
        {"10.0.0.3/24": "eth0", "10.1.3.1/24": "ib0"},
        peer={"10.0.0.2/24": "eth0", "10.1.2.1/24": "ib0"},
    )
    assert new_local("10.1.1.1:5000", "10.1.2.1:6000", where) == "10.1.3.1", "not the management address"
    assert new_local("10.0.0.1:5000", "10.0.0.2:6000", where) == "10.0.0.3"


def test_common_network_counts_more_than_the_interface_name() -> None:
    where = places(
        {"10.0.0.1/24": "eth0", "10.1.1.1/24": "eth1"},
        {"10.1.3.1/24": "eth0", "10.0.0.3/24": "eth1"},
        peer={"10.0.0.2/24": "eth0"},
    )
    assert new_local("10.0.0.1:5000", "10.0.0.2:6000", where) == "10.0.0.3"
    found = problem("10.1.1.1:5000", "10.0.0.2:6000", where)
    assert "it is not certain which address of spare-1 replaces 10.1.1.1 (eth1) of node-1: 10.1.3.1 (eth0)" in found


def test_two_interfaces_in_one_network_are_paired_by_name_or_not_at_all() -> None:
    rails = {"10.1.0.3/16": "rail0", "10.1.0.4/16": "rail1"}
    where = places({"10.1.0.1/16": "rail1"}, rails, peer={"10.1.0.2/16": "rail0"})
    assert new_local("10.1.0.1:5000", "10.1.0.2:6000", where) == "10.1.0.4"
    where = places({"10.1.0.1/16": "ens5"}, rails, peer={"10.1.0.2/16": "ens5"})
    assert "10.1.0.3 (rail0), 10.1.0.4 (rail1)" in problem("10.1.0.1:5000", "10.1.0.2:6000", where)


def test_addresses_of_one_interface_are_equivalent() -> None:
    where = places({"fd00::1/64": "eth0"}, {"fd00::3/64": "eth0", "fd00::aaaa/64": "eth0"}, peer={"fd00::2/64": "eth0"})
    assert new_local("[fd00::1]:5000", "[fd00::2]:6000", where) == "fd00::3"


def test_only_address_of_each_node_replaces_the_other() -> None:
    where = places({"10.0.1.1/32": "ens3"}, {"10.0.3.1/32": "enp1s0"}, peer={"10.0.2.1/32": "ens3"})
    assert new_local("10.0.1.1:5000", "10.0.2.1:6000", where) == "10.0.3.1"


def test_management_address_does_not_replace_one_of_a_network_that_the_target_lacks() -> None:
    where = places({"10.0.0.1/24": "eth0", "10.1.1.1/24": "ib0"}, {"10.0.0.3/24": "eth0"}, peer={"10.1.2.1/24": "ib0"})
    found = problem("10.1.1.1:5000", "10.1.2.1:6000", where)
    assert "spare-1 has no address that can replace 10.1.1.1 (ib0) of node-1" in found


def test_networks_of_the_cluster_file_overrule_everything_else() -> None:
    source, target = {"10.0.0.1/24": "eth0", "10.1.1.1/24": "ens5"}, {"10.0.0.3/24": "eth0", "10.2.3.1/24": "ib0"}
    peer = {"10.1.2.1/24": "ens5"}
    assert "not certain" in problem("10.1.1.1:5", "10.1.2.1:6", places(source, target, peer=peer))
    where = places(source, target, ({"data": "10.1.1.1"}, {"data": "10.2.3.1"}), peer=peer)
    assert new_local("10.1.1.1:5", "10.1.2.1:6", where) == "10.2.3.1"
    assert where.real_endpoints(4) == ("10.2.3.1", "10.1.1.1"), "loopback connections use the first network of the file"


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, "names 10.1.1.1 as the address of node-1 in the network data, and none of spare-1"),
        (
            {"data": "10.9.9.9"},
            "names 10.9.9.9 as the address of spare-1 in the network data, and it is not an address",
        ),
    ],
)
def test_network_of_the_cluster_file_without_an_address_of_the_target_is_a_problem(
    theirs: dict[str, str], said: str
) -> None:
    where = places(
        {"10.1.1.1/24": "ib0"}, {"10.1.3.1/24": "ib0"}, ({"data": "10.1.1.1"}, theirs), peer={"10.1.2.1/24": "ib0"}
    )
    assert said in problem("10.1.1.1:5000", "10.1.2.1:6000", where)
