"""Calls all nodes concurrently. A node that does not answer is part of the result and not a failure of the whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from migrator.cluster import Cluster
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError, Unreachable, Where

Answer = TypeVar("Answer")

ASK_TIMEOUT_S = 5.0


async def ask_all(
    cluster: Cluster,
    question: Callable[[DaemonClient], Awaitable[Answer]],
    nodes: Iterable[str] | None = None,
) -> tuple[dict[str, Answer], dict[str, SnapshotError]]:
    """The answers by node, and the errors of the nodes that did not answer, both in the cluster's order."""

    async def ask(node: str) -> Answer | SnapshotError:
        try:
            async with cluster.client(node) as client:
                return await question(client)
        except SnapshotError as error:
            return error

    asked = list(cluster.nodes if nodes is None else nodes)
    answers: dict[str, Answer] = {}
    silent: dict[str, SnapshotError] = {}
    for node, answer in zip(asked, await asyncio.gather(*map(ask, asked)), strict=True):
        if isinstance(answer, SnapshotError):
            silent[node] = answer
        else:
            answers[node] = answer
    return answers, silent


def none_answered(silent: dict[str, SnapshotError]) -> SnapshotError:
    """The error for a cluster in which no node answered: of the nodes' own class if they agree, else Unreachable."""
    kinds = Counter(type(error) for error in silent.values())
    kind, _ = kinds.most_common(1)[0]
    reasons = "\n".join(f"  {node}: {error.message}" for node, error in silent.items())
    remedy = next(error.advice for error in silent.values() if type(error) is kind)
    return (kind if len(kinds) == 1 else Unreachable)(
        f"no node answered:\n{reasons}", remedy=remedy, where=Where.UNTOUCHED
    )
