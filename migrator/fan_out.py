"""Calls all nodes concurrently. A node that does not answer is part of the result and not a failure of the whole.

A node that has not answered a moment ago is waited for only briefly, so that a job whose node is lost does not wait for that
node once more with every question that its rollback asks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError, Timeout, Unreachable, Where

Answer = TypeVar("Answer")

ASK_TIMEOUT_S = 5.0
#: For a node that has not answered in the last SILENT_FOR_S: it is asked for a sign of life first.
SIGN_TIMEOUT_S = 1.5
SILENT_FOR_S = 60.0


async def ask_all(
    cluster: Cluster,
    question: Callable[[DaemonClient], Awaitable[Answer]],
    nodes: Iterable[str] | None = None,
) -> tuple[dict[str, Answer], dict[str, SnapshotError]]:
    """The answers by node, and the errors of the nodes that did not answer, both in the cluster's order."""

    async def ask(node: str) -> Answer | SnapshotError:
        try:
            async with cluster.client(node) as client:
                if time.monotonic() - cluster.silent_s.get(node, -SILENT_FOR_S) < SILENT_FOR_S:
                    await _sign_of_life(client, node)
                answer = await question(client)
        except SnapshotError as error:
            note(cluster, node, error)
            return error
        note(cluster, node, None)
        return answer

    asked = list(cluster.nodes if nodes is None else nodes)
    answers: dict[str, Answer] = {}
    silent: dict[str, SnapshotError] = {}
    for node, answer in zip(asked, await asyncio.gather(*map(ask, asked)), strict=True):
        if isinstance(answer, SnapshotError):
            silent[node] = answer
        else:
            answers[node] = answer
    return answers, silent


async def _sign_of_life(client: DaemonClient, node: str) -> None:
    try:  # a call that does not wait for GPUs: the driver of a sick one may hang
        await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=SIGN_TIMEOUT_S)
    except Timeout as error:
        raise Unreachable(error.message) from error


def note(cluster: Cluster, node: str, error: SnapshotError | None) -> None:
    """Notes whether a node has answered."""
    if isinstance(error, Unreachable | Timeout):
        cluster.silent_s[node] = time.monotonic()
    else:
        cluster.silent_s.pop(node, None)


def none_answered(silent: dict[str, SnapshotError]) -> SnapshotError:
    """The error for a cluster in which no node answered: of the nodes' own class if they agree, else Unreachable."""
    kinds = Counter(type(error) for error in silent.values())
    kind, _ = kinds.most_common(1)[0]
    reasons = "\n".join(f"  {node}: {error.message}" for node, error in silent.items())
    remedy = next(error.advice for error in silent.values() if type(error) is kind)
    return (kind if len(kinds) == 1 else Unreachable)(
        f"no node answered:\n{reasons}", remedy=remedy, where=Where.UNTOUCHED
    )
