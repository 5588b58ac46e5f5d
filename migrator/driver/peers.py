"""The peers of a move, as its driver sees them: every node that has the other end of one of the rank's connections."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError

ASK_TIMEOUT_S = 5.0


async def node_addresses(cluster: Cluster) -> list[pb.NodeAddresses]:
    """The addresses of every node. One that does not answer has at least its endpoint's: its ends are then refused by
    name, instead of being taken for the outside world."""

    async def ask(node: str) -> pb.NodeAddresses:
        endpoint = cluster.nodes[node]
        try:
            async with cluster.client(node) as client:
                info = await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)
            return pb.NodeAddresses(name=node, endpoint=endpoint, addresses=info.addresses)
        except SnapshotError:
            return pb.NodeAddresses(name=node, endpoint=endpoint, addresses=await _resolved(endpoint))

    return list(await asyncio.gather(*(ask(node) for node in cluster.nodes)))


async def _resolved(endpoint: str) -> list[str]:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({f"{row[4][0]}/{128 if row[0] == socket.AF_INET6 else 32}" for row in rows})


class Peers:
    """The nodes that have to re-point something, all asked at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rewires: dict[str, list[pb.Rewire]] = {}
        self.touched: set[str] = set()
        self.stopped_s = 0.0

    def set_connections(self, rewires: Iterable[pb.Rewire]) -> None:
        """The connections of the frozen rank."""
        by_node: dict[str, list[pb.Rewire]] = defaultdict(list)
        for rewire in rewires:
            if rewire.kind == pb.Rewire.PEER:
                by_node[rewire.peer_node].append(rewire)
        self.rewires = dict(by_node)

    async def check(self, rewires: Iterable[pb.Rewire], timeout_s: float) -> list[pb.Check]:
        """Preflight on every peer; one that does not answer is a refusal by name."""
        self.set_connections(rewires)

        async def ask(node: str) -> list[pb.Check]:
            try:
                async with self.cluster.client(node) as client:
                    reply = await client.peer.InspectConnections(
                        pb.InspectConnectionsRequest(rewires=self.rewires[node]), timeout_s=timeout_s
                    )
                return list(reply.checks)
            except SnapshotError as error:
                return [
                    pb.Check(
                        name="connection-ends",
                        verdict=pb.Check.REFUSE,
                        reason=f"{len(self.rewires[node])} connections end on {node}: {error.message}",
                        remedy=error.advice,
                    )
                ]

        answers = await asyncio.gather(*(ask(node) for node in self.rewires))
        return [check for checks in answers for check in checks]

    async def suspend_timeouts(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Every peer keeps its ends from timing out; connections as preflight saw them. Raises the first failure: undo."""

        async def ask(client: DaemonClient, mine: pb.RepointRequest) -> None:
            await client.peer.SuspendTimeouts(mine, timeout_s=timeout_s)

        await self._ask_all(description, ask)

    async def repoint(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Every peer points its ends at the target. Raises the first failure; the others may have done it: undo."""

        async def ask(client: DaemonClient, mine: pb.RepointRequest) -> None:
            reply = await client.peer.Repoint(mine, timeout_s=timeout_s)
            self.stopped_s = max(self.stopped_s, reply.stopped_s)

        await self._ask_all(description, ask)

    async def _ask_all(
        self, description: pb.MoveDescription, ask: Callable[[DaemonClient, pb.RepointRequest], Awaitable[None]]
    ) -> None:
        async def ask_one(node: str) -> None:
            mine = pb.RepointRequest(description=description, rewires=self.rewires[node])
            self.touched.add(node)
            async with self.cluster.client(node) as client:
                await ask(client, mine)

        answers = await asyncio.gather(*(ask_one(node) for node in self.rewires), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def settle(self, move: str, token: bytes, timeout_s: float) -> None:
        """Tells every peer the outcome. One that does not hear it asks the source by itself, and delays nobody else."""

        async def ask(node: str) -> None:
            async with self.cluster.client(node) as client:
                await client.peer.Settle(
                    pb.TokenRequest(move=move, token=token), timeout_s=min(timeout_s, 10), retry=True
                )

        await asyncio.gather(*(ask(node) for node in self.touched), return_exceptions=True)
