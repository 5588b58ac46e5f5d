"""Has copies of snapshots sent without their limit, because something waits for their ranks.

A rank of which a snapshot is being copied neither moves nor is suspended until the copy is complete. With `copy_limit` that
may take minutes, so a driver that finds such a rank asks its node to send the copy as fast as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError

if TYPE_CHECKING:
    from migrator.cluster import Cluster

ASK_S = 5.0


async def hurry(cluster: Cluster, moves: Sequence[tuple[str, str]]) -> bool:
    """`moves`: nodes, and the moves in which their ranks are. Whether one of these is a snapshot that is being copied. Never
    fails: the driver refuses anyway."""

    async def ask(node: str, move: str) -> bool:
        with contextlib.suppress(SnapshotError):
            async with cluster.client(node) as client:
                return (await client.source.Hurry(pb.MoveRequest(move=move), timeout_s=ASK_S)).copying
        return False

    return any(await asyncio.gather(*(ask(*one) for one in moves)))
