"""The lease of a coordinator: it coordinates a job only as long as most nodes that keep its snapshots follow it.

Invariant: a coordinator lets no rank of the job run, and begins no incarnation, unless a majority of these nodes has
promised, within the last CUT_OFF_S, to follow no other one (promises.py). Each keeps that promise for the longer FENCED_S. So
a node to which a majority has promised the same is the only coordinator, and what the former one had on its node has ended.
As long as two snapshots of a job are kept, a majority is needed of the nodes of each.

With two voters there is no majority without one of them: no lease is needed, because no other node takes over by itself. A
cluster with a third node has a witness.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Where, WrongState
from snapshotd.moves import job_rules
from snapshotd.moves.jobs import records
from snapshotd.moves.jobs.machines import refuses
from snapshotd.moves.jobs.promises import Promises
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record import MoveRecord
from snapshotd.moves.record_parts import JobPart
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

EVERY_S = 1.0
ASK_S = 2.0
#: A node that is asked to follow another coordinator asks the former one first.
TAKE_OVER_S = 15.0
#: How long a daemon that has just started may ask before a lease from before counts as lost.
STARTS_S = 5.0
FILE = "leases.json"


@dataclass(frozen=True)
class Successor:
    """A node that coordinates a snapshot of this node's."""

    snapshot: MoveLog
    node: str
    endpoint: str


def keepers_of(coordinator: str, parts: Iterable[JobPart]) -> list[str]:
    """The coordinator of a snapshot, and the nodes that keep its images."""
    return sorted({coordinator, *(node for part in parts for _, node, _ in records.images_of(part))})


