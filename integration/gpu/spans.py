"""Prints where the time of a rank's part in a snapshot or move went on one node: what its daemon recorded of it.

A process of its own asks, because one enters the network of a lab for good:
`python -m integration.gpu.spans CLUSTER NODE MOVE`.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from integration.harness import Cluster
from migrator.cluster import Cluster as Known
from snapshotd.api import snapshotd_pb2 as pb

_FROZEN = re.compile(r"(m-[0-9a-f]{12}) rank \d+ freeze: froze rank")
#: What took less is left out.
LEAST_S = 0.004


def of_last_freeze(nodes: Cluster, node: str) -> str:
    """Of the last move or snapshot that froze a rank on this node."""
    move = _FROZEN.findall(nodes.lab.daemon_log(node).read_text(errors="replace"))[-1]
    command = [sys.executable, "-m", "integration.gpu.spans", str(nodes.lab.cluster_path), node, move]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def table(spans: list[pb.Span]) -> str:
    """When each began after the freeze did, and how long it took; indented below what encloses it."""
    depths: list[int] = []
    lines = ["  began |   took s |       bytes |"]
    first_s = next((one.began_s for one in spans if one.name.endswith("Freeze")), spans[0].began_s if spans else 0.0)
    for one in spans:
        depths.append(depths[one.parent - 1] + 1 if one.parent else 0)
        if one.seconds >= LEAST_S:
            name = f"{'  ' * depths[-1]}{one.name}{' (failed)' if one.failed else ''}"
            lines.append(f"{one.began_s - first_s:7.3f} | {one.seconds:8.3f} | {one.bytes or '':>11} | {name}")
    return "\n".join(lines)


async def main(cluster_path: str, node: str, move: str) -> None:
    cluster = Known.read(Path(cluster_path))
    cluster.enter()
    async with cluster.client(node) as client:
        reply = await client.node.GetSpans(pb.GetSpansRequest(move=move), timeout_s=30)
    print(f"{move} on {node}\n{table(list(reply.spans))}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
