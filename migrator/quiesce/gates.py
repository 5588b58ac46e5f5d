"""The gates of a job that speaks NCCL, as the driver of a move sees them: closed at one consistent cut, opened at the end.

Invariant: the driver only finds the cut. What is closed is journalled by each node before it is closed, so a driver that
dies leaves gates that the daemons open alone, once they know the outcome. A job whose moving rank is in no communicator is
not asked for anything: its gates stay as they are, and nothing is journalled.

Where the cut is not reached in time (a rank is in user code, or waits for another rank by other means than NCCL) the move
is given up with the cut's own reason, and the job goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from migrator.cluster import Cluster
from migrator.find import all_ranks
from migrator.quiesce.cut import Cut, Decision, Report, next_targets
from migrator.quiesce.readings import Numbers, Process, Reading, Seats, floor, lines, report
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import SnapshotError, Timeout, Undone, Where

#: A process whose counts have not changed for so long is not waited for: what it holds at the gate may be let on.
PATIENCE_S = 0.5
#: Between two rounds; short at first, since most cuts are some milliseconds away.
ROUND_S, ROUND_MAX_S = 0.002, 0.05
ASK_S = 15.0


class Gates:
    """Every gate of one job, all asked at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.involved = False  # whether the moving rank is in a communicator
        self.nodes: tuple[str, ...] = ()  # that have ranks of the job
        self.closed: set[str] = set()  # nodes whose gates are closed, or may be
        self.rounds = 0
        self.guessed: frozenset[int] = frozenset()

    # ------------------------------------------------------------------ preflight

    async def look(self, request: pb.GateRequest) -> list[pb.Check]:
        """Whether every member of the rank's communicators can be asked, and none of them is refused by its gate."""
        if not await self.find(request):
            return []
        nodes, silent = await self._of_the_job(request)
        try:
            async with self._clients(nodes) as clients:
                answers = await _ask_all(clients, _reporting(request))
        except SnapshotError as error:
            return [
                pb.Check(
                    name="nccl-members",
                    verdict=pb.Check.REFUSE,
                    reason=f"a node that has ranks of the job does not say where they are: {error.message}",
                    remedy=error.advice,
                )
            ]
        readings = _parse(answers)
        comms = sorted({comm["id"] for reading in _of(request.rank_uid, readings) for comm in reading.comms})
        checks = [
            pb.Check(
                name="nccl",
                verdict=pb.Check.REFUSE,
                reason=f"rank {gate.rank}, process {gate.pid}: communicator {refusal}",
                remedy="see shim/README.md for what cannot be taken down, and switch it off, or move when it is over",
            )
            for gates in answers.values()
            for gate in gates
            for refusal in gate.refusals
            if gate.rank_uid != request.rank_uid and refusal.partition(":")[0] in comms
        ]
        numbers = Numbers()
        numbers.take(readings)
        seats = Seats.gather(readings, numbers)
        if missing := [comm for comm in comms if seats.empty(comm)]:
            checks.append(_missing(missing, seats, silent))
        return checks

    async def find(self, request: pb.GateRequest) -> bool:
        """Whether the rank that is to move is in a communicator now. Asks its own node alone."""
        async with self._clients([request.source_node]) as clients:
            readings = _of(request.rank_uid, _parse(await _ask_all(clients, _reporting(request))))
        self.involved = any(reading.comms for reading in readings)
        return self.involved

    async def _of_the_job(self, request: pb.GateRequest) -> tuple[tuple[str, ...], list[str]]:
        """The nodes that have ranks of the job, and those that do not answer."""
        found, silent = await all_ranks(self.cluster)
        here = {entry.node for entry in found if entry.rank.job == request.job and entry.rank.place == pb.Rank.HERE}
        self.nodes = tuple(sorted(here | {request.source_node}))
        return self.nodes, sorted(silent)

    @contextlib.asynccontextmanager
    async def _clients(self, nodes: Iterable[str]) -> AsyncIterator[dict[str, DaemonClient]]:
        async with contextlib.AsyncExitStack() as stack:
            yield {node: await stack.enter_async_context(self.cluster.client(node)) for node in nodes}

    # ------------------------------------------------------------------ the cut

    async def quiesce(self, request: pb.GateRequest, timeout_s: float) -> None:
        """Closes every gate and lets each process on, as far as it has to go. Raises with the gates closed: undo."""
        deadline = time.monotonic() + timeout_s
        nodes, silent = await self._of_the_job(request)

        async with self._clients(nodes) as clients:
            await self._find_cut(clients, request, silent, deadline, timeout_s)

    async def _find_cut(
        self,
        clients: Mapping[str, DaemonClient],
        request: pb.GateRequest,
        silent: Collection[str],
        deadline: float,
        timeout_s: float,
    ) -> None:
        async def close(client: DaemonClient, node: str) -> pb.GateReport:
            self.closed.add(node)
            return await client.gate.Close(request, timeout_s=_left(deadline))

        ask: _Ask = close
        cut: Cut | None = None
        numbers, watch, pause_s = Numbers(), _Watch(), ROUND_S
        while True:
            readings = _parse(await _ask_all(clients, ask))
            numbers.take(readings)
            seats = Seats.gather(readings, numbers)
            self.rounds += 1
            handed = cut.targets if cut else {}
            cut = next_targets(watch.reports(readings, numbers, seats), _raised(cut, readings, seats))
            self.guessed = cut.guessed
            if cut.decision is Decision.REACHED:
                return
            if cut.decision is Decision.NEVER or time.monotonic() >= deadline:
                raise _given_up(cut, numbers, silent, timeout_s)
            if cut.targets == handed:
                # Closed once more, for processes that have made their first communicator since.
                ask = close
                await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, ROUND_MAX_S)
            else:
                ask, pause_s = _handing(request, cut, readings, numbers, seats, deadline), ROUND_S

    # ------------------------------------------------------------------ the end

    async def open(self, move: str, token: bytes, timeout_s: float) -> list[str]:
        """Tells every node the outcome; who has not opened yet, in words. A node that does not hear it asks the source."""

        async def ask(node: str) -> str:
            try:
                async with self.cluster.client(node) as client:
                    reply = await client.gate.Open(
                        pb.TokenRequest(move=move, token=token), timeout_s=min(timeout_s, ASK_S), retry=True
                    )
            except SnapshotError as error:
                return f"{node}: {error.message.splitlines()[0]}"
            return "" if reply.opened else f"{node}: {reply.waiting_for}"

        return [late for late in await asyncio.gather(*(ask(node) for node in sorted(self.closed))) if late]


