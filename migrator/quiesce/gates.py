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
from dataclasses import dataclass, replace

from migrator.cluster import Cluster
from migrator.find_rank import all_ranks
from migrator.quiesce.cut import Counts, Cut, Decision, Report, next_targets
from migrator.quiesce.process_reports import (
    Membership,
    Numbers,
    Process,
    ProcessReport,
    Rows,
    ahead_of_itself,
    report_for_cut,
    rows_for,
    to_proto,
)
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import RankGone, SnapshotError, Timeout, Undone, Where

#: A process whose counts have not changed for this long counts as idle: threads that wait at its gate may pass.
PATIENCE_S = 0.5
#: Delay between two rounds; short at first, because most cuts are a few milliseconds away.
ROUND_S, ROUND_MAX_S = 0.002, 0.05
ASK_S = 15.0
#: Preflight: how often, and how far apart, a member is looked for before the move is refused for want of it.
LOOKS, LOOK_S = 5, 0.2


class Gates:
    """Every gate of one job. All nodes are asked concurrently."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.involved = False  # whether the moving rank is in a communicator
        self.nodes: tuple[str, ...] = ()  # that have ranks of the job
        self.closed: set[str] = set()  # nodes whose gates are closed, or may be
        self.rounds = 0
        self.guessed: frozenset[int] = frozenset()

    # ------------------------------------------------------------------ preflight

    async def check(self, description: pb.MoveDescription) -> list[pb.Check]:
        """Preflight: every member of the rank's communicators can be asked, and no gate refuses one of them."""
        if not await self.find(description):
            return []
        nodes, silent = await self._nodes_of_the_job(description)
        try:
            async with self._clients(nodes) as clients:
                reports = await _ask_all(clients, _reporting(description))
                missing = _unknown(description.rank_uid, reports)
                for _ in range(LOOKS - 1):
                    if not missing:
                        break
                    # Nodes do not report at the same moment. A communicator that one member has just created or destroyed
                    # is missing another one once; only a member that no daemon knows is missing every time.
                    await asyncio.sleep(LOOK_S)
                    reports = await _ask_all(clients, _reporting(description))
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
            checks.append(_missing(missing, silent))
        return checks

    async def find(self, description: pb.MoveDescription) -> bool:
        """Whether the rank that is to move is in a communicator now. Asks only its own node."""
        async with self._clients([description.source_node]) as clients:
            reports = _of(description.rank_uid, await _ask_all(clients, _reporting(description)))
        self.involved = any(report.gate.communicators for report in reports)
        return self.involved

    async def _nodes_of_the_job(self, description: pb.MoveDescription) -> tuple[tuple[str, ...], list[str]]:
        """The nodes that have ranks of the job, and the nodes that do not answer."""
        found, silent = await all_ranks(self.cluster)
        here = {
            entry.node
            for entry in found
            if (entry.rank.user_id, entry.rank.job) == (description.user_id, description.job)
            and entry.rank.place == pb.Rank.HERE
        }
        self.nodes = tuple(sorted(here | {description.source_node}))
        return self.nodes, sorted(silent)

    @contextlib.asynccontextmanager
    async def _clients(self, nodes: Iterable[str]) -> AsyncIterator[dict[str, DaemonClient]]:
        async with contextlib.AsyncExitStack() as stack:
            yield {node: await stack.enter_async_context(self.cluster.client(node)) for node in nodes}

    # ------------------------------------------------------------------ the cut

    async def quiesce(self, description: pb.MoveDescription, timeout_s: float) -> None:
        """Closes every gate and lets each process run as far as the cut requires. On failure gates stay closed: undo."""
        deadline = time.monotonic() + timeout_s
        nodes, silent = await self._nodes_of_the_job(description)
        async with self._clients(nodes) as clients:
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
            return await client.gate.Close(description, timeout_s=_left(deadline))

        ask: _Ask = close
        view, pause_s = _View(description), ROUND_S
        while True:
            reports = await _ask_all(clients, ask)
            self.rounds += 1
            # In a thread, so that the lease is renewed meanwhile: with thousands of ranks this takes a while.
            cut, changed = await asyncio.to_thread(view.next, reports)
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


