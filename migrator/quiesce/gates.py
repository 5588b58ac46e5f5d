"""The gates of an NCCL job, as the driver of a move uses them: closed at one consistent cut, opened when the move has ended.

Invariant: the driver only finds the cut. Each node journals its gates before it closes them, so after the driver's death the
daemons open them without it, once they know the outcome. If the moving rank is in no communicator, no gate is closed and
nothing is journalled.

If the cut is not reached in time, because a rank is in user code or waits for another rank outside NCCL, the move is given
up with the cut's reason, and the job continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from migrator.cluster import Cluster
from migrator.find_rank import all_ranks
from migrator.quiesce.cut import Cut, Decision
from migrator.quiesce.process_reports import Membership, Numbers, ProcessReport
from migrator.quiesce.view import View
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, Unary
from snapshotd.api.errors import SnapshotError, Timeout, Undone, Unreachable, Where

#: Delay between two rounds; short at first, because most cuts are a few milliseconds away.
ROUND_S, ROUND_MAX_S = 0.002, 0.05
#: How long a node is asked until it has answered, and when a call whose answer does not come is made again.
ASK_S, TRY_S, TRY_AGAIN_S = 15.0, 4.0, 0.02
#: How often nodes are asked where no process can have gone on: for processes that ended, or have their first communicator.
ALL_S = 1.0
#: A node whose answer was lost is asked again at once: without its ranks the job has no cut. One that is down adds little.
LIST_AGAIN_S, LIST_S = (0.02, 0.1, 0.3), 1.0
#: Preflight: how often, and how far apart, a member is looked for before the move is refused for want of it.
LOOKS, LOOK_S = 5, 0.2


class Gates:
    """Every gate of one job. All nodes are asked concurrently."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.involved = False  # whether NCCL in the moving rank has something to take down
        self.nodes: tuple[str, ...] = ()  # that have ranks of the job
        self.closed: set[str] = set()  # nodes whose gates are closed, or may be
        self.rounds = 0
        self.guessed: frozenset[int] = frozenset()

    # ------------------------------------------------------------------ preflight

    async def check(self, description: pb.MoveDescription) -> list[pb.Check]:
        """Preflight: every member of the rank's communicators can be asked, and no gate refuses one of them."""
        if not await self.find(description):
            return []
        silent: list[str] = []
        try:
            async with self.clients(self.cluster.nodes) as all_clients:
                clients, silent = await self._of_the_job(all_clients, description)
                reports = await ask_all(clients, reporting(description))
                missing = _unknown(description.rank_uid, reports)
                for _ in range(LOOKS - 1):
                    if not missing:
                        break
                    # Nodes do not report at the same moment. A communicator that one member has just created or destroyed
                    # is missing another one once; only a member that no daemon knows is missing every time.
                    await asyncio.sleep(LOOK_S)
                    reports = await ask_all(clients, reporting(description))
                    again = _unknown(description.rank_uid, reports)
                    missing = {comm: again[comm] for comm in missing if comm in again}
        except SnapshotError as error:
            return [
                pb.Check(
                    name="nccl-members",
                    verdict=pb.Check.REFUSE,
                    reason=f"a node that has ranks of the job does not report their communicators: {error.message}",
                    remedy=error.advice,
                )
            ]
        comms = sorted({comm.id for report in _of(description.rank_uid, reports) for comm in report.gate.communicators})
        checks = [
            pb.Check(
                name="nccl",
                verdict=pb.Check.REFUSE,
                reason=f"rank {report.rank}, process {report.process.pid}: communicator {comm.id}: {refusal}",
                remedy="shim/README.md lists what cannot be taken down; disable it, or move the rank when it is over",
            )
            for report in reports
            for comm in report.gate.communicators
            for refusal in comm.refusals
            if report.process.rank_uid != description.rank_uid and comm.id in comms
        ]
        if missing:
            checks.append(missing_members(missing, silent))
        return checks

    async def find(self, description: pb.MoveDescription) -> bool:
        """Whether NCCL in the rank that is to move has something to take down now: a communicator, or RDMA devices that it
        keeps without one. Asks only its own node."""
        async with self.clients([description.source_node]) as clients:
            reports = _of(description.rank_uid, await ask_all(clients, reporting(description)))
        self.involved = any(report.gate.communicators or report.gate.rdma for report in reports)
        return self.involved

    async def _of_the_job(
        self, clients: Mapping[str, DaemonClient], description: pb.MoveDescription
    ) -> tuple[dict[str, DaemonClient], list[str]]:
        """The nodes that have ranks of the job, and the nodes that do not answer."""
        began = time.monotonic()
        found, silent = await all_ranks(self.cluster, clients=clients)
        for pause_s in LIST_AGAIN_S:
            lost = [node for node, error in silent.items() if isinstance(error, Unreachable)]
            if not lost or time.monotonic() > began + LIST_S:
                break
            await asyncio.sleep(pause_s)
            more, still = await all_ranks(self.cluster, clients={node: clients[node] for node in lost})
            found += more
            silent = {node: error for node, error in silent.items() if node not in lost} | still
        here = {
            entry.node
            for entry in found
            if (entry.rank.user_id, entry.rank.job) == (description.user_id, description.job)
            and entry.rank.place == pb.Rank.HERE
        }
        self.nodes = tuple(sorted(here | {description.source_node}))
        return {node: clients[node] for node in self.nodes}, sorted(silent)

    @contextlib.asynccontextmanager
    async def clients(self, nodes: Iterable[str]) -> AsyncIterator[dict[str, DaemonClient]]:
        async with contextlib.AsyncExitStack() as stack:
            yield {node: await stack.enter_async_context(self.cluster.client(node)) for node in nodes}

    # ------------------------------------------------------------------ the cut

    async def quiesce(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Closes every gate and lets each process run as far as the cut requires. On failure gates stay closed: undo."""
        deadline = time.monotonic() + timeout_s
        async with self.clients(self.cluster.nodes) as all_clients:
            clients, silent = await self._of_the_job(all_clients, description)
            await self._find_cut(clients, description, silent, deadline, timeout_s)

    async def _find_cut(
        self,
        clients: Mapping[str, DaemonClient],
        description: pb.MoveDescription,
        silent: Collection[str],
        deadline: float,
        timeout_s: float,
    ) -> None:
        async def close(client: DaemonClient, node: str) -> pb.GateReport:
            self.closed.add(node)
            return await _until_answered(client.gate.Close, description, deadline)

        ask: _Ask = close
        view, pause_s = View(description), ROUND_S
        asked, all_asked_at = clients, time.monotonic()
        while True:
            reports = await ask_all(asked, ask)
            self.rounds += 1
            # In a thread, so that the lease is renewed meanwhile: with thousands of ranks this takes a while.
            cut, changed = await asyncio.to_thread(view.next, reports, asked.keys())
            self.guessed = frozenset(cut.guesses)
            if cut.decision is Decision.REACHED and not changed:
                return
            if cut.decision is Decision.NEVER or time.monotonic() >= deadline:
                raise _given_up(cut, view.numbers, silent, timeout_s)
            if not changed:
                # Close again, for nodes where no process had a communicator before.
                ask = close
                await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, ROUND_MAX_S)
            else:
                ask, pause_s = _setting_targets(description, changed, close, deadline), ROUND_S
            moving = view.to_ask()
            if moving is None or time.monotonic() > all_asked_at + ALL_S:
                asked, all_asked_at = clients, time.monotonic()
            else:
                asked = {node: client for node, client in clients.items() if node in moving or node in changed}

    # ------------------------------------------------------------------ the end

    async def open(self, move: str, token: bytes, timeout_s: float) -> list[str]:
        """Hands every node the outcome. Returns why gates are not open yet, one text per node; those ask the source."""

        async def ask(node: str) -> str:
            try:
                async with self.cluster.client(node) as client:
                    reply = await client.gate.Open(
                        pb.TokenRequest(move=move, token=token), timeout_s=min(timeout_s, ASK_S), retry=True
                    )
            except SnapshotError as error:
                return f"{node}: {error.headline}"
            return "" if reply.opened else f"{node}: {reply.waiting_for}"

        return [late for late in await asyncio.gather(*(ask(node) for node in sorted(self.closed))) if late]


_Ask = Callable[[DaemonClient, str], Awaitable[pb.GateReport]]
_Request = TypeVar("_Request", pb.MoveDescription, pb.SetTargetsRequest)


async def ask_all(clients: Mapping[str, DaemonClient], ask: _Ask) -> list[ProcessReport]:
    """The reports of all processes. Raises the first failure, after all nodes have answered or failed."""
    answers = await asyncio.gather(*(ask(client, node) for node, client in clients.items()), return_exceptions=True)
    reports = []
    for node, answer in zip(clients, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        reports += [ProcessReport.of(node, gate) for gate in answer.processes]
    return reports


def reporting(description: pb.MoveDescription) -> _Ask:
    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        request = pb.GateReportRequest(move=description.move, job=description.job, user_id=description.user_id)
        return await client.gate.Report(request, timeout_s=ASK_S, retry=True)

    return ask


def _setting_targets(
    description: pb.MoveDescription, changed: Mapping[str, list[pb.ProcessTargets]], close: _Ask, deadline: float
) -> _Ask:
    """Hands out the targets that have changed. A node where none has only reports."""

    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        if node not in changed:
            return await close(client, node)
        request = pb.SetTargetsRequest(move=description.move, processes=changed[node])
        return await _until_answered(client.gate.SetTargets, request, deadline)

    return ask


async def _until_answered(call: Unary[_Request, pb.GateReport], request: _Request, deadline: float) -> pb.GateReport:
    """Makes an idempotent call again if it fails or its answer is lost, for at most ASK_S. Once the deadline has passed the
    time-out is short, and the loop notices the deadline."""
    ends, pause_s = time.monotonic() + max(2.0, min(ASK_S, deadline - time.monotonic())), TRY_AGAIN_S
    while True:
        try:
            return await call(request, timeout_s=max(0.05, min(TRY_S, ends - time.monotonic())))
        except (Unreachable, Timeout):
            if time.monotonic() + pause_s >= ends:
                raise
        await asyncio.sleep(pause_s)
        pause_s *= 2


def _of(rank_uid: str, reports: Iterable[ProcessReport]) -> list[ProcessReport]:
    return [report for report in reports if report.process.rank_uid == rank_uid]


def _unknown(rank_uid: str, reports: Collection[ProcessReport]) -> dict[str, int]:
    """The communicators of a rank that have members which no process has reported to be, and how many."""
    numbers = Numbers()
    numbers.add(reports)
    membership = Membership.gather(reports, numbers)
    comms = {comm.id for report in _of(rank_uid, reports) for comm in report.gate.communicators}
    return {comm: count for comm in comms if (count := membership.unknown(comm))}


def missing_members(unknown: Mapping[str, int], silent: Collection[str]) -> pb.Check:
    count, comms = sum(unknown.values()), len(unknown)
    unreachable = f"; no answer from {', '.join(silent)}" if silent else ""
    return pb.Check(
        name="nccl-members",
        verdict=pb.Check.REFUSE,
        reason=f"{count} members of {comms} of its NCCL communicators are not ranks that a daemon knows{unreachable}",
        remedy="start every rank of the job with `migrator run`, under the same --job, on nodes of this cluster; "
        "bring back nodes that do not answer; if the job is still starting, wait until it has started",
    )


def _given_up(cut: Cut, numbers: Numbers, silent: Collection[str], timeout_s: float) -> SnapshotError:
    reason = numbers.describe(cut.reason)
    unreachable = f"; no answer from {', '.join(silent)}" if silent else ""
    if cut.decision is Decision.NEVER:
        return Undone(
            f"the ranks of the job cannot reach a common point: {reason}{unreachable}",
            remedy="find out why that rank has ended",
        )
    return Timeout(
        f"the ranks of the job did not reach a common point within {timeout_s:.0f} s: {reason}{unreachable}",
        remedy="try again: another attempt starts at another point of the program; or allow more with --quiesce-timeout",
        where=Where.SOURCE_RUNNING,
    )
