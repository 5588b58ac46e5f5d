"""Calls the peers of a move: every node that has the peer socket of one of the rank's connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError


async def node_infos(cluster: Cluster) -> dict[str, pb.NodeInfo]:
    """The description of every node that answers."""

    async def ask(client: DaemonClient) -> pb.NodeInfo:
        return await client.node.GetNode(pb.GetNodeRequest(), timeout_s=ASK_TIMEOUT_S)

    return (await ask_all(cluster, ask))[0]


async def node_addresses(cluster: Cluster, infos: Mapping[str, pb.NodeInfo]) -> list[pb.NodeAddresses]:
    """The addresses of every node. For a node that does not answer, these are the addresses of its endpoint: preflight then
    refuses its connections by the node's name instead of treating them as connections out of the cluster."""

    async def found(node: str, endpoint: str) -> pb.NodeAddresses:
        return pb.NodeAddresses(
            name=node,
            endpoint=endpoint,
            addresses=infos[node].addresses if node in infos else await _resolved(endpoint),
            interfaces=infos[node].interfaces if node in infos else (),
            networks=cluster.networks.get(node, {}),
        )

    return list(await asyncio.gather(*(found(node, endpoint) for node, endpoint in cluster.nodes.items())))


async def _resolved(endpoint: str) -> list[str]:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({f"{row[4][0]}/{128 if row[0] == socket.AF_INET6 else 32}" for row in rows})


class Peers:
    """The nodes that have to re-point connections. All are called concurrently."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rewires: dict[str, list[pb.Rewire]] = {}
        self.touched: set[str] = set()
        self.stopped_s = 0.0

    def set_connections(self, rewires: Iterable[pb.Rewire]) -> None:
        """Sets the connections of the rank, by peer."""
        by_node: dict[str, list[pb.Rewire]] = defaultdict(list)
        for rewire in rewires:
            if rewire.kind == pb.Rewire.PEER:
                by_node[rewire.peer_node].append(rewire)
        self.rewires = dict(by_node)

    async def check(
        self, description: pb.MoveDescription, rewires: Iterable[pb.Rewire], timeout_s: float
    ) -> list[pb.Check]:
        """Preflight on every peer. A peer that does not answer is a refusal that names it."""
        self.set_connections(rewires)

        async def ask(node: str) -> list[pb.Check]:
            try:
                async with self.cluster.client(node) as client:
                    mine = pb.InspectConnectionsRequest(description=description, rewires=self.rewires[node])
                    reply = await client.peer.InspectConnections(mine, timeout_s=timeout_s)
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
        """Every peer suspends the time-outs of its sockets, as preflight found them. Raises the first failure: undo."""

        async def ask(client: DaemonClient, mine: pb.RepointRequest) -> None:
            await client.peer.SuspendTimeouts(mine, timeout_s=timeout_s)

        await self._ask_all(description, ask)

    async def hold(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Every peer filters its sockets, as the freeze found them. Raises the first failure: undo."""

        async def ask(client: DaemonClient, mine: pb.RepointRequest) -> None:
            with contextlib.suppress(UnknownMethod):  # an older daemon filters in Repoint
                await client.peer.Hold(mine, timeout_s=timeout_s)

        await self._ask_all(description, ask)

    async def repoint(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Every peer re-points its sockets to the target. Raises the first failure; other peers may have succeeded: undo."""

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
        """Sends the outcome to every peer. A peer that cannot be reached asks the source later; it delays no other peer."""

        async def ask(node: str) -> None:
            async with self.cluster.client(node) as client:
                await client.peer.Settle(
                    pb.TokenRequest(move=move, token=token), timeout_s=min(timeout_s, 10), retry=True
                )

        await asyncio.gather(*(ask(node) for node in self.touched), return_exceptions=True)