async def _ask_all(clients: Mapping[str, DaemonClient], ask: _Ask) -> list[ProcessReport]:
    """The reports of all processes. Raises the first failure, after all nodes have answered or failed."""
    answers = await asyncio.gather(*(ask(client, node) for node, client in clients.items()), return_exceptions=True)
    reports = []
    for node, answer in zip(clients, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        reports += [ProcessReport.of(node, gate) for gate in answer.processes]
    return reports


def _reporting(description: pb.MoveDescription) -> _Ask:
    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        request = pb.GateReportRequest(move=description.move, job=description.job, user_id=description.user_id)
        return await client.gate.Report(request, timeout_s=ASK_S)

    return ask


def _setting_targets(
    description: pb.MoveDescription, changed: Mapping[str, list[pb.ProcessTargets]], close: _Ask, deadline: float
) -> _Ask:
    """Hands out the targets that have changed. A node where none has only reports."""

    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        if node not in changed:
            return await close(client, node)
        request = pb.SetTargetsRequest(move=description.move, processes=changed[node])
        return await client.gate.SetTargets(request, timeout_s=_left(deadline))

    return ask


class _View:
    """What is known of the job, from round to round. Only what has changed is looked at again.

    It also distinguishes idle from active processes. What threads do outside the gate is invisible here; only arrivals count.
    """

    def __init__(self, description: pb.MoveDescription) -> None:
        self.description = description
        self.numbers, self.membership = Numbers(), Membership()
        self.cut: Cut | None = None
        self._seen: dict[Process, _Seen] = {}
        self._told: dict[Process, Rows] = {}  # what each gate was told last

    def next(self, reports: Collection[ProcessReport]) -> tuple[Cut, dict[str, list[pb.ProcessTargets]]]:
        """The cut after these reports, and what gates have to be told before the next round, by node."""
        self._find_ended(reports)
        self.numbers.add(reports)
        for report in reports:
            if not self._is_known(report):
                self.membership.add(report, self.numbers(report.process))
        shown = self._for_cut(reports)
        self.cut = next_targets(shown, self._raised())
        return self.cut, self._changes(reports, self.cut)

    def _find_ended(self, reports: Iterable[ProcessReport]) -> None:
        for process in self._seen.keys() - {report.process for report in reports}:
            if self._seen[process].gate.communicators:
                raise RankGone(
                    f"process {process.pid} of rank {self._seen[process].gate.rank} has ended, and the others wait for it",
                    where=Where.SOURCE_RUNNING,
                )

    def _is_known(self, report: ProcessReport) -> bool:
        seen = self._seen.get(report.process)
        return seen is not None and seen.gate == report.gate

    def _for_cut(self, reports: Iterable[ProcessReport]) -> dict[int, Report]:
        made, now = {}, time.monotonic()
        for report in reports:
            me, seen = self.numbers(report.process), self._seen.get(report.process)
            if seen is None or seen.version != self.membership.version or seen.gate != report.gate:
                shown = report_for_cut(report, me, self.membership)
                since = seen.since if seen is not None and seen.idle == shown else now
                running = report.not_waiting
                active = replace(shown, running=running) if running else shown
                several = ahead_of_itself(report, self.membership)
                seen = _Seen(report.gate, self.membership.version, shown, active, since, several)
                self._seen[report.process] = seen
            made[me] = seen.idle if now - seen.since > PATIENCE_S else seen.active
        return made

    def _raised(self) -> Cut:
        """The last cut with every target at least what some member has launched, and without aborted communicators."""
        last = self.cut or Cut(Decision.RUN_ON, "", {}, (), {}, {})
        aborted = self.membership.aborted
        targets = {channel: count for channel, count in last.targets.items() if channel.comm not in aborted}
        for seen in self._seen.values():
            for channel, count in seen.several.items():
                targets[channel] = max(targets.get(channel, 0), count)
        permissions = last.permissions
        if aborted:
            permissions = {
                rank: tuple(one for one in some if one.channel.comm not in aborted)
                for rank, some in last.permissions.items()
            }
        return replace(last, targets=targets, permissions=permissions)

    def _changes(self, reports: Collection[ProcessReport], cut: Cut) -> dict[str, list[pb.ProcessTargets]]:
        if cut.decision is Decision.REACHED:
            # Targets are reached and permissions end by themselves, except for a communicator that was aborted since.
            aborted = self.membership.aborted
            if not aborted or not any(_names(told, aborted) for told in self._told.values()):
                return {}
        rows = rows_for(
            cut.targets, cut.permissions, {self.numbers(report.process) for report in reports}, self.membership
        )
        found: dict[str, list[pb.ProcessTargets]] = {}
        for report in reports:
            me = self.numbers(report.process)
            if self._told.get(report.process, Rows((), ())) != rows[me]:
                self._told[report.process] = rows[me]
                found.setdefault(report.node, []).append(to_proto(report.process, me, rows[me], self.membership))
        return found


def _names(told: Rows, comms: Collection[str]) -> bool:
    return any(row[0] in comms for row in told.targets) or any(one.channel.comm in comms for one in told.permissions)


@dataclass
class _Seen:
    """One process in the last round."""

    gate: pb.ProcessGate
    version: int  # of the membership that its report was made with
    idle: Report  # if nothing has changed for PATIENCE_S
    active: Report  # otherwise
    since: float  # when it last changed
    several: Counts  # of `ahead_of_itself`


def _left(deadline: float) -> float:
    """The time-out of one request. Once the deadline has passed it is short, and the loop notices the deadline."""
    return max(2.0, min(ASK_S, deadline - time.monotonic()))


def _of(rank_uid: str, reports: Iterable[ProcessReport]) -> list[ProcessReport]:
    return [report for report in reports if report.process.rank_uid == rank_uid]


def _unknown(rank_uid: str, reports: Collection[ProcessReport]) -> dict[str, int]:
    """The communicators of a rank that have members which no process has reported to be, and how many."""
    numbers = Numbers()
    numbers.add(reports)
    membership = Membership.gather(reports, numbers)
    comms = {comm.id for report in _of(rank_uid, reports) for comm in report.gate.communicators}
    return {comm: count for comm in comms if (count := membership.unknown(comm))}


def _missing(unknown: Mapping[str, int], silent: Collection[str]) -> pb.Check:
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
