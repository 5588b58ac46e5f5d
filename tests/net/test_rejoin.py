"""Both ends of a connection between two ranks of a resumed job get mirrored addresses, with the same ports."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.rejoin import Resumed, plan

NODES = [
    pb.NodeAddresses(name=f"node-{number}", addresses=[f"10.0.0.{number}/24"], interfaces=["eth0"])
    for number in (1, 2, 3, 4)
]


def end(text: str) -> pb.Endpoint:
    ip, _, port = text.rpartition(":")
    return pb.Endpoint(ip=ip, port=int(port))


def rewire(kind: pb.Rewire.Kind.ValueType, local: str, remote: str = "", *, ended: bool = False) -> pb.Rewire:
    """As the freeze of a rank that is suspended finds it: old and new are the same."""
    far = end(remote) if remote else None
    return pb.Rewire(
        kind=kind,
        family="inet",
        old_local=end(local),
        new_local=end(local),
        old_remote=far,
        new_remote=far,
        ended=ended,
    )


def pair(one: pb.Rewire) -> tuple[str, str]:
    return (
        f"{one.new_local.ip}:{one.new_local.port}",
        f"{one.new_remote.ip}:{one.new_remote.port}",
    )


def both(local: str, remote: str, sources: tuple[str, str], targets: tuple[str, str]) -> list[pb.Rewire]:
    """The two ends of one connection after the plan."""
    ranks = [
        Resumed("a", sources[0], targets[0], [rewire(pb.Rewire.PEER, local, remote)]),
        Resumed("b", sources[1], targets[1], [rewire(pb.Rewire.PEER, remote, local)]),
    ]
    planned = [plan(uid, ranks, NODES) for uid in ("a", "b")]
    assert [problems for _, problems in planned] == [[], []]
    return [rewires[0] for rewires, _ in planned]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("node-1", "node-2"), ("10.0.0.1:4000", "10.0.0.2:5000")),
        (("node-1", "node-3"), ("10.0.0.1:4000", "10.0.0.3:5000")),
        (("node-3", "node-4"), ("10.0.0.3:4000", "10.0.0.4:5000")),
        (("node-2", "node-1"), ("10.0.0.2:4000", "10.0.0.1:5000")),
        (("node-3", "node-3"), ("10.0.0.3:4000", "10.0.0.3:5000")),
    ],
)
def test_ends_of_two_nodes_are_mirrored(targets: tuple[str, str], expected: tuple[str, str]) -> None:
    one, other = both("10.0.0.1:4000", "10.0.0.2:5000", ("node-1", "node-2"), targets)
    assert pair(one) == expected
    assert pair(other) == expected[::-1]
    assert (one.peer_node, other.peer_node) == targets[::-1]


def test_loopback_stays_if_both_stay_together() -> None:
    one, other = both("127.0.0.1:4000", "127.0.0.1:5000", ("node-1", "node-1"), ("node-3", "node-3"))
    assert pair(one) == ("127.0.0.1:4000", "127.0.0.1:5000")
    assert pair(other) == ("127.0.0.1:5000", "127.0.0.1:4000")


@pytest.mark.parametrize("targets", [("node-1", "node-3"), ("node-3", "node-1")])
def test_loopback_becomes_real_addresses_if_they_part(targets: tuple[str, str]) -> None:
    one, other = both("127.0.0.1:4000", "127.0.0.1:5000", ("node-1", "node-1"), targets)
    numbers = [name.removeprefix("node-") for name in targets]
    assert pair(one) == (f"10.0.0.{numbers[0]}:4000", f"10.0.0.{numbers[1]}:5000")
    assert pair(other) == pair(one)[::-1]


def test_two_ranks_of_one_node_go_to_different_nodes() -> None:
    """The node of an address does not say where its rank goes: the rank does."""
    one, other = both("10.0.0.1:4000", "10.0.0.1:5000", ("node-1", "node-1"), ("node-3", "node-4"))
    assert pair(one) == ("10.0.0.3:4000", "10.0.0.4:5000")
    assert pair(other) == pair(one)[::-1]


def test_listeners_follow_and_wildcards_stay() -> None:
    sockets = [
        rewire(pb.Rewire.LISTENER, "10.0.0.1:29500"),
        rewire(pb.Rewire.LISTENER, "0.0.0.0:29501"),
        rewire(pb.Rewire.LISTENER, "127.0.0.1:29502"),
    ]
    rewires, problems = plan("a", [Resumed("a", "node-1", "node-3", sockets)], NODES)
    assert [one.new_local.ip for one in rewires] == ["10.0.0.3", "0.0.0.0", "127.0.0.1"]
    assert problems == []


def test_an_end_that_no_rank_has_is_a_problem_unless_it_was_closed() -> None:
    alone = [rewire(pb.Rewire.PEER, "10.0.0.1:4000", "10.0.0.2:5000")]
    assert plan("a", [Resumed("a", "node-1", "node-3", alone)], NODES)[1] == [
        "10.0.0.1:4000: no rank of the job has the other end, 10.0.0.2:5000"
    ]
    closed = [rewire(pb.Rewire.PEER, "10.0.0.1:4000", "10.0.0.2:5000", ended=True)]
    rewires, problems = plan("a", [Resumed("a", "node-1", "node-3", closed)], NODES)
    assert (pair(rewires[0]), problems) == (("10.0.0.3:4000", "10.0.0.2:5000"), [])


def test_a_node_without_such_a_network_is_a_problem() -> None:
    far = [*NODES, pb.NodeAddresses(name="far", addresses=[], interfaces=[])]
    sockets = [rewire(pb.Rewire.LISTENER, "10.0.0.1:29500")]
    rewires, problems = plan("a", [Resumed("a", "node-1", "far", sockets)], far)
    assert rewires == []
    assert "far has no address that can replace 10.0.0.1" in problems[0]


@pytest.mark.parametrize("address", ["127.0.0.1", "172.17.0.1"])
def test_connections_of_two_nodes_with_themselves_are_not_confused(address: str) -> None:
    """Both nodes have the same addresses and ports: that of the loopback interface, or of Docker's bridge."""
    nodes = [pb.NodeAddresses(name=one.name, addresses=[*one.addresses, "172.17.0.1/16"]) for one in NODES]
    one, other = f"{address}:4000", f"{address}:5000"
    ranks = [
        Resumed(uid, node, node, [rewire(pb.Rewire.PEER, *pair)])
        for uid, node, pair in (
            ("a", "node-1", (one, other)),
            ("b", "node-1", (other, one)),
            ("c", "node-2", (one, other)),
            ("d", "node-2", (other, one)),
        )
    ]
    for rank in ranks:
        rewires, problems = plan(rank.uid, ranks, nodes)
        assert problems == []
        assert pair(rewires[0]) == pair(rank.rewires[0]), "both ends stay together"
        assert rewires[0].peer_node == rank.source
