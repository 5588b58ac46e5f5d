"""Finds a name for a job that was named after its script: one that no other job of its user has in the cluster.

Invariant: a job never waits long for its name. Nodes that do not answer in time are not considered, and two jobs that start
at the same moment on two nodes can get the same name: then `migrator` asks for the rank's id, which is unique.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.moves.node import Node

log = logging.getLogger(__name__)

ASK_S = 2.0
#: Jobs that start within this time share the answers, so that a user who starts many does not have every node asked for each.
SHARED_S = 1.0
#: Characters of a job's name that stay if a number is added to it. A name has at most 60.
_STEM = 53

#: Of a rank: its user, its number, and the name of its job.
Name = tuple[int, int, str]


def free_name(wanted: str, user_id: int, rank: int, names: Iterable[Name]) -> str:
    """`wanted`, with a number if this user has such a rank of such a job already."""
    taken = {job for user, number, job in names if (user, number) == (user_id, rank)}
    numbered = (f"{wanted[:_STEM]}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in taken)


class OtherNodes:
    """The names of jobs on the other nodes of the configuration."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asked: tuple[float, asyncio.Task[list[Name]]] | None = None

    async def names(self) -> list[Name]:
        """The names that the other nodes report. Never raises; takes ASK_S at most."""
        if not self._node.config.nodes:
            return []
        if self._asked is None or time.monotonic() - self._asked[0] > SHARED_S:
            self._asked = (time.monotonic(), asyncio.create_task(self._ask_all(), name="names of jobs"))
        return await asyncio.shield(self._asked[1])

    async def _ask_all(self) -> list[Name]:
        config = self._node.config
        others = [(name, endpoint) for name, endpoint in (config.nodes or {}).items() if name != config.node]
        answers = await asyncio.gather(*(self._ask(name, endpoint) for name, endpoint in others))
        return [found for answer in answers for found in answer]

    async def _ask(self, name: str, endpoint: str) -> list[Name]:
        try:
            async with asyncio.timeout(ASK_S), self._node.client(name, endpoint) as client:
                reply = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_S)
        except (SnapshotError, TimeoutError) as error:
            log.info("node %s does not say which names of jobs are taken there: %s", name, error)
            return []
        return [(rank.user_id, rank.rank, rank.job) for rank in reply.ranks]
