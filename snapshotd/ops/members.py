"""This node's members of the communicators of a rank that moves: taken down, and built again with all others at once.

The source daemon asks for it, which alone knows all members; here are those of one node, among them, on the target, the copy
that is held. Invariant: communicators change only behind a closed gate. Whatever fails here leaves them down, and the
gates closed: what becomes of the job is the source's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from snapshotd import host, ncclctl, tree
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, RankGone, SnapshotError, Where, WrongState
from snapshotd.blocking import all_at_once, in_thread
from snapshotd.faults import Point, reach
from snapshotd.journal import MoveLog, check_move_id
from snapshotd.ops import gated, held
from snapshotd.ops.gates import GateOps
from snapshotd.ops.node import Moving
from snapshotd.tree import Process

log = logging.getLogger(__name__)

#: NCCL has no deadlines: these are ours, for all processes of a node together.
DETACH_S, NEW_ID_S, ATTACH_S = 30.0, 10.0, 60.0


class Members:
    """One instance per daemon. `held_copy`: the move's copy here, if this node is its target and may not let it run yet."""

    def __init__(self, gates: GateOps, held_copy: Callable[[str], Moving | None]) -> None:
        self.gates = gates
        self._held_copy = held_copy

    async def adopt_copies(self) -> None:
        """At start: a copy that an earlier life had woken to build communicators stands still again."""
        for move_log in self.gates.node.journal.all():
            copy = self._held_copy(move_log.move)
            if copy is None or not copy.same_boot or not move_log.note("nccl"):
                continue
            async with copy.lock:
                if self._held_copy(move_log.move) is not copy:  # let go, or dropped, before the lock was ours
                    continue
                try:
                    await held.still(move_log)
                except (SnapshotError, OSError) as error:  # its threads are parked: nothing of the job runs
                    log.warning("move %s: its copy does not stand still yet: %s", move_log.move, error)

    async def detach(self, request: pb.DetachRequest, caller: str) -> pb.DetachReply:
        """Takes these communicators down in all processes of these ranks here."""
        moving = self.gates.moving(request.move)
        _only_the_source(moving.log, caller)
        comms = [ncclctl.check_comm(comm) for comm in request.comms]
        began = host.boottime_s()
        async with moving.lock:
            self.gates.still_open(moving)
            found = await in_thread(gated.members, moving.log, request.rank_uids)
            await all_at_once(lambda each: ncclctl.detach(each.process, comms, DETACH_S), found)
            log.info("move %s: took %d communicators down in %d processes", request.move, len(comms), len(found))
            await reach(Point.DETACHED)
        return pb.DetachReply(comms=len(comms), seconds=host.boottime_s() - began)

    async def new_id(self, request: pb.NewIdRequest, caller: str) -> pb.NewIdReply:
        """An id for a communicator, made by the member that has seat 0 in it. It runs until the Attach that follows."""
        copy = self._copy_of(request.move, [request.rank_uid])
        if copy is not None:
            _only_the_source(copy.log, caller)
            async with copy.lock:
                self._may_wake(copy)
                processes = await held.wake_shim(copy.log)
                return pb.NewIdReply(unique_id=await in_thread(_new_id, processes, request.pid))
        moving = self.gates.moving(request.move)
        _only_the_source(moving.log, caller)
        async with moving.lock:
            self.gates.still_open(moving)
            found = await in_thread(gated.members, moving.log, [request.rank_uid])
            return pb.NewIdReply(unique_id=await in_thread(_new_id, [each.process for each in found], request.pid))

    async def attach(self, request: pb.AttachRequest, caller: str) -> pb.AttachReply:
        """Builds these communicators in all processes of these ranks here; they meet those of the other nodes.

        None named: the held copy gets ready for it, so that nobody waits for one that cannot.
        """
        lines = [ncclctl.attach_line(each.comm, each.unique_id, untried=each.untried) for each in request.comms]
        began = host.boottime_s()
        copy = self._copy_of(request.move, request.rank_uids)
        staying = set(request.rank_uids) - ({copy.log.begin.rank_uid} if copy else set())
        work = [self._attach_copy(copy, lines, caller)] if copy is not None else []
        if staying:
            work.append(self._attach_here(self.gates.moving(request.move), staying, lines, caller))
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if lines:
            log.info("move %s: built %d communicators again", request.move, len(lines))
            await reach(Point.ATTACHED)
        return pb.AttachReply(comms=len(lines), seconds=host.boottime_s() - began)

    async def _attach_copy(self, copy: Moving, lines: list[str], caller: str) -> None:
        _only_the_source(copy.log, caller)
        async with copy.lock:
            self._may_wake(copy)
            try:
                processes = await held.wake_shim(copy.log)
                if not lines:
                    return
                await reach(Point.ATTACHING)
                await all_at_once(lambda each: ncclctl.attach(each, lines, ATTACH_S), processes)
            except BaseException:
                await held.still(copy.log)
                raise
            await held.still(copy.log)

    async def _attach_here(self, moving: Moving, rank_uids: Collection[str], lines: list[str], caller: str) -> None:
        _only_the_source(moving.log, caller)
        async with moving.lock:
            self.gates.still_open(moving)
            found = await in_thread(gated.members, moving.log, rank_uids)
            await reach(Point.ATTACHING)
            await all_at_once(lambda each: ncclctl.attach(each.process, lines, ATTACH_S), found)

    def _copy_of(self, move: str, rank_uids: Iterable[str]) -> Moving | None:
        copy = self._held_copy(check_move_id(move))
        return copy if copy is not None and copy.log.begin.rank_uid in set(rank_uids) else None

    def _may_wake(self, copy: Moving) -> None:
        if self._held_copy(copy.log.move) is not copy:  # it was, before the lock was ours
            raise WrongState(f"the copy of move {copy.log.move} is not held here any more", where=Where.UNKNOWN)


def _new_id(processes: Sequence[Process], inner_pid: int) -> str:
    for process in processes:
        if process.alive() and tree.inner_pid(process.pid) == inner_pid:
            return ncclctl.new_id(process, NEW_ID_S)
    raise RankGone(f"the rank's process {inner_pid} is not here", where=Where.UNKNOWN)


def _only_the_source(move_log: MoveLog, caller: str) -> None:
    if caller != move_log.begin.source_node:
        raise Denied(f"{caller} is not the source of move {move_log.move}")
