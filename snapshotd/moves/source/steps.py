"""The source's side of a move: freeze, dump and stream, then thaw or release as the outcome record says.

Invariant: from FREEZING on, the tree is stopped *and* its cgroup frozen until the outcome is in the journal. The record is
written first, then acted on; every act can be repeated. Whatever dies here, `settle` finds the truth in the journal and
goes on from it by `snapshotd/moves/rules.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import (
    Busy,
    GpuFailed,
    NcclFailed,
    NotFound,
    RankGone,
    SnapshotError,
    Timeout,
    Unreachable,
    Usage,
    Where,
    WrongState,
)
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves import rules
from snapshotd.moves.device import gpu, stripe_files
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.nccl import communicators
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.node import Moving, Node, now_unix_s, to_the_end, where_on_source
from snapshotd.moves.peers import connections
from snapshotd.moves.record import Begin, ClusterNode, OutcomeRecord
from snapshotd.moves.rules import CopyState, Mark, Outcome, SourceDecision, SourceFacts
from snapshotd.moves.source import freeze
from snapshotd.moves.source.departure import Leaving
from snapshotd.moves.source.dump import Dump
from snapshotd.net.address_plan import Places
from snapshotd.proc import host
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.logs import move_context

log = logging.getLogger(__name__)

#: After COMMIT the driver has this long to activate before the source does it alone.
DRIVER_FIRST_S = 3.0
ASK_AGAIN_S = 1.0
KEEPER_BACK_S = 5.0
#: Marks a restart cannot carry on from: what was going on went with the daemon.
_CUT_SHORT = {Mark.FREEZING, Mark.FROZEN}


class SourceOps:
    """One instance per daemon."""

    def __init__(self, node: Node, pending: Callable[[Iterable[int]], str], communicators: Communicators) -> None:
        self.node = node
        self.moves: dict[str, Moving] = {}
        self.communicators = communicators
        self.leaving = Leaving(node, communicators)
        self._pending = pending  # the move of another rank that has re-pointed sockets of these processes and goes on

    # ------------------------------------------------------------------ steps, each idempotent by (move, step)

    async def inspect(self, request: pb.InspectRequest) -> pb.InspectReply:
        """What the rank uses, and what speaks against moving it. Nothing is touched."""
        entry = self.node.ranks.here(request.rank_uid)
        await _keeper_back(entry)
        facts, checks = await self._facts(entry)
        places = self._places(request.nodes, request.target_node)
        rewires, more = await in_thread(connections.look, entry.group.pids(), places)
        checks += more
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
        return pb.InspectReply(facts=facts, checks=checks, rewires=rewires)

    def _places(self, nodes: Iterable[pb.NodeAddresses], target: str) -> Places:
        return Places({node.name: list(node.addresses) for node in nodes}, self.node.config.node, target)

    async def _facts(self, entry: RankEntry) -> tuple[pb.RankFacts, list[pb.Check]]:
        config, pids = self.node.config, entry.group.pids()
        look, more = await gpu.look(self.node.gpus, pids)
        nccl = await in_thread(preflight.read_nccl_reports, pids)
        facts, checks = await in_thread(
            preflight.inspect_rank,
            pids,
            entry.pid,
            rank=entry.to_proto(config.node),
            node=config.node,
            daemon_version=host.DAEMON_VERSION,
            criu_version=config.criu_version,
            carry_paths=config.carry_paths,
            keeper_pid=entry.keeper_pid if entry.link is not None else 0,
            keeper_is_guest=entry.role == "guest",
            gpu=look,
            nccl=nccl,
        )
        if offloaded_bytes := facts.gpu.offloaded_bytes:
            more.append(preflight.offload_room(offloaded_bytes, await in_thread(self.node.store.room_bytes)))
        return facts, [*checks, *more]

    @to_the_end
    async def begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Journals the move and starts the driver's lease. The rank runs on."""
        check_move_id(request.move)
        if self.node.journal.find(request.move) is not None:
            known = self._moving(request.move)
            self._still_open(known)
            known.renew()
            return pb.BeginReply()
        entry = self.node.ranks.here(request.rank_uid)
        if entry.moving:
            raise Busy(f"rank {entry.rank} is being moved already ({entry.moving})", where=Where.SOURCE_RUNNING)
        if len(request.nonce) < 16 or not 1 <= request.lease_s <= 3600:
            raise Usage("a move begins with the target's nonce and a lease of 1 to 3600 s")
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
            target_node=request.target_node,
            target_endpoint=request.target_endpoint,
            nonce=request.nonce.hex(),
            boot_id=host.boot_id(),
            begun_unix_s=now_unix_s(),
            lease_s=request.lease_s,
        )
        entry.moving = request.move
        self.leaving.begins(entry.uid)
        try:
            move_log = await in_thread(self.node.journal.begin, begin)
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
        moving = self._track(move_log)
        self.settle_all()
        moving.facts = (await self._facts(entry))[0]
        await reach(Point.BEGIN)
        return pb.BeginReply()

    @to_the_end
    async def prepare_device(self, move: str) -> pb.PrepareDeviceReply:
        """What device memory takes to leave is made while the whole job still runs: later it would wait for that, all of it
        where gates are closed. If it fails the rank runs on, and the driver aborts."""
        moving = self._moving(move)
        async with moving.lock:
            self._still_open(moving)
            if moving.log.last_mark is not Mark.BEGUN:
                raise WrongState(f"move {move} is {moving.log.last_mark}", where=where_on_source(moving.log))
            entry, parts = self._entry(moving), gpu.Parts()
            with move_context(move=move, rank=entry.rank, phase="prepare"):
                await freeze.make_ready(self.node, moving, entry, parts)
                await reach(Point.READY)
            moving.renew()
            return pb.PrepareDeviceReply(parts=parts.all)

    @to_the_end
    async def detach(self, move: str) -> pb.DetachReply:
        """Takes the rank's communicators down on all their members. If it fails some are down, and the driver aborts."""
        moving = self._moving(move)
        async with moving.lock:
            self._still_open(moving)
            if moving.log.last_mark is not Mark.BEGUN:
                raise WrongState(f"move {move} is {moving.log.last_mark}", where=where_on_source(moving.log))
            with move_context(move=move, rank=moving.log.begin.rank, phase="detach"):
                reply = await self.communicators.detach(moving)
            moving.renew()
            return reply

    @to_the_end
    async def attach(self, move: str) -> pb.AttachReply:
        """Builds them again with the target's held copy. If it fails they are down, and the driver aborts."""
        moving = self._moving(move)
        async with moving.lock:
            self._still_open(moving)
            if not communicators.down(moving):
                return pb.AttachReply()
            if moving.log.last_mark is not Mark.STREAMED:
                raise WrongState(f"move {move} is {moving.log.last_mark}", where=where_on_source(moving.log))
            with move_context(move=move, rank=moving.log.begin.rank, phase="reattach"):
                reply = await self.communicators.attach(moving, moving.log.begin.target_node)
                await in_thread(moving.log.mark, Mark.STREAMED, attached=True)
                await reach(Point.ATTACH)
            moving.renew()
            return reply

    @to_the_end
    async def freeze(self, move: str) -> pb.FreezeReply:
        """Stops the tree and freezes its cgroup. If it fails the tree is stopped or not, and the driver aborts."""
        moving = self._moving(move)
        async with moving.lock:
            self._still_open(moving)
            if moving.log.last_mark in {Mark.FROZEN, Mark.STREAMED}:
                return pb.FreezeReply(rewires=moving.log.record.rewires)
            entry = self._entry(moving)
            places = self._places(moving.nodes, moving.log.begin.target_node)
            with move_context(move=move, rank=entry.rank, phase="freeze"):
                return await freeze.freeze(self.node, moving, entry, places, self._pending)

    async def stream(self, move: str) -> AsyncIterator[pb.Progress]:
        """Dumps and streams; yields progress while it runs. The driver's going away is not a failure by itself: its
        lease decides."""
        moving = self._moving(move)
        async with moving.lock:  # an abort that is just being written must not find a dump that begins after it
            self._still_open(moving)
            if moving.log.last_mark is Mark.STREAMED:
                yield pb.Progress(done=True)
                return
            if moving.log.last_mark is not Mark.FROZEN:
                raise WrongState(
                    f"move {move} is {moving.log.last_mark}, not frozen", where=where_on_source(moving.log)
                )
            if moving.streaming is not None:
                raise Busy(f"move {move} is being streamed already", where=Where.SOURCE_FROZEN)
            dump = Dump(self.node, moving.log, self._entry(moving), moving.facts, moving.parking)
            moving.streaming = task = asyncio.create_task(dump.run(), name=f"stream {move}")
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            moving.renew()
            yield dump.progress()
        try:
            await task
        except asyncio.CancelledError:
            raise WrongState(
                f"move {move} was aborted while it was streamed", where=where_on_source(moving.log)
            ) from None
        yield dump.progress()

    async def renew(self, move: str) -> pb.RenewReply:
        moving = self._moving(move)
        moving.renew()
        return pb.RenewReply(lease_left_s=moving.log.begin.lease_s)

    @to_the_end
    async def commit(self, move: str, receipt: bytes) -> pb.Outcome:
        """The point of no return: writes COMMIT, if the target has shown that it holds a whole copy."""
        moving = self._moving(move)
        async with moving.lock:
            if moving.log.outcome is None:
                if not rules.proves(receipt, moving.log.nonce, "HELD", move):
                    raise WrongState("the target's receipt for a held copy is missing", where=Where.SOURCE_FROZEN)
                if moving.log.last_mark is not Mark.STREAMED:
                    raise WrongState(f"move {move} is {moving.log.last_mark}", where=where_on_source(moving.log))
                communicators.must_be_attached(moving)
                await reach(Point.BEFORE_COMMIT)
                if moving.lease_expired:
                    await self._settle_once(moving)
                else:
                    await self._record(moving, Outcome.COMMIT, "the target holds the rank", "driver")
                await reach(Point.COMMIT)
            moving.kick.set()
            return self._outcome(moving)

    @to_the_end
    async def abort(self, move: str, reason: str, by: str) -> pb.Outcome:
        """Ends a move that has no outcome, and undoes it. Answers with the outcome that stands.

        The driver's word counts as the end of its lease, no more: where the copy here is gone and the target holds a whole
        one, the rules commit instead, and where the target must be asked first the answer is UNDECIDED.
        """
        if self.node.journal.find(check_move_id(move)) is None:
            await in_thread(self._refuse_for_ever, move, reason)
        moving = self._moving(move)
        async with moving.lock:
            await self._stop_streaming(moving)
            if moving.log.outcome is None:
                await reach(Point.BEFORE_ABORT)
                if self._copy_exists(moving.log):
                    await self._record(moving, Outcome.ABORT, reason, by)
                    await reach(Point.ABORT)
                moving.lease_ends_s = 0.0
            try:
                await self._settle_once(moving)
            except (GpuFailed, NcclFailed, Timeout, Unreachable) as error:
                # ABORT stands, and the settling task goes on trying to give the rank back what is missing: its device
                # memory, its communicators.
                moving.waiting_for = error.message
            return self._outcome(moving)

    def _refuse_for_ever(self, move: str, reason: str) -> None:
        """Abort of a move that never began here: journalled, so that a Begin that was only delayed is refused."""
        config = self.node.config
        here = (config.node, config.advertise)
        unknown = Begin(move, "source", "", "", 0, *here, "", "", "00" * 32, host.boot_id(), now_unix_s())
        move_log = self.node.journal.begin(unknown)
        move_log.decide(Outcome.ABORT, reason, "source")
        move_log.mark(Mark.SETTLED)

    async def abandon(self, move: str, reason: str) -> None:
        """The rank's home keeper was killed: ABORT whatever copies there are, since nobody may go on running it."""
        moving = self._moving(move)
        async with moving.lock:
            await self._stop_streaming(moving)
            await self._record(moving, Outcome.ABORT, reason, "source")
            await self._settle_once(moving)

    @to_the_end
    async def release(self, move: str, pause_s: float) -> pb.ReleaseReply:
        """Drops the frozen copy, once the target says the rank runs there."""
        moving = self._moving(move)
        moving.pause_s = pause_s
        async with moving.lock:
            await self._settle_once(moving)
            if moving.log.last_mark is Mark.SETTLED and pause_s and not moving.log.record.pause_s:
                await in_thread(
                    moving.log.mark, Mark.SETTLED, pause_s=pause_s
                )  # settled before the driver could say so
        settled = moving.log.last_mark is Mark.SETTLED
        sent_bytes = moving.log.record.sent_bytes
        return pb.ReleaseReply(released=settled, waiting_for=moving.waiting_for, bytes=sent_bytes)

    async def outcome(self, move: str) -> pb.Outcome:
        move_log = self.node.journal.get(move)
        if move_log.begin.role != "source":
            raise NotFound(f"this node is not the source of move {move}")
        return self._outcome(self._moving(move))

    @to_the_end
    async def declare_target_dead(self, move: str, by: str) -> pb.Outcome:
        """A person's word that the target is dead: the frozen copy goes on, or the keeper hears that there is none."""
        moving = self._moving(move)
        state = await self._ask_target(moving.log)
        if state in {CopyState.RECEIVING, CopyState.HELD, CopyState.RUNNING, CopyState.ENDED}:
            raise WrongState(f"the target answers that its copy is {state}: it is not dead", where=Where.UNKNOWN)
        async with moving.lock:
            await self._stop_streaming(moving)
            if moving.log.last_mark is not Mark.SETTLED:
                await in_thread(moving.log.overrule, Outcome.ABORT, "declared by a person or a fencing agent", by)
                await self.leaving.thaw(moving)
            return self._outcome(moving)

    # ------------------------------------------------------------------ settling: what a crash or silence left behind

    def adopt_journal(self) -> None:
        """At start: takes up every unsettled move of an earlier life. Settling begins with `settle_all`."""
        stripe_files.sweep_ended(self.node.config.image_dir, self.node.journal)
        for move_log in self.node.journal.all():
            if move_log.begin.role == "source" and move_log.last_mark is not Mark.SETTLED:
                if move_log.record.mark is None:  # a crash inside `_refuse_for_ever`, or before anything was done
                    move_log.decide(Outcome.ABORT, "it never began here", "source")
                    move_log.mark(Mark.SETTLED)
                    continue
                moving = self._track(move_log)
                moving.adopted = True
                moving.interrupted = move_log.last_mark in _CUT_SHORT
                log.info("taking up move %s of an earlier life: %s", move_log.move, move_log.last_mark)

    def _track(self, move_log: MoveLog) -> Moving:
        moving = _recalled(move_log)
        moving.renew()
        self.moves[move_log.move] = moving
        return moving

    def settle_all(self) -> None:
        """Starts following every move that is not followed yet."""
        for moving in self.moves.values():
            if moving.settling is None and moving.log.last_mark is not Mark.SETTLED:
                moving.settling = asyncio.create_task(self._settle(moving), name=f"settle {moving.log.move}")

    async def _settle(self, moving: Moving) -> None:
        """Follows one move until it is settled. Acts only where nobody else will."""
        with move_context(move=moving.log.move, rank=moving.log.begin.rank, phase="settle"):
            said, waited = "", moving.adopted
            while moving.log.last_mark is not Mark.SETTLED:
                if moving.log.committed and not waited:
                    waited = True
                    await asyncio.sleep(DRIVER_FIRST_S)  # not a nap: COMMIT itself would end that at once
                else:
                    await moving.nap(ASK_AGAIN_S)
                try:
                    async with moving.lock:
                        await self._settle_once(moving)
                except SnapshotError as error:
                    moving.waiting_for = error.message
                except Exception:
                    log.exception("settling %s", moving.log.move)
                if moving.waiting_for != said:
                    said = moving.waiting_for
                    log.info("move %s: %s", moving.log.move, said)

    async def _settle_once(self, moving: Moving) -> None:
        """One decision of the rules, carried out. The caller holds the move's lock."""
        move_log = moving.log
        for _ in range(4):  # a decision can make the next one possible; more than this is the next round's
            facts = await self._gather(moving)
            decision, reason = rules.source_next(facts)
            moving.waiting_for = reason
            match decision:
                case SourceDecision.RECORD_ABORT:
                    await self._stop_streaming(moving)
                    await self._record(moving, Outcome.ABORT, moving.waiting_for, "source")
                case SourceDecision.RECORD_COMMIT:
                    if facts.target is CopyState.HELD:
                        await self._attach_late(moving)
                    await self._record(moving, Outcome.COMMIT, reason, "source")
                case SourceDecision.THAW:
                    await self.leaving.thaw(moving)
                case SourceDecision.HAND_TOKEN:
                    token = rules.proof(move_log.nonce, "COMMIT", move_log.move)
                    async with self._target(move_log) as client:
                        await client.target.Activate(pb.TokenRequest(move=move_log.move, token=token), timeout_s=30)
                case SourceDecision.RELEASE:
                    await self.leaving.release(moving)
                case SourceDecision.TAKE_BACK:
                    await in_thread(move_log.overrule, Outcome.ABORT, moving.waiting_for, "target")
                case SourceDecision.CLOSE:
                    if move_log.last_mark is not Mark.SETTLED:
                        await self.leaving.thaw(moving)
                    return
                case _:
                    return

    async def _attach_late(self, moving: Moving) -> None:
        """The copy here was lost before the driver had the communicators built again, and it comes to COMMIT all the same:
        they are built before it is recorded, if they can be, since the target may let the rank go as soon as it is."""
        if communicators.down(moving):
            try:
                await self.communicators.attach(moving, moving.log.begin.target_node)
            except SnapshotError as error:
                log.error("the rank goes on without its communicators: %s", error.message)
            await in_thread(moving.log.mark, Mark.STREAMED, attached=True)

    async def _gather(self, moving: Moving) -> SourceFacts:
        move_log = moving.log
        outcome = move_log.outcome
        facts = SourceFacts(
            mark=move_log.last_mark,
            outcome=outcome.outcome if outcome else None,
            copy_exists=self._copy_exists(move_log),
            lease_expired=moving.lease_expired,
            interrupted=moving.interrupted,
        )
        if rules.source_next(facts)[0] in {SourceDecision.ASK_TARGET, SourceDecision.RECORD_ABORT} or (
            outcome is not None and outcome.outcome is Outcome.COMMIT
        ):
            if facts.outcome is None and facts.copy_exists:
                return facts
            return SourceFacts(**{**facts.__dict__, "target": await self._ask_target(move_log)})
        return facts

    async def _ask_target(self, move_log: MoveLog) -> CopyState:
        try:
            async with self._target(move_log) as client:
                copy = await client.target.GetCopy(pb.MoveRequest(move=move_log.move), timeout_s=5)
            return CopyState[pb.Copy.State.Name(copy.state)]
        except SnapshotError:
            return CopyState.UNREACHABLE

    def _target(self, move_log: MoveLog) -> contextlib.AbstractAsyncContextManager[DaemonClient]:
        return self.node.client(move_log.begin.target_node, move_log.begin.target_endpoint)

    # ------------------------------------------------------------------ acts

    async def _record(self, moving: Moving, outcome: Outcome, reason: str, by: str) -> OutcomeRecord:
        record = await in_thread(moving.log.decide, outcome, reason, by)
        moving.kick.set()
        return record

    async def _stop_streaming(self, moving: Moving) -> None:
        if moving.streaming is not None and not moving.streaming.done():
            moving.streaming.cancel()
            await asyncio.gather(moving.streaming, return_exceptions=True)

    # ------------------------------------------------------------------ small questions

    def _moving(self, move: str) -> Moving:
        """The move, also one that ended in an earlier life of this daemon: the journal answers for it."""
        found = self.moves.get(check_move_id(move))
        if found is None:
            move_log = self.node.journal.find(move)
            if move_log is None or move_log.begin.role != "source":
                raise NotFound(f"this node is not the source of move {move}")
            found = self.moves[move] = _recalled(move_log)
        return found

    def _still_open(self, moving: Moving) -> None:
        outcome = moving.log.outcome
        if outcome is not None:
            raise WrongState(
                f"move {moving.log.move} has ended: {outcome.outcome} ({outcome.reason})",
                where=where_on_source(moving.log),
            )
        if moving.interrupted:
            raise WrongState(f"move {moving.log.move} was cut short by a restart", where=where_on_source(moving.log))

    def _entry(self, moving: Moving) -> RankEntry:
        entry = self.node.ranks.get(moving.log.begin.rank_uid, moving.log.record.keeper_role or "home")
        if entry is None:
            raise RankGone(f"rank {moving.log.begin.rank} has ended", where=Where.UNKNOWN)
        return entry

    def _copy_exists(self, move_log: MoveLog) -> bool:
        if move_log.begin.boot_id != host.boot_id():
            return False
        return move_log.record.root.alive()

    def _outcome(self, moving: Moving) -> pb.Outcome:
        move_log, record = moving.log, moving.log.outcome
        where, reason = where_on_source(move_log), record.reason if record is not None else ""
        if record is not None and record.outcome is Outcome.ABORT and move_log.record.pid:
            reason = "; ".join(filter(None, (reason, moving.failure)))
            if not self._copy_exists(move_log):
                where = Where.ENDED
            elif move_log.last_mark is not Mark.SETTLED:
                where, reason = Where.SOURCE_FROZEN, f"{reason}; not thawed yet: {moving.waiting_for}"
        if record is None:
            return pb.Outcome(kind=pb.UNDECIDED, where=where.value)
        return pb.Outcome(
            kind=pb.OutcomeKind.Value(record.outcome.value),
            reason=reason,
            decided_by=record.decided_by,
            token=rules.proof(move_log.nonce, record.outcome.value, move_log.move),
            where=where.value,
            settled=move_log.last_mark is Mark.SETTLED,
        )


def _recalled(move_log: MoveLog) -> Moving:
    """A move, with the nodes that the driver named when it began."""
    return Moving(move_log, nodes=[node.to_proto() for node in move_log.record.nodes])


async def _keeper_back(entry: RankEntry) -> None:
    """After a restart of this daemon the keepers take a moment to reconnect: the first question waits for them."""
    deadline_s = host.boottime_s() + KEEPER_BACK_S
    while entry.link is None and entry.keeper_alive() and host.boottime_s() < deadline_s:  # noqa: ASYNC110 - bounded, rare
        await asyncio.sleep(0.05)
