"""A job that is connected with processes other than its own ranks is not suspended, and every rank gets the ends of its own
connections."""

from __future__ import annotations

from migrator.jobs.connections import Sockets, check, of_each
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import MAX_MESSAGE_BYTES


def peer(local: tuple[str, int], remote: tuple[str, int], *, ended: bool = False) -> pb.Rewire:
    return pb.Rewire(
        kind=pb.Rewire.PEER,
        old_local=pb.Endpoint(ip=local[0], port=local[1]),
        old_remote=pb.Endpoint(ip=remote[0], port=remote[1]),
        peer_node="node-2",
        ended=ended,
    )


HERE, THERE = ("10.0.0.1", 4000), ("10.0.0.2", 5000)
LOCAL, OTHER = ("127.0.0.1", 4000), ("127.0.0.1", 5000)


def on(node: str, *rewires: pb.Rewire) -> Sockets:
    return Sockets(node, rewires)


def test_connections_between_ranks_pass() -> None:
    found = check({0: on("node-1", peer(HERE, THERE)), 1: on("node-2", peer(THERE, HERE))})
    assert found.verdict == pb.Check.PASS


def test_connection_to_another_process_is_refused_by_name() -> None:
    found = check({0: on("node-1", peer(HERE, THERE)), 1: on("node-2")})
    assert (found.name, found.verdict) == ("suspend-peers", pb.Check.REFUSE)
    assert "rank 0: 10.0.0.1:4000 → 10.0.0.2:5000 on node-2" in found.reason
    assert found.remedy


def test_connection_that_the_peer_has_closed_passes() -> None:
    assert check({0: on("node-1", peer(HERE, THERE, ended=True))}).verdict == pb.Check.PASS


def test_hosts_without_a_daemon_are_not_its_matter() -> None:
    outside = peer(HERE, ("192.0.2.1", 443))
    outside.kind = pb.Rewire.OUTSIDE
    assert check({0: on("node-1", outside)}).verdict == pb.Check.PASS


def test_loopback_connections_of_different_nodes_are_not_one_connection() -> None:
    here = on("node-1", peer(LOCAL, OTHER))
    assert check({0: here, 1: on("node-1", peer(OTHER, LOCAL))}).verdict == pb.Check.PASS
    assert check({0: here, 1: on("node-2", peer(OTHER, LOCAL))}).verdict == pb.Check.REFUSE


def test_an_address_that_several_nodes_have_is_not_one_connection() -> None:
    bridge, port = ("172.17.0.1", 4000), ("172.17.0.1", 5000)
    assert check({0: on("node-1", peer(bridge, port)), 1: on("node-2", peer(port, bridge))}).verdict == pb.Check.REFUSE


def test_a_rank_gets_the_ends_of_its_own_connections_only() -> None:
    third = ("10.0.0.3", 6000)
    ranks = {
        "a": on("node-1", peer(HERE, THERE), peer(LOCAL, OTHER)),
        "b": on("node-2", peer(THERE, HERE), peer(THERE, third), peer(OTHER, LOCAL)),
        "c": on("node-3", peer(third, THERE)),
    }
    seen = of_each(ranks)
    assert seen["a"] == {"a": list(ranks["a"].rewires), "b": [peer(THERE, HERE)]}, (
        "the loopback of node-2 is another one"
    )
    assert seen["c"] == {"c": [peer(third, THERE)], "b": [peer(THERE, third)]}
    assert set(seen["b"]) == {"a", "b", "c"}


def test_what_a_rank_of_a_large_job_gets_fits_into_a_message() -> None:
    """Every rank is connected with every other one. What one rank gets must not grow with the square of their number."""

    def at(rank: int) -> str:
        return f"10.0.{rank // 250}.{rank % 250 + 1}"

    def mesh(count: int) -> int:
        ranks = {
            f"train-{one}": on(
                f"node-{one}",
                *(peer((at(one), 10000 + other), (at(other), 10000 + one)) for other in range(count) if other != one),
            )
            for one in range(count)
        }
        seen = of_each(ranks)
        assert all(len(of_one) == count for of_one in seen.values())
        return max(sum(one.ByteSize() for ends in of_one.values() for one in ends) for of_one in seen.values())

    small, large = mesh(16), mesh(64)
    assert large < 5 * small
    assert large * 4096 / 64 < MAX_MESSAGE_BYTES / 4, "with room for a job of 4,096 ranks with several groups"