_Ask = Callable[[DaemonClient, str], Awaitable[pb.GateReport]]


async def _ask_all(clients: Mapping[str, DaemonClient], ask: _Ask) -> dict[str, list[pb.ProcessGate]]:
    """By node. Raises the first failure, when all have answered or failed."""
    answers = await asyncio.gather(*(ask(client, node) for node, client in clients.items()), return_exceptions=True)
    told = {}
    for node, answer in zip(clients, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        told[node] = list(answer.processes)
    return told


def _reporting(request: pb.GateRequest) -> _Ask:
    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        return await client.gate.Report(request, timeout_s=ASK_S)

    return ask


def _handing(
    request: pb.GateRequest, cut: Cut, readings: Collection[Reading], numbers: Numbers, seats: Seats, deadline: float
) -> _Ask:
    """Hands every process its targets."""
    processes: dict[str, list[pb.ProcessTargets]] = {}
    for reading in readings:
        told = lines(cut.targets, numbers(reading.process), seats)
        targets = pb.ProcessTargets(rank_uid=reading.process.rank_uid, pid=reading.process.pid, lines=told)
        processes.setdefault(reading.node, []).append(targets)

    async def ask(client: DaemonClient, node: str) -> pb.GateReport:
        if node not in processes:  # none of its processes had a gate, so nothing is journalled there
            return await client.gate.Close(request, timeout_s=_left(deadline))
        handed = pb.GateTargetRequest(gate=request, processes=processes[node])
        return await client.gate.Target(handed, timeout_s=_left(deadline))

    return ask


class _Watch:
    """Tells which processes move. What a thread does outside the gate cannot be seen from here, only that it comes."""

    def __init__(self) -> None:
        self._last: dict[Process, tuple[Report, float]] = {}

    def reports(self, readings: Iterable[Reading], numbers: Numbers, seats: Seats) -> dict[int, Report]:
        made = {}
        for reading in readings:
            me = numbers(reading.process)
            seen = report(reading, me, seats, idle=True)
            before, since = self._last.get(reading.process, (None, 0.0))
            if before != seen:
                since = time.monotonic()
                self._last[reading.process] = (seen, since)
            idle = time.monotonic() - since > PATIENCE_S
            made[me] = seen if idle else replace(seen, running=reading.not_held)
        return made


def _raised(cut: Cut | None, readings: Collection[Reading], seats: Seats) -> Cut:
    """The last cut, no target of which is below what some seat has launched; without communicators aborted since."""
    last = cut or Cut(Decision.RUN_ON, "", {}, (), frozenset(), {})
    targets = {channel: count for channel, count in last.targets.items() if channel.comm not in seats.aborted}
    for channel, count in floor(readings, seats).items():
        targets[channel] = max(targets.get(channel, 0), count)
    return replace(last, targets=targets)


def _left(deadline: float) -> float:
    """For one request; when all time is over it gets a little, for the loop to find out."""
    return max(2.0, min(ASK_S, deadline - time.monotonic()))


def _parse(answers: Mapping[str, Iterable[pb.ProcessGate]]) -> list[Reading]:
    return [
        Reading.parse(Process(gate.rank_uid, gate.pid), gate.rank, node, gate.json)
        for node, processes in answers.items()
        for gate in processes
    ]


def _of(rank_uid: str, readings: Iterable[Reading]) -> list[Reading]:
    return [reading for reading in readings if reading.process.rank_uid == rank_uid]


def _missing(comms: Collection[str], seats: Seats, silent: Collection[str]) -> pb.Check:
    count = sum(seats.empty(comm) for comm in comms)
    who = f"; no answer from {', '.join(silent)}" if silent else ""
    return pb.Check(
        name="nccl-members",
        verdict=pb.Check.REFUSE,
        reason=f"{count} members of {len(comms)} of its NCCL communicators are no ranks that a daemon knows{who}",
        remedy="start every rank of the job with `migrator run`, under the same --job, on nodes of this cluster; "
        "bring nodes that do not answer back; a job that is still starting can be moved when it has started",
    )


def _given_up(cut: Cut, numbers: Numbers, silent: Collection[str], timeout_s: float) -> SnapshotError:
    reason = numbers.in_words(cut.reason)
    who = f"; no answer from {', '.join(silent)}" if silent else ""
    if cut.decision is Decision.NEVER:
        return Undone(f"the job cannot stand still: {reason}{who}", remedy="see why that rank has ended")
    return Timeout(
        f"the job did not come to a point where it can stand still within {timeout_s:.0f} s: {reason}{who}",
        remedy="try again: another attempt begins elsewhere in the program; or allow more with --quiesce-timeout",
        where=Where.SOURCE_RUNNING,
    )
