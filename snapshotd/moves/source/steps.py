"""Carries out the source's steps of a move: freeze, dump and stream, then the outcome record.

Invariant: from FREEZING on, the tree is stopped *and* its cgroup frozen until the outcome is in the journal. The outcome is
recorded first, then acted on (snapshotd/moves/source/settling.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    Busy,
    Full,
    GpuFailed,
    NcclFailed,
    NotFound,
    RankGone,
    Refused,
    Timeout,
    Unreachable,
    Usage,
    Where,
    WrongState,
)
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import rules
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.journal import check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import communicators
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import ClusterNode
from snapshotd.moves.rules import CopyState, Mark, Outcome
from snapshotd.moves.source import closed_files, freeze, inspection, precopy, suspended
from snapshotd.moves.source.dump import Dump
from snapshotd.moves.source.settling import SourceSettling
from snapshotd.moves.steps import late, must_be_at, step
from snapshotd.moves.where import where_of
from snapshotd.net.places import Places
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span


class SourceSteps(SourceSettling):
    """One instance per daemon."""

    def __init__(self, node: Node, pending: Callable[[Iterable[int]], str], communicators: Communicators) -> None:
        super().__init__(node, communicators)
        self._pending = pending  # the unfinished move of another rank that has re-pointed sockets of these processes
        self._inspected = inspection.Remembered()

    async def inspect(self, request: pb.InspectRequest) -> pb.InspectReply:
        """What the rank uses, and the checks of preflight. Changes nothing."""
        understood = protocol.check(
            "migrator", request.protocol, f"snapshotd {host.DAEMON_VERSION} on {self.node.config.node}", protocol.own()
        )
        if understood.verdict == pb.Check.REFUSE:
            return pb.InspectReply(checks=[understood])
        entry = self.node.ranks.here(request.rank_uid)
        await inspection.keeper_back(entry)
        looked = await inspection.look(self.node, entry, moves=not request.suspend)
        checks = list(looked.checks)
        places = self._places(request.nodes, request.target_node)
        with span("find connections"):
            rewires, more = await in_thread(connections.look, entry.group.pids(), places)
        checks += more
        if not request.suspend:
            checks += suspended.coordinator_checks(entry, self.node.config.node)
        other = self._pending(entry.group.pids())
        if entry.moving or other:
            whose = f"move {entry.moving} of this rank" if entry.moving else f"move {other} of a rank it talks to"
            checks.append(
                pb.Check(
                    name="not-moving",
                    verdict=pb.Check.REFUSE,
                    reason=f"{whose} is not finished",
                    remedy=Busy.remedy,
                )
            )
        look = self._inspected.put(looked, checks)
        return pb.InspectReply(facts=looked.facts, checks=checks, rewires=rewires, look=look, signs_images=True)

    def _places(self, nodes: Iterable[pb.NodeAddresses], target: str) -> Places:
        return Places.of(nodes, self.node.config.node, target)

    @step
    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Journals the move and starts the driver's lease. The rank keeps running."""
        check_move_id(request.move)
        if self.journal.find(request.move) is not None:
            known = self.moving(request.move)
            self.must_be_open(known)
            known.renew()
            return pb.BeginReply()
        entry = self.node.ranks.here(request.rank_uid)
        if entry.moving:
            raise Busy(f"rank {entry.rank} is being moved already ({entry.moving})", where=Where.SOURCE_RUNNING)
        suspends = request.HasField("coordinator")
        if (len(request.nonce) < 16 and not suspends) or not 1 <= request.lease_s <= 3600:
            raise Usage("a move begins with the target's nonce and a lease of 1 to 3600 s")
        if suspends:
            suspended.must_fit(entry, request)
        await reach(Point.BEFORE_BEGIN)
        config = self.node.config
        begin = Begin(
            move=request.move,
            role="source",
            rank_uid=entry.uid,
            job=entry.job,
            rank=entry.rank,
            source_node=config.node,
            source_endpoint=config.advertise,
            target_node=config.node if suspends else request.target_node,
            target_endpoint=config.advertise if suspends else request.target_endpoint,
            nonce=request.nonce.hex(),
            boot_id=host.boot_id(),
            begun_unix_s=time.time(),
            lease_s=request.lease_s,
            user_id=entry.user_id,
            coordinator=request.coordinator.record,
            coordinator_node=request.coordinator.node,
            coordinator_endpoint=request.coordinator.endpoint,
            kind="snapshot" if suspends and request.snapshot else "",
        )
        entry.moving = request.move
        self.departure.begins(entry.uid)
        try:
            move_log = await in_thread(self.journal.begin, begin)
        except BaseException:
            entry.moving = ""
            raise
        await in_thread(
            move_log.mark,
            Mark.BEGUN,
            pid=entry.pid,
            start_ticks=entry.start_ticks,
            cgroup=entry.cgroup,
            keeper_role=entry.role,
            nodes=[ClusterNode.of(node) for node in request.nodes],
        )
        moving = self.track(move_log)
        self.settle_all()
        looked = self._inspected.take(request.look, entry)
        looked = looked or await inspection.look_late(self.node, entry, moves=not suspends)
        moving.facts, moving.scope = looked.facts, looked.scope
        if suspends:
            await suspended.make_room(self.node, moving, entry)
        await reach(Point.BEGIN)
        return pb.BeginReply()

    @step
    async def prepare_device(self, move: str, precopy_percent: float = 0.0) -> pb.PrepareDeviceReply:
        """Prepares the transfer of device memory, and sends files and host memory, while the whole job still runs. Later the
        job would have to wait for it, all its ranks if gates are closed. If it fails the rank keeps running, and the driver
        aborts."""
        async with self.working_on(move, "prepare", at={Mark.BEGUN}) as moving:
            parts = Parts()
            if moving.ahead is None:
                with span("send closed files"):
                    moving.ahead = await closed_files.send_ahead(self.node, moving, self._entry(moving))
                await reach(Point.SENT_AHEAD)
            await freeze.make_ready(self.node, moving, self._entry(moving), parts)
            await reach(Point.READY)
            if moving.precopy is None:  # last, so that little is written between it and the freeze
                moving.precopy = await precopy.run(
                    *(self.node, moving.log, self._entry(moving), precopy_percent, moving.facts.memory_bytes),
                    stopped=lambda: moving.undoing or moving.lease_expired,
                )
            moving.renew()
            sent = moving.precopy
            return pb.PrepareDeviceReply(parts=parts.all, warnings=sent.warnings, precopied_bytes=sent.sent_bytes)

    @step
    async def detach(self, move: str) -> pb.DetachReply:
        """Takes the rank's communicators down on all their members. If it fails some are down, and the driver aborts."""
        async with self.working_on(move, "detach", at={Mark.BEGUN}) as moving:
            reply = await self.communicators.detach(moving)
            moving.renew()
            return reply

    @step
    async def attach(self, move: str) -> pb.AttachReply:
        """Builds them again with the target's held copy. If it fails they are down, and the driver aborts."""
        async with self.working_on(move, "reattach") as moving:
            if not communicators.down(moving):
                return pb.AttachReply()
            must_be_at(moving, {Mark.STREAMED})
            reply = await self.communicators.attach(moving, moving.log.begin.target_node)
            await in_thread(moving.log.mark, Mark.STREAMED, attached=True)
            await reach(Point.ATTACH)
            moving.renew()
            return reply

    @step
    async def freeze(self, move: str) -> pb.FreezeReply:
        """Stops the tree and freezes its cgroup. If it fails the tree is stopped or not, and the driver aborts."""
        async with self.working_on(move, "freeze") as moving:
            if moving.log.last_mark in {Mark.FROZEN, Mark.STREAMED}:
                return pb.FreezeReply(rewires=moving.log.record.rewires)
            places = self._places(moving.nodes, moving.log.begin.target_node)
            return await freeze.freeze(self.node, moving, self._entry(moving), places, self._pending)

    async def stream(self, move: str) -> AsyncIterator[pb.Progress]:
        """Dumps and streams; yields progress while it runs. A driver that disconnects is not a failure by itself: the move
        continues until its lease expires."""
        async with self.working_on(move, "stream") as moving:  # an abort in progress must not be followed by a dump
            if moving.log.last_mark is Mark.STREAMED:
                yield pb.Progress(done=True)
                return
            must_be_at(moving, {Mark.FROZEN}, ", not frozen")
            if moving.streaming is not None:
                raise Busy(f"move {move} is being streamed already", where=Where.SOURCE_FROZEN)
            ahead = (moving.offload, moving.ahead, moving.precopied, moving.twins)
            dump = Dump(self.node, moving.log, self._entry(moving), moving.facts, *ahead)
            moving.streaming = task = asyncio.create_task(dump.run(), name=f"stream {move}")
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            moving.renew()
            yield dump.progress()
        try:
            await task
        except asyncio.CancelledError:
            if moving.short_of_memory:
                raise Full(f"{moving.short_of_memory}; the move is undone", where=where_of(moving.log)) from None
            raise WrongState(f"move {move} was aborted while it was streamed", where=where_of(moving.log)) from None
        except Refused as error:
            raise late(error) from error
        if moving.log.begin.kind == "snapshot":  # the rank goes on now
            async with self.ending(moving, "settle"):
                await self.settle_once(moving)
        yield dump.progress(last=True)

    async def renew(self, move: str) -> pb.RenewReply:
        moving = self.moving(move)
        moving.renew()
        return pb.RenewReply(lease_left_s=moving.log.begin.lease_s)

    @step
    async def commit(self, move: str, receipt: bytes) -> pb.Outcome:
        """The point of no return: records COMMIT, if the target has proved that it holds a complete copy."""
        moving = self.moving(move)
        async with self.ending(moving, "commit"):
            if moving.log.outcome is None:
                suspended.must_not_be(moving.log, "its coordinator commits")
                if not rules.proves(receipt, moving.log.nonce, "HELD", move):
                    raise WrongState("the target's receipt for a held copy is missing", where=Where.SOURCE_FROZEN)
                must_be_at(moving, {Mark.STREAMED})
                communicators.must_be_attached(moving)
                await reach(Point.BEFORE_COMMIT)
                if moving.lease_expired:
                    await self.settle_once(moving)
                else:
                    await self.record(moving, Outcome.COMMIT, "the target holds the rank", "driver")
                await reach(Point.COMMIT)
            moving.wake()
            return self.outcome_of(moving)

    @step
    async def abort(self, move: str, reason: str, by: str) -> pb.Outcome:
        """Ends a move that has no outcome, and undoes it. Returns the outcome that stands.

        The driver's request only ends its lease. If the copy here is gone and the target holds a complete one, or if the
        target runs its copy because this node was declared dead, the rules commit instead. If the target must be asked first
        and does not answer, the answer is UNDECIDED.
        """
        if self.journal.find(check_move_id(move)) is None:
            await in_thread(self._refuse_permanently, move, reason)
        moving = self.moving(move)
        moving.undoing = True  # a step that sends memory ends early
        async with self.ending(moving, "abort"):
            await self.stop_streaming(moving)
            if moving.log.outcome is None:
                await reach(Point.BEFORE_ABORT)
                if suspended.decides_alone(moving.log) and moving.log.copy_exists() and not moving.restarted:
                    await self.record(moving, Outcome.ABORT, reason, by)
                    await reach(Point.ABORT)
                moving.lease_given_up = True
            try:
                await self.settle_once(moving)
            except (GpuFailed, NcclFailed, Timeout, Unreachable) as error:
                # ABORT stands, and the settle loop keeps trying to restore what the rank lacks: its device memory, its
                # communicators.
                moving.waiting_for = error.message
            return self.outcome_of(moving)

    def _refuse_permanently(self, move: str, reason: str) -> None:
        """Journals the abort of a move that never began here, so that a Begin that was only delayed is refused."""
        config = self.node.config
        here = (config.node, config.advertise)
        unknown = Begin(move, "source", "", "", 0, *here, "", "", "00" * 32, host.boot_id(), time.time())
        move_log = self.journal.begin(unknown)
        move_log.decide(Outcome.ABORT, reason, "source")
        move_log.mark(Mark.SETTLED)
        move_log.fold()

    async def abandon(self, move: str, reason: str) -> None:
        """The rank's home keeper was killed: records ABORT whatever copies there are, because no copy may run without it."""
        moving = self.moving(move)
        async with self.ending(moving, "abort"):
            await self.stop_streaming(moving)
            if suspended.decides_alone(moving.log):
                await self.record(moving, Outcome.ABORT, reason, "source")
            await self.settle_once(moving)

    @step
    async def release(self, move: str, pause_s: float, timing: pb.Timing) -> pb.ReleaseReply:
        """Drops the frozen copy, once the target reports the rank running."""
        moving = self.moving(move)
        moving.pause_s, moving.timing = pause_s, timing
        async with self.ending(moving, "settle"):
            await self.settle_once(moving)
            settled = moving.log.last_mark is Mark.SETTLED
            if settled and pause_s and not moving.log.known.pause_s:  # settled before the driver knew the pause
                predicted_s = timing.predicted_s
                await in_thread(moving.log.mark, Mark.SETTLED, pause_s=pause_s, predicted_s=predicted_s, timing=timing)
        sent_bytes = moving.log.known.sent_bytes
        return pb.ReleaseReply(released=settled, waiting_for=moving.waiting_for, bytes=sent_bytes)

    async def outcome(self, move: str) -> pb.Outcome:
        if self.journal.get(move).begin.role != "source":
            raise NotFound(self.not_here.format(move=move))
        return self.outcome_of(self.moving(move))

    @step
    async def declare_target_dead(self, move: str, by: str) -> pb.Outcome:
        """An operator declares that the target is dead: the frozen copy continues, or its keeper learns that it is gone."""
        moving = self.moving(move)
        suspended.must_not_be(moving.log, "it has no target")
        state = await self.ask_target(moving.log)
        if state in {CopyState.RECEIVING, CopyState.HELD, CopyState.RUNNING, CopyState.ENDED}:
            raise WrongState(f"the target answers that its copy is {state}: it is not dead", where=Where.UNKNOWN)
        async with self.ending(moving, "recover"):
            await self.stop_streaming(moving)
            if moving.log.last_mark is not Mark.SETTLED:
                await in_thread(moving.log.overrule, Outcome.ABORT, "declared by a person or a fencing agent", by)
                await self.departure.thaw(moving)
            return self.outcome_of(moving)

    @step
    async def declare_member_dead(self, move: str, node: str, by: str, *, only_check: bool = False) -> pb.Outcome:
        """An operator declares that a node with other members of the rank's communicators is dead. They are not built again:
        the gates open, and the job gets NCCL's errors. With `only_check` nothing is changed, and what would be refused is."""
        moving = self.moving(move)
        if moving.log.last_mark is Mark.SETTLED:
            return self.outcome_of(moving)
        _must_wait_for_members(moving, node)
        await self.communicators.must_be_dead(moving, node)
        if only_check:
            return self.outcome_of(moving)
        moving.given_up = f"{by} declared {node} dead"  # ends an attempt that has the lock after its next failure
        async with self.ending(moving, "recover"):
            if not moving.log.ended_unix_s:  # that attempt may have carried it out
                try:
                    _must_wait_for_members(moving, node)  # it may have been decided meanwhile
                except WrongState:
                    moving.given_up = ""
                    raise
                await self.communicators.give_up_building(moving, moving.given_up)
                await self.settle_once(moving)
            return self.outcome_of(moving)

    def must_be_open(self, moving: Moving) -> None:
        super().must_be_open(moving)
        if moving.interrupted:
            raise WrongState(f"move {moving.log.move} was interrupted by a restart", where=where_of(moving.log))

    def _entry(self, moving: Moving) -> RankEntry:
        entry = self.node.ranks.get(moving.log.begin.rank_uid, moving.log.record.keeper_role or "home")
        if entry is None:
            raise RankGone(f"rank {moving.log.begin.rank} has ended", where=Where.UNKNOWN)
        return entry


def _must_wait_for_members(moving: Moving, node: str) -> None:
    """Raises WrongState unless the communicators are about to be built for an undo, or for a copy on the target that is the
    only one left. Before ABORT is recorded the move may still end with COMMIT, with all members attached."""
    move_log = moving.log
    if move_log.outcome is not None:
        undone = not move_log.committed
        state = "committed"
    else:
        undone = moving.lease_expired and not move_log.copy_exists() and communicators.down(moving)
        state = "not being undone"
    if not undone:
        raise WrongState(
            f"move {move_log.move} is {state}: it is not known to wait for {node}",
            remedy=f"`migrator recover {move_log.move}` finishes or undoes it; then retry if it waits for {node}",
            where=where_of(move_log),
        )
