"""Takes down this node's members of a moving rank's communicators, and builds them again together with all others.

The source daemon, which alone knows all members, requests it. This module handles the members on one node; on the target the
held copy is one of them. Invariant: communicators change only behind a closed gate. A failure here leaves them down and the
gates closed; the source decides how the move ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, NcclFailed, RankGone, SnapshotError, Where, WrongState
from snapshotd.inprocess import nccl_lines, ncclctl
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import gate_processes, held_copy, leftovers
from snapshotd.moves.nccl.gates import GateSteps
from snapshotd.moves.record_parts import GateProcess
from snapshotd.moves.rules import Mark
from snapshotd.moves.steps import step
from snapshotd.proc import host, tree
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

#: NCCL has no deadlines. These apply to all processes of a node together. The source sets others for Detach and Attach.
DETACH_S, NEW_ID_S, ATTACH_S, DEVICES_S = 30.0, 10.0, 60.0, 10.0
#: NCCL's event threads end within milliseconds.
CLOSE_DEVICES_S = 10.0
LIMIT_MAX_S = 3 * 3600.0


class Members:
    """One instance per daemon. `held_copy`: the move's copy here, if this node is its target and the copy may not run yet.
    `held_of_job`: the same for all copies of a job record that resumes a job."""

    def __init__(
        self,
        gates: GateSteps,
        held_copy: Callable[[str], Moving | None],
        held_of_job: Callable[[str], Sequence[Moving]] = lambda _record: (),
    ) -> None:
        self.gates = gates
        self._held_copy, self._held_of_job = held_copy, held_of_job
        self._building: defaultdict[str, set[threading.Event]] = defaultdict(set)  # by move; set: give up

    async def adopt_copies(self) -> None:
        """At start: stops a copy that was continued to build communicators before the restart."""
        for move_log in self.gates.node.journal.all():
            copy = self._held_copy(move_log.move)
            if copy is None or not copy.same_boot or not move_log.record.nccl_processes:
                continue
            async with copy.lock:
                if self._held_copy(move_log.move) is not copy:  # activated or dropped before the lock was free
                    continue
                try:
                    await held_copy.still(move_log)
                except (SnapshotError, OSError) as error:  # its threads are parked: nothing of the job runs
                    log.warning("move %s: its copy is not stopped yet: %s", move_log.move, error)

    @step
    async def detach(self, request: pb.DetachRequest, caller: str) -> pb.DetachReply:
        """Takes these communicators down in all processes of these ranks here."""
        moving = self.gates.moving(request.move)
        _only_the_source(moving.log, caller)
        comms = [nccl_lines.check_comm(comm) for comm in request.comms]
        began, limit_s = host.boottime_s(), _limit_s(request.timeout_s, DETACH_S)
        async with moving.lock:
            self._must_be_closed(moving)
            found = await in_thread(gate_processes.members, moving.log, request.rank_uids)
            async with _members_only(found):
                await all_at_once(lambda each: ncclctl.detach(each.process, comms, limit_s), found)
                if request.close_devices:
                    processes = [each.process for each in found]
                    await all_at_once(lambda each: ncclctl.close_devices(each, CLOSE_DEVICES_S), processes)
                    await leftovers.must_be_none(processes)
            log.info("move %s: took %d communicators down in %d processes", request.move, len(comms), len(found))
            await reach(Point.DETACHED)
        return pb.DetachReply(comms=len(comms), seconds=host.boottime_s() - began)

    @step
    async def new_id(self, request: pb.NewIdRequest, caller: str) -> pb.NewIdReply:
        """Makes an id for a communicator, in its member with rank 0. That process runs until the Attach that follows."""
        for copy in self._copies_of(request.move, [request.rank_uid]):
            _only_the_source(copy.log, caller)
            async with copy.lock:
                self._may_wake(copy)
                processes = await held_copy.wake_shim(copy.log)
                return pb.NewIdReply(unique_id=await in_thread(_new_id, processes, request.pid))
        moving = self.gates.moving(request.move)
        _only_the_source(moving.log, caller)
        async with moving.lock:
            self._must_be_closed(moving)
            found = await in_thread(gate_processes.members, moving.log, [request.rank_uid])
            return pb.NewIdReply(unique_id=await in_thread(_new_id, [each.process for each in found], request.pid))

    @step
    async def attach(self, request: pb.AttachRequest, caller: str) -> pb.AttachReply:
        """Builds these communicators in all processes of these ranks here, together with those of the other nodes.

        Without any communicator it only prepares the held copy, so that no member waits for one that cannot take part.
        """
        lines = [nccl_lines.attach_line(each.comm, each.unique_id, untried=each.untried) for each in request.comms]
        began, limit_s = host.boottime_s(), _limit_s(request.timeout_s, ATTACH_S)
        copies = self._copies_of(request.move, request.rank_uids)
        staying = set(request.rank_uids) - {copy.log.begin.rank_uid for copy in copies}
        given_up, reports = threading.Event(), list[pb.ProcessGate]()
        work = [self._attach_copy(copy, lines, limit_s, caller, given_up, reports) for copy in copies]
        if staying:
            work.append(self._attach_here(self.gates.moving(request.move), staying, lines, limit_s, caller, given_up))
        self._building[request.move].add(given_up)
        try:
            await _all_or_none(work, given_up)
        finally:
            self._building[request.move].discard(given_up)
            if not self._building[request.move]:
                del self._building[request.move]
        if lines:
            log.info("move %s: built %d communicators again", request.move, len(lines))
            await reach(Point.ATTACHED)
        return pb.AttachReply(comms=len(lines), seconds=host.boottime_s() - began, processes=reports)

    async def give_up(self, move: str, caller: str) -> pb.GiveUpReply:
        """Another member has failed: ends the wait of those here. Their own Attach reports the failure."""
        copies, building = self._copies(check_move_id(move)), self._building.get(move, ())
        _only_the_source((copies[0] if copies else self.gates.moving(move)).log, caller)
        fresh = [given_up for given_up in building if not given_up.is_set()]
        for given_up in fresh:
            given_up.set()
        if fresh:
            log.info("move %s: giving up building communicators: a member on another node has failed", move)
        return pb.GiveUpReply(building=bool(building))

    async def _attach_copy(
        self,
        copy: Moving,
        lines: list[str],
        limit_s: float,
        caller: str,
        given_up: threading.Event,
        reports: list[pb.ProcessGate],
    ) -> None:
        """Adds the reports of a copy that is to be resumed with its job, if no communicator is named."""
        _only_the_source(copy.log, caller)
        resumes = bool(copy.log.begin.coordinator)
        if resumes and not copy.log.record.nccl_processes:
            return
        async with copy.lock:
            self._may_wake(copy)
            try:
                processes = await held_copy.wake_shim(copy.log)
                await self._check_places(copy.log, processes)
                if lines:
                    await reach(Point.ATTACHING)
                    await _build(processes, lines, limit_s, given_up)
                elif resumes:
                    reports += (found := await in_thread(gate_processes.of_copy, copy.log, processes))
                    if any(comm.state in ncclctl.DOWN for one in found for comm in one.communicators):
                        return
                if resumes:
                    await in_thread(copy.log.mark, Mark.HELD, attached=True)
            except BaseException:
                await held_copy.still(copy.log)
                raise
            # It goes on until it is activated or dropped: what another member still waits for may not have been sent yet.

    async def _check_places(self, move_log: MoveLog, processes: Sequence[Process]) -> None:
        """Compares the bus ids that CUDA in the copy reports with NVML's. After a restore onto another GPU it may go on
        reporting the former one (cuda-checkpoint #48), by which NCCL would take it for another GPU, or find none."""
        mine = move_log.record.gpus_reserved
        if not mine:
            return
        inventory = await self.gates.node.gpus.inventory()
        places = {gpu.uuid: gpu.bus_id for gpu in inventory.gpus if gpu.bus_id}
        if not all(uuid in places for uuid in mine):
            log.warning("move %s: NVML does not say where the rank's GPUs are; that is not checked", move_log.move)
            return
        given = sorted({places[uuid] for uuid in mine})
        for process in processes:
            found = await in_thread(ncclctl.devices, process, DEVICES_S)
            for device, bus_id in found.items():
                if bus_id not in given:
                    raise NcclFailed(
                        f"process {process.pid} was restored onto the GPU at {', '.join(given)}, but CUDA in it still says"
                        f" that its device {device} is at {bus_id}: NCCL would take it for another GPU",
                        remedy=f"choose a target whose GPU at {bus_id} is free, or name that GPU with --gpu",
                        where=Where.SOURCE_FROZEN,
                    )

    async def _attach_here(
        self,
        moving: Moving,
        rank_uids: Collection[str],
        lines: list[str],
        limit_s: float,
        caller: str,
        given_up: threading.Event,
    ) -> None:
        _only_the_source(moving.log, caller)
        async with moving.lock:
            self._must_be_closed(moving)
            found = await in_thread(gate_processes.members, moving.log, rank_uids)
            await reach(Point.ATTACHING)
            async with _members_only(found):
                await _must_have({line.split()[0] for line in lines}, found)
                await _build([each.process for each in found], lines, limit_s, given_up)

    def _must_be_closed(self, moving: Moving) -> None:
        """Raises WrongState if the move has an outcome here. Raises RankGone once the gates have been opened for it: no
        communicator can be built with a process behind an open gate, and an undo must not try for ever."""
        if moving.log.last_mark is Mark.SETTLED:
            raise RankGone(f"the gates here were opened for move {moving.log.move} before", where=Where.UNKNOWN)
        self.gates.must_be_open(moving)

    def _copies_of(self, move: str, rank_uids: Collection[str]) -> list[Moving]:
        """The held copies of these ranks, for a move or for a job record."""
        return [copy for copy in self._copies(check_move_id(move)) if copy.log.begin.rank_uid in rank_uids]

    def _copies(self, move: str) -> list[Moving]:
        copy = self._held_copy(move)
        return [copy] if copy is not None else list(self._held_of_job(move))

    def _may_wake(self, copy: Moving) -> None:
        if self._held_copy(copy.log.move) is not copy:  # it was held before this call got the lock
            raise WrongState(f"the copy of move {copy.log.move} is not held here any more", where=Where.UNKNOWN)


@asynccontextmanager
async def _members_only(found: Sequence[GateProcess]) -> AsyncIterator[None]:
    """Raises RankGone instead of NcclFailed if one of them is no member any more, so that no undo tries for ever."""
    try:
        yield
    except NcclFailed as error:
        for each in found:
            if await in_thread(ncclctl.has_replaced_its_program, each.process):
                raise RankGone(
                    f"process {each.process.pid} of rank {each.rank} has replaced its program", where=Where.UNKNOWN
                ) from error
        raise


async def _must_have(comms: Collection[str], found: Sequence[GateProcess]) -> None:
    """Raises NcclFailed if a process has destroyed one of these communicators while it was down: all other members would wait
    for it in vain."""
    for each, report in zip(found, await all_at_once(lambda one: ncclctl.read(one.process), found), strict=True):
        if gone := sorted({comm.id for comm in report.ended} & set(comms)):
            raise NcclFailed(
                f"process {each.process.pid} of rank {each.rank} has destroyed communicator {gone[0]} while it was down",
                where=Where.UNKNOWN,
            )


async def _build(processes: Sequence[Process], lines: Sequence[str], limit_s: float, given_up: threading.Event) -> None:
    """Builds in all processes or in none: the first that fails makes the others give up."""
    if given_up.is_set():
        raise ncclctl.gave_up("this node")
    running = [all_at_once(lambda each: ncclctl.attach(each, lines, limit_s, given_up), [each]) for each in processes]
    await _all_or_none(running, given_up)


async def _all_or_none(work: Iterable[Awaitable[object]], given_up: threading.Event) -> None:
    failures: list[BaseException] = []  # in order

    async def watched(one: Awaitable[object]) -> None:
        try:
            await one
        except BaseException as error:
            failures.append(error)
            given_up.set()
            raise

    await asyncio.gather(*map(watched, work), return_exceptions=True)
    if failures:
        raise cause(failures)


def cause(failures: Iterable[BaseException]) -> BaseException:
    """The failure to report, of several in order: the first, because later ones may be its consequences. A member that has
    ended takes precedence over all others, because a retry cannot succeed."""
    found = list(failures)
    return next((error for error in found if isinstance(error, RankGone)), found[0])


def _limit_s(asked_s: float, older_s: float) -> float:
    """The limit that the source asks for; an older one asks for none."""
    return min(asked_s, LIMIT_MAX_S) if asked_s > 0 else older_s


def _new_id(processes: Sequence[Process], inner_pid: int) -> str:
    for process in processes:
        if process.alive() and tree.inner_pid(process.pid) == inner_pid:
            return ncclctl.new_id(process, NEW_ID_S)
    raise RankGone(f"the rank's process {inner_pid} is not on this node", where=Where.UNKNOWN)


def _only_the_source(move_log: MoveLog, caller: str) -> None:
    begin = move_log.begin
    if caller != (begin.coordinator_node if begin.coordinator else begin.source_node):
        raise Denied(f"{caller} is not the source of move {move_log.move}, nor the coordinator of its job")
