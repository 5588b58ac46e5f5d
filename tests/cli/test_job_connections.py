"""A job that is connected with processes other than its own ranks is not suspended, and every rank gets the ends of its own
connections."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.find_rank import Found
from migrator.job_results import JobOptions
from migrator.jobs.connections import Sockets, check, of_each
from migrator.jobs.suspend import Suspension
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import MAX_MESSAGE_BYTES
from snapshotd.api.errors import Refused


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


# ---------------------------------------------------------------- preflight

RANKS = [pb.Rank(uid=f"night-{number}", job="night", rank=number) for number in (0, 1)]


class Cluster:
    """Two nodes with a rank each. `sockets`: what each look at rank 1 finds; the last from then on. Rank 0 is connected."""

    def __init__(self, *sockets: list[pb.Rewire]) -> None:
        self.nodes = {"node-1": "10.0.0.1:7070", "node-2": "10.0.0.2:7070"}
        self.sockets = list(sockets)
        self.looks = 0

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        async def inspect(request: pb.InspectRequest, timeout_s: float) -> pb.InspectReply:
            (rank,) = [rank for rank in RANKS if rank.uid == request.rank_uid]
            warning = pb.Check(name="outside-world", verdict=pb.Check.WARN, reason="a host without a daemon")
            if rank.rank == 0:
                return pb.InspectReply(facts=pb.RankFacts(rank=rank), checks=[warning], rewires=[peer(HERE, THERE)])
            self.looks += 1
            found = self.sockets.pop(0) if len(self.sockets) > 1 else self.sockets[0]
            return pb.InspectReply(facts=pb.RankFacts(rank=rank), rewires=found, look=f"look {self.looks}")

        yield SimpleNamespace(source=SimpleNamespace(Inspect=inspect))


@pytest.fixture
def _asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def infos(cluster: Any) -> dict[str, pb.NodeInfo]:
        return {node: pb.NodeInfo(name=node) for node in cluster.nodes}

    async def addresses(cluster: Any, infos: Any) -> list[pb.NodeAddresses]:
        return []

    async def no_gates(gates: Any, description: Any, nodes: Any) -> list[pb.Check]:
        return []

    module = sys.modules["migrator.jobs.suspend"]
    monkeypatch.setattr(module, "node_infos", infos)
    monkeypatch.setattr(module, "node_addresses", addresses)
    monkeypatch.setattr(module.JobGates, "check", no_gates)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)


def suspension(cluster: Any) -> Suspension:
    found = [Found(f"node-{rank.rank + 1}", rank) for rank in RANKS]
    return Suspension(cluster, JobOptions("night"), found, "node-1", lambda event: None)


@pytest.mark.usefixtures("_asked")
async def test_connection_that_is_still_being_opened_does_not_refuse_the_job() -> None:
    cluster = Cluster([], [peer(THERE, HERE)])
    run = suspension(cluster)
    await run.inspect(1.0)
    assert cluster.looks == 2
    assert run.looks["night-1"] == "look 2", "the suspension begins with what the last look has found"
    assert run.warnings == ["rank 0 on node-1: outside-world: a host without a daemon"]
    await run.close()


@pytest.mark.usefixtures("_asked")
async def test_connection_that_leads_out_of_the_job_is_refused_after_a_second_look() -> None:
    cluster = Cluster([])
    run = suspension(cluster)
    with pytest.raises(Refused, match=r"the job: suspend-peers: .*rank 0: 10\.0\.0\.1:4000 → 10\.0\.0\.2:5000"):
        await run.inspect(1.0)
    assert cluster.looks == 2
    await run.close()


@pytest.mark.usefixtures("_asked")
async def test_job_that_is_connected_with_itself_is_looked_at_once() -> None:
    cluster = Cluster([peer(THERE, HERE)])
    run = suspension(cluster)
    await run.inspect(1.0)
    assert cluster.looks == 1
    await run.close()
