"""A job that is connected with processes other than its own ranks is not suspended."""

from __future__ import annotations

from migrator.jobs.connections import check
from snapshotd.api import snapshotd_pb2 as pb


def peer(local: tuple[str, int], remote: tuple[str, int], *, ended: bool = False) -> pb.Rewire:
    return pb.Rewire(
        kind=pb.Rewire.PEER,
        old_local=pb.Endpoint(ip=local[0], port=local[1]),
        old_remote=pb.Endpoint(ip=remote[0], port=remote[1]),
        peer_node="node-2",
        ended=ended,
    )


HERE, THERE = ("10.0.0.1", 4000), ("10.0.0.2", 5000)


def test_connections_between_ranks_pass() -> None:
    found = check({0: [peer(HERE, THERE)], 1: [peer(THERE, HERE)]})
    assert found.verdict == pb.Check.PASS


def test_connection_to_another_process_is_refused_by_name() -> None:
    found = check({0: [peer(HERE, THERE)], 1: []})
    assert (found.name, found.verdict) == ("suspend-peers", pb.Check.REFUSE)
    assert "rank 0: 10.0.0.1:4000 → 10.0.0.2:5000 on node-2" in found.reason
    assert found.remedy


def test_connection_that_the_peer_has_closed_passes() -> None:
    assert check({0: [peer(HERE, THERE, ended=True)]}).verdict == pb.Check.PASS


def test_hosts_without_a_daemon_are_not_its_matter() -> None:
    outside = peer(HERE, ("192.0.2.1", 443))
    outside.kind = pb.Rewire.OUTSIDE
    assert check({0: [outside]}).verdict == pb.Check.PASS
