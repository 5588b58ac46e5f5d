"""Records where the time of a move goes, for `migrator move --trace`: steps of the driver, its calls, and spans of daemons.

The driver's clock is the reference. Daemons are asked for their spans when the move has ended, however it did. A node that
does not answer, or whose daemon is older and records none, has no row of its own; the driver's calls to it are there even so.

Invariant: a move goes the same way with and without a trace, and has the same result; without one nothing of this file runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from migrator.cluster import Cluster
from migrator.driver.run import Run
from migrator.driver.timing import Call, NodeSpans, Timed
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.calls import NO_METADATA, Channel, StreamCall
from snapshotd.api.client import DaemonClient, UnknownMethod

#: How long the nodes are asked for their spans after a move, all together.
COLLECT_S = 15.0


@dataclass
class Trace:
    """Of one `migrator move`, with all its attempts."""

    began_s: float = field(default_factory=time.monotonic)
    steps: list[Timed] = field(default_factory=list)
    pauses: list[Timed] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    nodes: list[NodeSpans] = field(default_factory=list)  # of every attempt
    missing: dict[str, str] = field(default_factory=dict)  # by node: why it has no row
    about: dict[str, Any] = field(default_factory=dict)  # for the reader: the result of the move
    _attempt: Timed | None = None  # that encloses the steps

    @contextlib.contextmanager
    def span(self, name: str, phase: str = "") -> Iterator[None]:
        """A step of the driver."""
        args: dict[str, Any] = {"phase": phase} if phase else {}
        self.steps.append(made := Timed(name, time.monotonic(), args=args, parent=self._attempt))
        try:
            yield
        except BaseException as error:
            made.args["failed"] = str(error)[:300] or type(error).__name__
            raise
        finally:
            made.ended_s = time.monotonic()

    @contextlib.contextmanager
    def attempt(self, move: str) -> Iterator[None]:
        """The steps inside are those of one attempt, which is a move of its own."""
        with self.span(f"move {move}"):
            self._attempt = self.steps[-1]
            try:
                yield
            finally:
                self._attempt = None

    def watch(self, node: str, client: DaemonClient) -> DaemonClient:
        """The same client, whose calls are recorded."""
        return DaemonClient(client.endpoint, node=client.name, channel=_Watched(client.channel, node, self.calls))

    async def collect(self, cluster: Cluster, run: Run) -> None:
        """Asks every node that took part in this attempt for its spans. Never fails, and ends after COLLECT_S: nodes without
        an answer until then have no row."""
        if run.pause_span is not None:
            self.pauses.append(Timed("pause", *run.pause_span, args={"move": run.move}))
        roles = _roles(run)
        try:
            async with asyncio.timeout(COLLECT_S):
                await self._ask(cluster, run, roles)
        except Exception as error:  # noqa: BLE001 - whatever it is, the move has ended and its result counts
            late = isinstance(error, TimeoutError)
            why = f"not all nodes answered within {COLLECT_S:.0f} s" if late else f"{type(error).__name__}: {error}"
            self.missing.update(dict.fromkeys(roles, f"the spans were not collected: {why}"))

    async def _ask(self, cluster: Cluster, run: Run, roles: dict[str, list[str]]) -> None:
        async def ask(client: DaemonClient) -> tuple[float, float, pb.GetSpansReply]:
            asked_s = time.monotonic()
            reply = await client.node.GetSpans(pb.GetSpansRequest(move=run.move), timeout_s=ASK_TIMEOUT_S)
            return asked_s, time.monotonic(), reply

        answers, silent = await ask_all(cluster, ask, roles)
        for node, error in silent.items():
            older = isinstance(error, UnknownMethod)
            self.missing[node] = "its version of snapshotd records no spans" if older else error.headline
        for node, (asked_s, answered_s, reply) in answers.items():
            mine = [call for call in self.calls if call.node == node]
            self.nodes.append(NodeSpans(node, roles[node], asked_s, answered_s, reply, mine))


def _roles(run: Run) -> dict[str, list[str]]:
    """The nodes that take part, source and target first, each with what it does."""
    roles: dict[str, list[str]] = {run.found.node: ["source"]}
    roles.setdefault(run.options.to, []).append("target")
    for node in sorted({*run.peers.rewires, *run.peers.touched}):
        roles.setdefault(node, []).append("peer")
    for node in run.gates.nodes if run.gates.involved else ():
        roles.setdefault(node, []).append("job")
    return roles


class _Watched:
    """A channel that records when each call began and ended."""

    def __init__(self, channel: Channel, node: str, calls: list[Call]) -> None:
        self._channel, self._node, self._calls = channel, node, calls

    async def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        self._calls.append(made := Call(self._node, _short(method), time.monotonic()))
        try:
            reply = await self._channel.unary(method, request, timeout_s)
        except BaseException:
            made.end(failed=True)
            raise
        made.end()
        return reply

    def stream(
        self, method: str, timeout_s: float | None = None, metadata: Mapping[str, str] = NO_METADATA
    ) -> StreamCall:
        self._calls.append(made := Call(self._node, _short(method), time.monotonic()))
        return _WatchedStream(self._channel.stream(method, timeout_s, metadata), made)

    async def close(self) -> None:
        await self._channel.close()


class _WatchedStream:
    def __init__(self, call: StreamCall, made: Call) -> None:
        self._call, self._made = call, made

    async def write(self, message: bytes | memoryview) -> None:
        await self._call.write(message)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def read(self) -> bytes | None:
        try:
            reply = await self._call.read()
        except BaseException as error:
            self._made.end(failed=not isinstance(error, asyncio.CancelledError))
            raise
        if reply is None:
            self._made.end()
        return reply

    def cancel(self) -> None:
        self._call.cancel()
        self._made.end(failed=True)  # unless it has ended


def _short(method: str) -> str:
    """ "Source.Freeze", as daemons name it."""
    return method.rpartition(".")[2].replace("/", ".")
