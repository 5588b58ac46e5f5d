"""Settles a move on its source, with or without a driver, by carrying out the decisions of the rules.

Invariant: the outcome is recorded first, then acted on, and every operation can be repeated. After a crash the journal is
authoritative, and settling continues from it by snapshotd/moves/rules.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import NotFound, RankGone, SnapshotError, Where
from snapshotd.moves import job_rules, rules
from snapshotd.moves.device import hold, stripe_files
from snapshotd.moves.job_rules import Answer, Part, StoreDecision, StoreFacts
from snapshotd.moves.jobs import asking, stored
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import communicators
from snapshotd.moves.nccl.communicators import Communicators
from snapshotd.moves.node import Node
from snapshotd.moves.record import OutcomeRecord
from snapshotd.moves.rules import CopyState, Mark, Outcome, SourceDecision, SourceFacts
from snapshotd.moves.source import suspended, twins
from snapshotd.moves.source.departure import Departure
from snapshotd.moves.steps import Steps, settle_loop
from snapshotd.moves.where import where_of
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

#: After COMMIT the driver has this long to activate before the source does it alone.
DRIVER_FIRST_S = 3.0
ASK_AGAIN_S = 1.0
#: Marks from which a restarted daemon cannot continue: the work in progress was lost with the daemon.
_INTERRUPTED = {Mark.FREEZING, Mark.FROZEN}


class SourceSettling(Steps):
    """The part of `SourceSteps` that needs no driver."""

    role = "source"
    not_here = "this node is not the source of move {move}"

    def __init__(self, node: Node, communicators: Communicators) -> None:
        super().__init__(node.journal)
        self.node = node
        self.communicators = communicators
        self.departure = Departure(node, communicators)

    def recall(self, move_log: MoveLog) -> Moving:
        """A move, with the nodes that the driver named when it began, if it has not ended."""
        nodes = [] if move_log.ended_unix_s else move_log.record.nodes
        return Moving(move_log, nodes=[node.to_proto() for node in nodes], failure=move_log.known.failure)

    def track(self, move_log: MoveLog) -> Moving:
        moving = self.moves[move_log.move] = self.recall(move_log)
        moving.renew()
        return moving

    def adopt_journal(self) -> None:
        """At start: takes up every unsettled move from before the restart. Settling begins with `settle_all`."""
        stripe_files.sweep_ended(self.node.config.image_dir, self.journal)
        try:
            hold.sweep_ended(self.node.holder, self.journal)
        except SnapshotError as error:  # the daemon must serve its ranks
            log.error("device memory from before the restart is neither released nor duplicated: %s", error.message)
        for move_log in self.journal.all():
            if move_log.begin.role == "source" and move_log.last_mark is not Mark.SETTLED:
                twins.end_left(move_log)
                if move_log.known.mark is None:  # a crash before anything was done
                    move_log.decide(Outcome.ABORT, "it never began here", "source")
                    move_log.mark(Mark.SETTLED)
                    move_log.fold()
                    continue
                moving = self.track(move_log)
                moving.adopted = True
                moving.interrupted = move_log.last_mark in _INTERRUPTED
                moving.restarted = move_log.last_mark is Mark.STREAMED
                log.info("taking up move %s from before the restart: %s", move_log.move, move_log.last_mark)

    def settle_all(self) -> None:
        """Starts the settle loop of every move that has none yet."""
        for moving in self.moves.values():
            if moving.settling is None and moving.log.last_mark is not Mark.SETTLED:
                self.follow(moving, self._settle(moving))

    async def _settle(self, moving: Moving) -> None:
        """Settles one move. Acts only where the driver will not."""
        waited = moving.adopted

        async def wait(seconds: float) -> None:
            nonlocal waited
            if moving.log.committed and not waited:
                waited = True
                await asyncio.sleep(DRIVER_FIRST_S)  # not `moving.wait`, which COMMIT itself would end at once
            else:
                await moving.wait(seconds)

        await settle_loop(moving, self.settle_once, ASK_AGAIN_S, ASK_AGAIN_S, "source", wait=wait)

    async def settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules. The caller holds the move's lock."""
        move_log = moving.log
        if move_log.begin.coordinator:
            await self._settle_suspended(moving)
            return
        for _ in range(4):  # a decision can make the next one possible; more than this is left to the next round
            facts = await self._gather(moving)
            decision, reason = rules.source_next(facts)
            moving.waiting_for = reason
            match decision:
                case SourceDecision.RECORD_ABORT:
                    await self.stop_streaming(moving)
                    await self.record(moving, Outcome.ABORT, reason, "source")
                case SourceDecision.RECORD_COMMIT:
                    if facts.target is CopyState.HELD:
                        await self._attach_late(moving)
                    await self.record(moving, Outcome.COMMIT, reason, "source")
                case SourceDecision.THAW:
                    await self.departure.thaw(moving)
                case SourceDecision.HAND_TOKEN:
                    token = rules.proof(move_log.nonce, "COMMIT", move_log.move)
                    async with self._target(move_log) as client:
                        request = pb.TokenRequest(move=move_log.move, token=token, abandoned=move_log.record.abandoned)
                        await client.target.Activate(request, timeout_s=30)
                case SourceDecision.RELEASE:
                    await self.departure.release(moving)
                case SourceDecision.TAKE_BACK:
                    await in_thread(move_log.overrule, Outcome.ABORT, reason, "target")
                case SourceDecision.CLOSE:
                    if move_log.last_mark is not Mark.SETTLED:
                        await self.departure.thaw(moving)
                    return
                case _:
                    return

    async def _settle_suspended(self, moving: Moving) -> None:
        """The same for a rank that is suspended with its job: the coordinator's record decides."""
        move_log = moving.log
        for _ in range(3):
            said, why = Answer.UNDECIDED, ""
            waits = move_log.begin.kind == "snapshot" and not move_log.known.continued
            if move_log.outcome is None and not (waits and move_log.last_mark is Mark.STREAMED):
                said, why = await asking.ask(self.node, move_log.begin)
            facts = StoreFacts(
                mark=move_log.last_mark,
                outcome=move_log.outcome.outcome if move_log.outcome is not None else None,
                copy_exists=suspended.copy_exists(move_log, self.departure.own_entry(move_log)),
                interrupted=moving.interrupted,
                lease_expired=moving.lease_expired,
                coordinator=said,
                snapshot=move_log.begin.kind == "snapshot",
                continued=move_log.known.continued,
            )
            decision, reason = job_rules.store_next(facts)
            moving.waiting_for = f"{reason}: {why}" if why else reason
            match decision:
                case StoreDecision.RECORD_ABORT:
                    await self.stop_streaming(moving)
                    if not suspended.decides_alone(move_log) and said is not Answer.ABORT:
                        return  # a whole image was stored meanwhile
                    await self.record(moving, Outcome.ABORT, why or reason, "source")
                case StoreDecision.RECORD_COMMIT:
                    await self.record(moving, Outcome.COMMIT, why or reason, "coordinator")
                case StoreDecision.THAW:
                    await self.departure.thaw(moving)
                case StoreDecision.CONTINUE:
                    await self.departure.go_on(moving)
                case StoreDecision.KEEP:
                    await self.departure.keep(moving)
                case StoreDecision.RELEASE:
                    await self.departure.release(moving)
                    if move_log.last_mark is not Mark.SETTLED:
                        return
                case _:
                    return

    async def _attach_late(self, moving: Moving) -> None:
        """The copy here is lost, and COMMIT is about to be recorded without the driver: builds the communicators with the
        target's copy first, because the target may let the rank run as soon as COMMIT is recorded. Until they are built
        nothing is recorded, unless a member has ended or was declared dead."""
        if communicators.down(moving):
            gone = moving.log.record.abandoned
            try:
                if not gone:
                    await self.communicators.attach(moving, moving.log.begin.target_node)
            except RankGone as error:
                gone = True
                log.error("the rank continues without its communicators: %s", error.message)
            await in_thread(moving.log.mark, Mark.STREAMED, attached=True, abandoned=gone)

    async def _gather(self, moving: Moving) -> SourceFacts:
        move_log = moving.log
        facts = SourceFacts(
            mark=move_log.last_mark,
            outcome=move_log.outcome.outcome if move_log.outcome else None,
            copy_exists=move_log.copy_exists(),
            lease_expired=moving.lease_expired,
            interrupted=moving.interrupted,
            restarted=moving.restarted,
        )
        undecided = rules.source_next(facts)[0] in {SourceDecision.ASK_TARGET, SourceDecision.RECORD_ABORT}
        unsent = facts.mark is not Mark.STREAMED  # the target has no whole copy, whose state would matter
        if not (undecided or move_log.committed) or (facts.outcome is None and facts.copy_exists and unsent):
            return facts
        facts = replace(facts, target=await self.ask_target(move_log))
        if facts.restarted and facts.target is CopyState.NO_SUCH_MOVE and facts.outcome is None and facts.copy_exists:
            facts = replace(facts, peers_deny=await self._peers_deny(moving))
        return facts

    async def _peers_deny(self, moving: Moving) -> bool:
        """Whether all other nodes answer that they do not know the rank to have run on the target. A target that was declared
        the only copy, and has lost its journal since, is remembered by the nodes whose connections follow the rank."""
        move, ends = moving.log.move, {self.node.config.node, moving.log.begin.target_node}

        async def denies(name: str, endpoint: str) -> bool:
            try:
                async with self.node.client(name, endpoint) as client:
                    reply = await client.node.ListMoves(pb.ListMovesRequest(move=move, as_peer=True), timeout_s=5)
            except NotFound:  # of an older version, which has no record of the move
                return True
            except SnapshotError as error:
                log.info("move %s: node %s does not say what it knows: %s", move, name, error.message)
                return False
            return reply.known_to_peer != pb.COMMIT

        others = [node for node in moving.nodes if node.name not in ends]
        return all(await asyncio.gather(*(denies(node.name, node.endpoint) for node in others)))

    async def ask_target(self, move_log: MoveLog) -> CopyState:
        try:
            async with self._target(move_log) as client:
                copy = await client.target.GetCopy(pb.MoveRequest(move=move_log.move), timeout_s=5)
            return CopyState[pb.Copy.State.Name(copy.state)]
        except SnapshotError:
            return CopyState.UNREACHABLE

    def _target(self, move_log: MoveLog) -> contextlib.AbstractAsyncContextManager[DaemonClient]:
        return self.node.client(move_log.begin.target_node, move_log.begin.target_endpoint)

    async def record(self, moving: Moving, outcome: Outcome, reason: str, by: str) -> OutcomeRecord:
        decided = await in_thread(moving.log.decide, outcome, reason, by)
        moving.wake()
        return decided

    async def stop_streaming(self, moving: Moving) -> None:
        if moving.streaming is not None and not moving.streaming.done():
            moving.streaming.cancel()
            await asyncio.gather(moving.streaming, return_exceptions=True)

    def _part_of(self, move_log: MoveLog) -> Part:
        """What the coordinator of a job that is suspended is told about this rank."""
        if not move_log.begin.coordinator:
            return Part.WORKING
        if move_log.ended_unix_s:
            return Part.DONE
        outcome = move_log.outcome.outcome if move_log.outcome is not None else None
        if move_log.begin.kind == "snapshot":
            exists = stored.is_whole(self.node.store, move_log)
        else:
            exists = suspended.copy_exists(move_log, self.departure.own_entry(move_log))
        return job_rules.store_answer(move_log.last_mark, outcome, copy_exists=exists)

    def outcome_of(self, moving: Moving) -> pb.Outcome:
        """The outcome that stands, with its token, and where the rank is."""
        move_log, decided, where = moving.log, moving.log.outcome, where_of(moving.log)
        stored = self._part_of(move_log) is Part.READY
        if decided is None:
            return pb.Outcome(kind=pb.UNDECIDED, where=where.value, stored=stored)
        reason = decided.reason
        if decided.outcome is Outcome.ABORT and move_log.known.pid:
            reason = "; ".join(filter(None, (reason, moving.failure)))
            if not move_log.copy_exists():
                where = Where.ENDED
            elif move_log.last_mark is not Mark.SETTLED:
                where, reason = Where.SOURCE_FROZEN, f"{reason}; not thawed yet: {moving.waiting_for}"
        return pb.Outcome(
            kind=pb.OutcomeKind.Value(decided.outcome.value),
            reason=reason,
            decided_by=decided.decided_by,
            token=rules.proof(move_log.nonce, decided.outcome.value, move_log.move),
            where=where.value,
            settled=move_log.last_mark is Mark.SETTLED,
            abandoned=move_log.known.abandoned,
            stored=stored,
        )
