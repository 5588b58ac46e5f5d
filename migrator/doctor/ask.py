"""Asks every node for its diagnosis, all at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from migrator.cluster import Cluster
from migrator.fan_out import ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, UnknownMethod
from snapshotd.api.errors import SnapshotError


@dataclass(frozen=True)
class Answer:
    """What one node says about itself. Its clock is ahead of this machine's by `clock_s`, give or take `unsure_s`."""

    info: pb.NodeInfo
    diagnosis: pb.DiagnoseReply = field(default_factory=pb.DiagnoseReply)
    clock_s: float = 0.0
    unsure_s: float = 0.0


async def ask(
    cluster: Cluster, nodes: Sequence[str], paths: Sequence[str], limit_s: float
) -> tuple[dict[str, Answer], dict[str, SnapshotError]]:
    """The answers by node, and the errors of nodes that do not answer within `limit_s`."""
    peers = [
        pb.PeerNode(name=name, endpoint=cluster.nodes[name])
        for name in nodes
        if not cluster.nodes[name].startswith("unix:")
    ]

    async def one(client: DaemonClient) -> Answer:
        asked_s = time.time()
        info = await client.node.GetNode(pb.GetNodeRequest(), timeout_s=limit_s / 2)
        answered_s = time.time()
        others = [peer for peer in peers if peer.name != info.name]
        left_s = limit_s - max(0.0, answered_s - asked_s)
        request = pb.DiagnoseRequest(peers=others, paths=paths, limit_s=left_s)
        try:
            diagnosis = await client.node.Diagnose(request, timeout_s=left_s)
        except UnknownMethod:
            text, remedy = (
                f"its daemon ({info.version}) is too old for a diagnosis",
                "install the package of this migrator",
            )
            old = pb.Diagnosis(check="daemon", state="failed", text=text, remedy=remedy)
            diagnosis = pb.DiagnoseReply(findings=[old])
        # Both clocks are read in GetNode, whose answer takes milliseconds.
        return Answer(
            info,
            diagnosis,
            clock_s=info.now_unix_s - (asked_s + answered_s) / 2 if info.now_unix_s else 0.0,
            unsure_s=(answered_s - asked_s) / 2,
        )

    return await ask_all(cluster, one, nodes)