class Leases:
    """One instance per daemon."""

    def __init__(self, node: Node, promises: Promises) -> None:
        self.node, self.promises = node, promises
        self._promised_s: dict[tuple[str, str], float] = {}  # (record, node) -> CLOCK_BOOTTIME of the question
        self._begun_s: dict[str, float] = {}  # record that began since the daemon has started
        self._over: set[str] = set()  # records that need no lease any more
        self._told: set[tuple[str, str]] = set()  # (record, node) that knows that all nodes have confirmed it
        self._started_s = host.boottime_s()
        self._asking = asyncio.Lock()
        promises.cut_off = self.lost

    # ------------------------------------------------------------------ what the coordinator may do

    @property
    def starting(self) -> bool:
        """Whether this daemon has just started, so that it may not have asked for promises yet."""
        return host.boottime_s() - self._started_s < STARTS_S

    def begins(self, record: str) -> None:
        """A snapshot begins now: its lease counts from here, although no node has promised anything yet. None of them follows
        another coordinator before it was asked."""
        self._begun_s[record] = host.boottime_s()

    def _needed(self, ranks: Collection[str] = ()) -> list[tuple[MoveLog, MoveRecord]]:
        """The snapshots, of the job with these ranks or of all, for which promises are needed. Blocking."""
        found = []
        for one in self.node.journal.all():
            if (one.begin.role, one.begin.kind) != ("job", "snapshot") or one.move in self._over or one.aborted:
                continue
            if ranks and not records.uids(one) & set(ranks):
                continue
            whole = one.whole()
            if whole.let_go or whole.handed_to or not whole.quorums:
                if one.ended_unix_s and (whole.let_go or not whole.quorums):
                    self._over.add(one.move)
                continue
            found.append((one, whole))
        return found

    def _holds(self, snapshot: MoveLog, whole: MoveRecord) -> bool:
        now_s = host.boottime_s()
        if now_s - self._begun_s.get(snapshot.move, -job_rules.CUT_OFF_S) < job_rules.CUT_OFF_S:
            return True
        promised = {node: at for (record, node), at in self._promised_s.items() if record == snapshot.move}
        return job_rules.holds_lease(whole.quorums, promised, now_s, whole.lost_nodes)

    def lost(self, ranks: Collection[str]) -> str:
        """Why this node may not coordinate the job with these ranks now; empty: it may. Blocking."""
        for one, whole in self._needed(ranks):
            if one.committed and not self._holds(one, whole):
                return f"{self.node.config.node}, which coordinates the job, is cut off from most nodes that keep {one.move}"
        return ""

    async def must_hold(self, ranks: Collection[str]) -> None:
        """Raises WrongState unless this node may coordinate the job now."""
        if why := await in_thread(self.lost, ranks):
            raise WrongState(
                why,
                remedy="retry when its network works again; nodes that never come back are declared dead: `migrator job"
                " rollback --lost NODE`, once for each",
                where=Where.UNKNOWN,
            )

    def is_known(self, snapshot: MoveLog) -> tuple[bool, list[str]]:
        """Whether so many nodes know that all have confirmed this snapshot that any majority could take over, and the nodes
        with a vote that do not know it. Blocking."""
        whole = snapshot.whole()
        if not snapshot.committed or whole.dropped or whole.let_go or whole.handed_to:
            return True, []
        told = {node for record, node in self._told if record == snapshot.move} | set(whole.lost_nodes)
        asked = [voters for voters in whole.quorums if len(voters) >= job_rules.MIN_VOTERS]
        not_told = sorted({node for voters in asked for node in voters} - told)
        return all(job_rules.is_majority(voters, told) for voters in asked), not_told

    async def declare(self, snapshot: MoveLog, lost_nodes: Collection[str]) -> None:
        """An operator has declared nodes dead: they promise nothing to anyone."""
        whole = await in_thread(snapshot.whole)
        if fresh := set(lost_nodes) - set(whole.lost_nodes):
            await in_thread(snapshot.mark, snapshot.last_mark, lost_nodes=sorted({*whole.lost_nodes, *fresh}))

    # ------------------------------------------------------------------ who has a vote

    async def voters(self, request: pb.BeginJobRequest, keepers: Collection[str]) -> tuple[list[str], list[str]]:
        """The nodes that have a vote on a snapshot that begins, and why there are no more of them. A witness that this node
        cannot ask is replaced by another one, or left out: a silent voter is worse than none, because one more loss would
        then leave no majority. All are asked before the voters are recorded, and promise nothing by their answer, so that
        there never are two lists of voters."""
        endpoints = {node.name: node.endpoint for node in request.nodes}
        asking = pb.LeaseRequest(record=request.record, job=request.job, endpoint=self.node.config.advertise)

        async def why_not(node: str) -> str:
            try:
                async with self.node.client(node, endpoints.get(node, "")) as client:
                    await client.job.Lease(asking, timeout_s=ASK_S)
            except SnapshotError as error:  # also of an older version, which does not know this call
                return f"{node} ({error.headline})"
            except OSError as error:
                return f"{node} ({error})"
            return ""

        named = dict.fromkeys([*request.witnesses, *request.stand_ins])
        candidates = [node for node in named if node not in keepers]
        found = dict(zip(candidates, await asyncio.gather(*map(why_not, candidates)), strict=True))
        able = [node for node, why in found.items() if not why][: len(request.witnesses)]
        not_asked = [why for why in found.values() if why]
        for why in not_asked:
            log.warning("snapshot %s of job %s: no vote for %s", request.record, request.job, why)
        if len(able) == len(request.witnesses):
            return sorted({*keepers, *able}), []
        if able and len({*keepers, *able}) % 2 == 0:
            able.pop()  # it would not let them bear one loss more
        return sorted({*keepers, *able}), not_asked

    # ------------------------------------------------------------------ asking for promises

    async def renew(self) -> tuple[list[MoveLog], list[Successor]]:
        """Asks all nodes once. Returns the snapshots whose lease is lost, and those that another node coordinates now."""
        async with self._asking:
            needed = await in_thread(self._needed)
            known = {one.move for one, _ in needed}
            before = dict(self._promised_s)
            self._promised_s = {place: at for place, at in before.items() if place[0] in known}
            self._told = {place for place in self._told if place[0] in known}
            quorums = {one.move: self._quorums(one, needed) for one, _ in needed}
            found = await asyncio.gather(*(self._renew(one, whole, quorums[one.move]) for one, whole in needed))
            if before or self._promised_s:
                await in_thread(self._remember)
        lost = [one for one, whole in needed if one.committed and not self.starting and not self._holds(one, whole)]
        return lost, [one for one in found if one is not None]

    def _quorums(self, snapshot: MoveLog, needed: Sequence[tuple[MoveLog, MoveRecord]]) -> list[list[str]]:
        """Its own, and those of other snapshots of the job that are not let go yet."""
        ranks = records.uids(snapshot)
        listed = [voters for one, whole in needed if records.uids(one) & ranks for voters in whole.quorums]
        return [list(voters) for voters in dict.fromkeys(map(tuple, listed))]

    async def _renew(self, snapshot: MoveLog, whole: MoveRecord, quorums: list[list[str]]) -> Successor | None:
        request = self._request(snapshot, quorums)
        request.begins = not whole.adopted_from
        request.settled, request.released = bool(snapshot.ended_unix_s), bool(whole.dropped)
        endpoints = {node.name: node.endpoint for node in whole.nodes}
        voters = sorted({node for one in (quorums if not whole.dropped else whole.quorums) for node in one})
        asked = (self._ask(request, node, endpoints.get(node, ""), ASK_S) for node in voters)
        replies = dict(zip(voters, await asyncio.gather(*asked), strict=True))
        yes = {node for node, reply in replies.items() if reply is not None and reply.holder == self.node.config.node}
        if whole.dropped:
            if all(job_rules.is_majority(one, yes) or len(one) < job_rules.MIN_VOTERS for one in whole.quorums):
                await in_thread(snapshot.mark, snapshot.last_mark, let_go=True)
            return None
        others = {reply.holder: reply.endpoint for reply in replies.values() if reply is not None and reply.holder}
        for node, endpoint in others.items():
            if node != self.node.config.node and await self._succeeds(node, endpoint, snapshot.move, whole):
                return Successor(snapshot, node, endpoint)
        return None

    def _request(self, snapshot: MoveLog, quorums: Iterable[Iterable[str]]) -> pb.LeaseRequest:
        return pb.LeaseRequest(
            record=snapshot.move,
            job=snapshot.begin.job,
            rank_uids=sorted(records.uids(snapshot)),
            quorums=[pb.Voters(nodes=voters) for voters in quorums],
            endpoint=self.node.config.advertise,
        )

    async def _ask(self, request: pb.LeaseRequest, node: str, endpoint: str, limit_s: float) -> pb.LeaseReply | None:
        """A node's answer; None if there is none. A machine that refuses the connection counts as if its daemon had promised
        again, if its last promise was still valid: no daemon is there that could follow another coordinator, and one that
        starts waits for FENCED_S first."""
        asked_s = host.boottime_s()
        reply: pb.LeaseReply | None = None
        try:
            if node == self.node.config.node:
                reply = await self.promises.ask(request, node)
            else:
                async with self.node.client(node, endpoint) as client:
                    reply = await client.job.Lease(request, timeout_s=limit_s)
        except (SnapshotError, OSError):
            since_s = self._promised_s.get((request.record, node), -job_rules.CUT_OFF_S)
            if asked_s - since_s >= job_rules.CUT_OFF_S or not await refuses(endpoint, ASK_S):
                return None
        if reply is not None and reply.holder == self.node.config.node and reply.settled:
            self._told.add((request.record, node))
        if reply is None or reply.holder == self.node.config.node:
            self._promised_s[request.record, node] = asked_s
        else:
            self._promised_s.pop((request.record, node), None)
        return reply

    async def _succeeds(self, node: str, endpoint: str, record: str, mine: MoveRecord) -> bool:
        """Whether that node has become the coordinator after this one. Else it has only asked to be, or was it before."""
        with contextlib.suppress(SnapshotError):
            async with self.node.client(node, endpoint) as client:
                found = await client.job.GetOutcome(pb.MoveRequest(move=record), timeout_s=ASK_S)
            return found.kind == pb.COMMIT and found.adopted_unix_s > mine.adopted_unix_s
        return False

    async def take(self, request: pb.AdoptRequest, *, handed_over: bool) -> tuple[list[list[str]], bool]:
        """Asks for the promises that this node needs to coordinate a snapshot in place of another one. Returns the quorums,
        and whether their nodes have agreed by themselves. Raises WrongState if too few did."""
        known = self.promises.of(request.record)
        quorums = [list(one.nodes) for one in request.quorums] or (known.quorums if known is not None else [])
        endpoints = {node.name: node.endpoint for node in request.nodes}
        asking = pb.LeaseRequest(
            record=request.record,
            job=request.job,
            rank_uids=sorted(part.rank_uid for part in request.participants),
            endpoint=self.node.config.advertise,
            takes_over=True,
            declared=request.former in request.lost_nodes,
        )
        voters = sorted({node for one in quorums for node in one})

        async def ask(node: str) -> pb.LeaseReply | None:
            limit_s = ASK_S if node == request.former else TAKE_OVER_S  # the former one is silent
            return await self._ask(asking, node, endpoints.get(node, ""), limit_s)

        found = await asyncio.gather(*map(ask, voters))
        replies = {node: reply for node, reply in zip(voters, found, strict=True) if reply is not None}
        yes = [node for node, reply in replies.items() if reply.holder == self.node.config.node]
        may, why = job_rules.may_take_over(quorums, yes, request.lost_nodes, handed_over=handed_over)
        if may and not handed_over and not request.lost_nodes and not any(reply.settled for reply in replies.values()):
            may, why = False, f"not all nodes have confirmed snapshot {request.record}"
        if not may:
            reasons = "; ".join(reply.reason for reply in replies.values() if reply.reason)
            raise WrongState(
                f"{self.node.config.node} cannot coordinate job {request.job} instead of {request.former}: {why}"
                + (f" ({reasons})" if reasons else ""),
                remedy=f"start {request.former}, or declare it dead when it is: `migrator job rollback {request.job} --lost"
                f" {request.former}`",
                where=Where.UNTOUCHED,
            )
        return quorums, not handed_over and not request.lost_nodes

    # ------------------------------------------------------------------ across restarts

    def _remember(self) -> None:
        """So that a restarted daemon knows how old its lease is. No process survives the machine, so nothing is synced."""
        path = self.node.ranks.folder.parent / FILE
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps([host.boot_id(), [[*place, at] for place, at in self._promised_s.items()]]))
        fresh.rename(path)

    def recall(self) -> None:
        """At start. Blocking."""
        self._started_s = host.boottime_s()
        try:
            boot_id, listed = json.loads((self.node.ranks.folder.parent / FILE).read_text())
            known = {(str(record), str(node)): float(at) for record, node, at in listed}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.warning("how old leases are is not known: %s", error)
            return
        self._promised_s = known if boot_id == host.boot_id() else {}
