"""A node that does not answer is waited for once, and then only briefly until it answers again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from migrator import fan_out
from migrator.find_rank import all_ranks
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, SnapshotError, Timeout, Unreachable


class Nodes:
    """`errors`: what a node's calls raise. `waits`: the time limits of all calls, by node."""

    def __init__(self, errors: dict[str, SnapshotError]) -> None:
        self.nodes = {"a": "10.0.0.1:1", "b": "10.0.0.2:1"}
        self.silent_s: dict[str, float] = {}
        self.errors = errors
        self.waits: dict[str, list[float]] = {}

    @asynccontextmanager
    async def client(self, node: str) -> AsyncIterator[Any]:
        async def call(request: Any, timeout_s: float) -> Any:
            self.waits.setdefault(node, []).append(timeout_s)
            if node in self.errors:
                raise self.errors[node]
            return pb.ListRanksReply()

        yield SimpleNamespace(node=SimpleNamespace(ListRanks=call))


def nodes(**errors: SnapshotError) -> Any:
    return Nodes(errors)


async def ask(client: Any) -> pb.ListRanksReply:
    reply: pb.ListRanksReply = await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=60.0)
    return reply


async def test_silent_node_is_waited_for_once() -> None:
    cluster = nodes(b=Timeout("b did not answer ListRanks in time"))
    silent: dict[str, SnapshotError] = {}
    for _ in range(3):
        answers, silent = await fan_out.ask_all(cluster, ask)
        assert (list(answers), list(silent)) == (["a"], ["b"])
    assert cluster.waits == {"a": [60.0] * 3, "b": [60.0, fan_out.SIGN_TIMEOUT_S, fan_out.SIGN_TIMEOUT_S]}
    assert isinstance(silent["b"], Unreachable), "whatever takes a silent node for lost may do so here too"
    cluster.errors.clear()
    assert list((await fan_out.ask_all(cluster, ask))[0]) == ["a", "b"], "it answers again, and is asked"
    await fan_out.ask_all(cluster, ask)
    assert cluster.waits["b"][-3:] == [fan_out.SIGN_TIMEOUT_S, 60.0, 60.0]


async def test_who_looks_whether_a_node_is_lost_is_patient() -> None:
    """Else a node that is only slow would be lost as soon as it has been slow once."""
    cluster = nodes(b=Unreachable("b could not be reached"))
    for _ in range(2):
        _, silent = await all_ranks(cluster)
        assert list(silent) == ["b"]
    assert cluster.waits["b"] == [fan_out.ASK_TIMEOUT_S] * 2
    await fan_out.ask_all(cluster, ask)
    assert cluster.waits["b"][-1] == fan_out.SIGN_TIMEOUT_S, "others know it from there"


async def test_node_that_refuses_is_not_silent() -> None:
    cluster = nodes(b=Denied("not for you"))
    for _ in range(2):
        await fan_out.ask_all(cluster, ask)
    assert cluster.waits["b"] == [60.0, 60.0]
