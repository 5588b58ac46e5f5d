"""The peer's side of the last question of preflight: whether packets pass between this node and the rank's new addresses.

A connection whose packets do not pass after the move hangs, and with it the job. So each pair of addresses that connections
here will have is tried with the target (snapshotd/diagnosis/paths.py). A target that is too old for it is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import SnapshotError
from snapshotd.diagnosis import paths
from snapshotd.moves.node import Node

log = logging.getLogger(__name__)

CHECK = "connection-paths"
REMEDY = (
    "open the path in firewalls and routers between the nodes (any port, packets as large as the interface's MTU, also of"
    " connections whose beginning a firewall has not seen), or choose another network in cluster.toml"
)
ASK_S = 15.0
#: What the rank has beyond this is not tried: a node has few addresses.
MAX_PATHS = 16


async def blocked(node: Node, move: pb.MoveDescription, rewires: Iterable[pb.Rewire]) -> list[str]:
    """The paths of these connections that do not work, each with both addresses and what did not pass."""
    if node.config.node == move.target_node:
        return []
    pairs = sorted({(rewire.new_remote.ip, rewire.new_local.ip) for rewire in rewires})

    async def ask(request: pb.OpenProbeRequest) -> pb.OpenProbeReply:
        async with node.client(move.target_node, move.target_endpoint) as client:
            return await client.node.OpenProbe(request, timeout_s=ASK_S)

    async def attempt(here: str, there: str) -> str:
        try:
            problem = await paths.attempt(here, there, ask)
        except UnknownMethod as error:
            log.info("the path from %s to %s was not tried: %s", here, there, error.headline)
            return ""
        except SnapshotError as error:
            problem = error.headline
        return f"{here} → {there} ({move.target_node}): {problem}" if problem else ""

    found = await asyncio.gather(*(attempt(*pair) for pair in pairs[:MAX_PATHS]))
    return [problem for problem in found if problem]
