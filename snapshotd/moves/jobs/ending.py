"""Ends the processes of one incarnation of a job on this node, because its coordinator has decided that it is over.

Invariant: that the incarnation has ended is on the disk before its first process is ended, so a restarted daemon continues,
and no copy of it that is on its way here ever runs. A home keeper is told that its rank is away before the rank is ended:
the launcher does not see the end, and the rank comes back with the next incarnation. Only the coordinator of a rank counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, SnapshotError
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves import job_rules
from snapshotd.moves.journal import check_move_id
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.steps import step
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

KILL_S = 20.0


class Endings:
    """One instance per daemon."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @step
    async def end(self, request: pb.EndRanksRequest, caller: str) -> pb.EndRanksReply:
        """Ends these ranks, if they are here and of this incarnation. Idempotent."""
        check_move_id(request.record)
        if request.incarnation:
            check_move_id(request.incarnation)
        await reach(Point.BEFORE_END_RANKS)
        for uid in request.rank_uids:
            await in_thread(self.node.ranks.end, check_rank_uid(uid), request.incarnation, caller)
            home = self.node.ranks.get(uid, "home")
            if home is not None and home.coordinator_node == caller and home.ended_by != request.record:
                home.ended_by = request.record  # it comes back with a key made from this
                await in_thread(self.node.ranks.update, home)
        copies = self._copies_of(request)
        answers = await asyncio.gather(*(self._end_for(entry, request.record, caller) for entry in copies))
        await reach(Point.END_RANKS)
        waiting = [f"rank {entry.rank}: {why}" for entry, why in zip(copies, answers, strict=True) if why]
        return pb.EndRanksReply(waiting_for=waiting)

    async def _end_for(self, entry: RankEntry, record: str, caller: str) -> str:
        """Why a copy is still here; empty: it is not. A failure does not keep the others from being ended."""
        if why := job_rules.may_not_end(entry.coordinator_node, caller):
            return why
        try:
            return await self.end_one(entry, record)
        except (SnapshotError, OSError) as error:
            return str(error)

    def _copies_of(self, request: pb.EndRanksRequest) -> list[RankEntry]:
        """All copies of that incarnation on this node, for any coordinator: none of them may be left."""
        asked = set(request.rank_uids)
        mine = [one for one in self.node.ranks.all() if one.uid in asked and not one.away_node]
        return [one for one in mine if one.incarnation == request.incarnation]

    async def sweep(self) -> None:
        """At start: continues what a crash interrupted. Home keepers reconnect later; then the coordinator asks again."""
        for entry in await in_thread(self.ended_ones):
            await self.try_to_end(entry, "after a restart")

    async def try_to_end(self, entry: RankEntry, why: str) -> None:
        """As `end_one`; what fails is repeated by the tether."""
        try:
            if waits := await self.end_one(entry, why):
                log.info("rank %s is not ended yet: %s", entry.uid, waits)
        except (SnapshotError, OSError) as error:
            log.error("rank %s of an incarnation that has ended could not be ended yet: %s", entry.uid, error)

    async def cut_off(self, entries: Iterable[RankEntry], why: str) -> None:
        """Ends ranks of this node by itself, because their job may run elsewhere, and tells their launchers."""
        listed = list(entries)
        for entry in listed:
            log.error("rank %s is ended: %s", entry.uid, why)
            await in_thread(self.node.ranks.end, entry.uid, entry.incarnation, entry.coordinator_node)
            text = (
                f"rank {entry.rank} was ended on {self.node.config.node}: {why}. Its keeper waits for it: unless the job"
                f" is rolled back already, `migrator job rollback {entry.job}` brings it back"
            )
            if entry.role == "guest":
                entry.cut_off = text  # its home node is told when it has ended
            elif entry.link is not None:
                with contextlib.suppress(SnapshotError):
                    await entry.link.say(text)
        await asyncio.gather(*(self.try_to_end(entry, why) for entry in listed))

    def ended_ones(self) -> list[RankEntry]:
        """The copies here whose incarnation is over. Blocking."""
        found = []
        for entry in self.node.ranks.all():
            try:
                if not entry.away_node and self.node.ranks.has_ended(entry):
                    found.append(entry)
            except Damaged as error:
                log.error("%s", error.message)
        return found

    async def end_one(self, entry: RankEntry, record: str) -> str:
        """Ends one rank, whose end is recorded. Returns why it could not be ended yet."""
        group = entry.group
        at_home = entry.role == "home" and entry.keeper_alive()
        known = self.node.journal.find(entry.moving) if entry.moving else None
        if known is not None and known.begin.role == "target" and not known.ended_unix_s:
            return "a held copy waits for the outcome of its move"
        if at_home:
            if group.pids():
                await in_thread(group.freeze, KILL_S)  # it does not run any more, and must not see its pipes closed
            if entry.link is None:
                return "its keeper has not reconnected yet"
            await entry.link.away(record, self.node.config.node)
        await in_thread(connections.silence, group.pids())
        if entry.role == "guest" and entry.keeper_pid:
            # PID 1 of the rank's pid namespace. First: it would report the end of the rank to the home keeper.
            entry.keeper.signal(9)
        await in_thread(group.kill, KILL_S)
        if at_home:  # not earlier: a daemon that is restarted ends what is here
            entry.away_node, entry.failed = self.node.config.node, None
            await in_thread(self.node.ranks.put, entry)
        if entry.role == "guest":
            await self.node.lost(entry)
        log.warning("ended rank %s: its incarnation is over (%s)", entry.uid, record)
        return ""
