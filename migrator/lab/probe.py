"""`python -m migrator.lab.probe CLUSTER TIMEOUT_S [NODE…]`: waits until daemons answer the operator, over TLS.

It is a separate process because it enters the lab's network namespace, which a caller with threads cannot do. Exit status 0
means that all nodes (or the named ones) answer. Otherwise one line of JSON lists those that do not, and why.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from migrator.cluster import Cluster
from snapshotd.api.errors import SnapshotError


async def _why_silent(cluster: Cluster, node: str, timeout_s: float) -> str:
    """Why the node's daemon does not answer; empty if it answers within the time."""
    from snapshotd.api.snapshotd_pb2 import GetNodeRequest

    try:
        async with cluster.client(node) as client:
            await client.node.GetNode(GetNodeRequest(), timeout_s=timeout_s, retry=True)
    except SnapshotError as error:
        return error.message
    return ""


async def _ask_all(cluster: Cluster, nodes: list[str], timeout_s: float) -> dict[str, str]:
    answers = await asyncio.gather(*(_why_silent(cluster, node, timeout_s) for node in nodes))
    return {node: why for node, why in zip(nodes, answers, strict=True) if why}


def main() -> int:
    path, timeout_s, *nodes = sys.argv[1:]
    cluster = Cluster.read(Path(path))
    cluster.enter()
    silent = asyncio.run(_ask_all(cluster, nodes or list(cluster.nodes), float(timeout_s)))
    sys.stdout.write(json.dumps(silent))
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
