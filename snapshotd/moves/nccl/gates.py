"""Closes the gates of a job's ranks on this node for a move, and opens them once the job's communicators are complete again.

The driver closes the gates and advances the ranks to a common cut. The source daemon has communicators taken down and built
again (members.py). A token of the move's outcome opens the gates. Invariant: a gate is in the journal before it is closed, so
no gate stays closed because a process died: a node that does not know the outcome asks the source and the target
(`gate_next` of snapshotd/moves/rules.py), also after a restart. A job without communicators leaves no trace here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Denied, NcclFailed, NotFound, RankGone, SnapshotError, Usage, Where
from snapshotd.inprocess import ncclctl
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.nccl import gate_processes
from snapshotd.moves.node import Node
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import GateProcess
from snapshotd.moves.rules import CopyState, GateDecision, GateFacts, Mark, Outcome
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.proc import host
from snapshotd.runtime.blocking import all_at_once, in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.logs import move_context

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
DRIVER_FIRST_S = 3.0
#: A source that is silent for this long takes no communicator down any more. Gates open, unless one is down.
SILENT_S = 240.0
#: The same for a node that reaches neither source nor target.
LOST_S = 900.0


class GateSteps(Steps):
    """One instance per daemon."""

    role = "gate"
    not_here = "no gate is closed here for move {move}"

    def __init__(self, node: Node) -> None:
        # A journal of its own: this node may be the move's source or target too.
        super().__init__(Journal(node.config.state_dir / "gate", node.reserve))
        self.node = node
        self._beginning = asyncio.Lock()

    # ------------------------------------------------------------------ the driver's steps

    @step
    async def close(self, request: pb.MoveDescription) -> pb.GateReport:
        """Closes the gate of every process here that has communicators. After that all its launches are in its report."""
        check_move_id(request.move), check_rank_uid(request.rank_uid)
        _check_user(request)
        async with self._beginning:  # a repeated request waits for the first; a job is closed for one move only
            known = self.journal.find(request.move)
            if known is None:
                having = [each for each, _ in await gate_processes.find(self._ranks(request.user_id, request.job))]
                if not having:
                    return pb.GateReport()
                moving = await self._begin(request, having)
            else:
                moving = self.moving(request.move)
                await self._add_newcomers(moving, request)
        async with moving.lock:
            self.must_be_open(moving)
            with move_context(move=request.move, rank=request.rank, phase="quiesce"):
                found = await in_thread(gate_processes.alive, moving.log)
                await all_at_once(lambda each: ncclctl.close(each.process), found)
                if known is None:
                    whose = f"{request.job} of user {request.user_id}"
                    log.info("closed the gates of %d processes of job %s", len(found), whose)
                await reach(Point.QUIESCED)
                return await gate_processes.report(found)

    async def report(self, request: pb.GateReportRequest) -> pb.GateReport:
        """Reports how far the job's processes here are. Changes nothing."""
        moving = self.moves.get(check_move_id(request.move)) if request.move else None
        if moving is not None and moving.log.last_mark is not Mark.SETTLED:
            return await gate_processes.report(await in_thread(gate_processes.alive, moving.log))
        _check_user(request)
        found = await gate_processes.find(self._ranks(request.user_id, request.job))
        return pb.GateReport(processes=[gate_processes.to_proto(*each) for each in found])

    @step
    async def set_targets(self, request: pb.SetTargetsRequest) -> pb.GateReport:
        """Sets how far each process may continue behind its closed gate."""
        moving = self.moving(request.move)
        targets = {
            (check_rank_uid(each.rank_uid), each.pid): [
                *map(gate_processes.target_line, each.targets),
                *map(gate_processes.permission_line, each.permissions),
            ]
            for each in request.processes
        }
        async with moving.lock:
            self.must_be_open(moving)
            found = await in_thread(gate_processes.alive, moving.log)
            named = [each for each in found if (each.rank_uid, each.inner_pid) in targets]
            if len(named) < len(targets):
                raise RankGone("a process that has to reach the cut has ended", where=Where.SOURCE_RUNNING)
            await all_at_once(
                lambda each: ncclctl.set_targets(each.process, targets[each.rank_uid, each.inner_pid]), named
            )
            return await gate_processes.report(found)

    @step
    async def open(self, move: str, token: bytes, caller: str, *, abandoned: bool = False) -> pb.OpenReply:
        """With the source's token: COMMIT opens. ABORT opens when it comes from the source itself, which has built its
        communicators again before; from another caller it only makes this node ask the source. Abandoned: a member has
        ended, so they can never be built again."""
        if self.journal.find(check_move_id(move)) is None:
            return pb.OpenReply(opened=True)
        moving = self.moving(move)
        if moving.log.begin.kind == "job":
            return await self._open_for_coordinator(moving, caller, abandoned=abandoned)
        outcome = next((item for item in Outcome if rules.proves(token, moving.log.nonce, item.value, move)), None)
        if outcome is None:
            raise Denied(f"that is not the source's token for move {move}")
        async with moving.lock:
            if outcome is Outcome.COMMIT or caller == moving.log.begin.source_node:
                await self._learn(moving, outcome, "the source's token", "source", abandoned=abandoned)
            await self._settle_once(moving)
        opened = moving.log.last_mark is Mark.SETTLED
        return pb.OpenReply(opened=opened, waiting_for="" if opened else moving.waiting_for)

    async def _open_for_coordinator(self, moving: Moving, caller: str, *, abandoned: bool) -> pb.OpenReply:
        """The ranks of a job that was suspended, or snapshotted, run here behind their gates, or have ended."""
        if caller != moving.log.begin.source_node:
            raise Denied(f"{caller} does not coordinate {moving.log.move}")
        async with moving.lock:
            await self._learn(moving, Outcome.ABORT, "the ranks go on here", "coordinator", abandoned=abandoned)
            await self._settle_once(moving)
        opened = moving.log.last_mark is Mark.SETTLED
        return pb.OpenReply(opened=opened, waiting_for="" if opened else moving.waiting_for)

    # ------------------------------------------------------------------ settling

    def adopt_journal(self) -> None:
        """At start: takes up every gate that was closed before the restart."""
        for move_log in self.journal.all():
            if move_log.last_mark is not Mark.SETTLED:
                self._track(move_log, 0.0)

    def _track(self, move_log: MoveLog, driver_first_s: float) -> Moving:
        moving = self.moves[move_log.move] = Moving(move_log)
        self.follow(moving, settle_loop(moving, self._settle_once, driver_first_s, ASK_AGAIN_S, "gates"))
        return moving

    async def _settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules until it has to wait. The caller holds the move's lock."""
        move_log, asked = moving.log, False
        outcome = move_log.outcome
        facts = GateFacts(move_log.last_mark, outcome.outcome if outcome else None)
        while True:
            decision, moving.waiting_for = rules.gate_next(facts)
            match decision:
                case GateDecision.ASK:
                    if asked:
                        return
                    asked, facts = True, await self._ask(moving)
                    continue
                case GateDecision.LEARN_COMMIT:
                    reason, abandoned = moving.waiting_for, facts.abandoned
                    await self._learn(moving, Outcome.COMMIT, reason, "target", abandoned=abandoned)
                case GateDecision.LEARN_ABORT:
                    reason, abandoned = moving.waiting_for, facts.abandoned
                    await self._learn(moving, Outcome.ABORT, reason, "source", abandoned=abandoned)
                case GateDecision.OPEN:
                    await self._open(moving)
                case GateDecision.CLOSE:
                    moving.waiting_for = ""
                    moving.wake()
                    return
            outcome = move_log.outcome
            facts = GateFacts(move_log.last_mark, outcome.outcome if outcome else None)

    async def _learn(self, moving: Moving, outcome: Outcome, reason: str, by: str, *, abandoned: bool) -> None:
        if abandoned and not moving.log.record.abandoned:
            await in_thread(moving.log.mark, moving.log.last_mark, abandoned=True)
        await in_thread(moving.log.decide, outcome, reason, by)

    async def _open(self, moving: Moving) -> None:
        """Opens the gates here, except that of a rank that has moved: its target opens it; the copy here never runs again.

        A process refuses while one of its communicators is not attached. Then the gates stay closed, and source and target
        are asked whether it is abandoned: then the next attempt succeeds.
        """
        await reach(Point.BEFORE_OPEN)
        move_log = moving.log
        outcome, abandon = move_log.outcome, move_log.record.abandoned
        left = outcome is not None and outcome.outcome is Outcome.COMMIT
        found = await in_thread(gate_processes.alive, move_log)
        here = [each.process for each in found if not left or each.rank_uid != move_log.begin.rank_uid]
        if move_log.begin.boot_id == host.boot_id():
            try:
                await all_at_once(lambda process: ncclctl.open_gate(process, abandon=abandon), here)
            except NcclFailed:
                if not abandon and (await self._ask(moving)).abandoned:
                    await in_thread(move_log.mark, move_log.last_mark, abandoned=True)
                raise
        await in_thread(move_log.mark, Mark.SETTLED)
        log.info("opened the gates of %d processes of job %s", len(here), move_log.begin.job)

    async def _ask(self, moving: Moving) -> GateFacts:
        """The source's outcome, and whether the target runs the rank. No answer counts as undecided."""
        begin, request = moving.log.begin, pb.MoveRequest(move=moving.log.move)
        if begin.kind == "job":
            return await self._ask_coordinator(moving)
        outcome: Outcome | None = None
        undone = unknowing = abandoned = False
        silent_s = 0.0
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as source:
                answer = await source.source.GetOutcome(request, timeout_s=5)
            moving.answered_s = host.boottime_s()
            if answer.kind == pb.UNDECIDED:
                return GateFacts(moving.log.last_mark, None)
            outcome, abandoned = Outcome(pb.OutcomeKind.Name(answer.kind)), answer.abandoned
            undone = outcome is Outcome.ABORT and answer.settled
            # A source is settled only after it has built all that it will ever build. What is down now stays down. It says
            # so itself, unless it is of an older version. The order matters: its answer first, then the state here.
            abandoned = abandoned or (undone and await self._down(moving.log))
            # If one is down here all the same, the target must say whether a declaration that the source is dead let it run.
            running = outcome is Outcome.COMMIT and answer.where == Where.TARGET_RUNNING.value
            if running and (abandoned or not await self._down(moving.log)):
                return GateFacts(moving.log.last_mark, None, outcome, target=CopyState.RUNNING, abandoned=abandoned)
        except NotFound:
            unknowing = True
        except SnapshotError:
            silent_s = host.boottime_s() - moving.answered_s
        target = CopyState.UNREACHABLE
        if outcome is not Outcome.ABORT:
            try:
                async with self.node.client(begin.target_node, begin.target_endpoint) as client:
                    copy = await client.target.GetCopy(request, timeout_s=5)
                target, abandoned = CopyState[pb.Copy.State.Name(copy.state)], abandoned or copy.abandoned
            except SnapshotError as error:
                log.debug("move %s: the target does not answer: %s", moving.log.move, error.message)
        silent, lost = silent_s > SILENT_S, silent_s > LOST_S
        down = (silent or unknowing) and await self._down(moving.log)
        return GateFacts(moving.log.last_mark, None, outcome, undone, unknowing, silent, target, lost, down, abandoned)

    async def _ask_coordinator(self, moving: Moving) -> GateFacts:
        """Whether the coordinator of a job, which opens the gates, never will: it has settled its record, or lost it,
        or is silent for too long. What is down here then stays down. If all processes have ended there is no gate any more:
        a job that was rolled back because its coordinator is lost must not wait for it."""
        begin = moving.log.begin
        if not await in_thread(gate_processes.alive, moving.log):
            return GateFacts(moving.log.last_mark, None, Outcome.ABORT, source_undone=True)
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as client:
                answer = await client.job.GetOutcome(pb.MoveRequest(move=begin.move), timeout_s=5)
            moving.answered_s = host.boottime_s()
            over = answer.settled
        except NotFound:
            over = True
        except SnapshotError:
            over = host.boottime_s() - moving.answered_s > LOST_S
        if not over:
            return GateFacts(moving.log.last_mark, None)
        down = await self._down(moving.log)
        return GateFacts(moving.log.last_mark, None, Outcome.ABORT, source_undone=True, abandoned=down)

    async def _down(self, move_log: MoveLog) -> bool:
        """Whether a process here has a communicator that is not attached, or does not say."""
        if move_log.begin.boot_id != host.boot_id():
            return False
        try:
            report = await gate_processes.report(await in_thread(gate_processes.alive, move_log))
        except SnapshotError as error:
            log.info("move %s: a process does not say which communicators are down: %s", move_log.move, error.message)
            return True
        return any(comm.state in ncclctl.DOWN for process in report.processes for comm in process.communicators)

    # ------------------------------------------------------------------ small questions

    def _ranks(self, user_id: int, job: str) -> list[RankEntry]:
        """The ranks of one job here. Other users may have jobs of the same name, which must not wait for this one."""
        return [entry for entry in self.node.ranks.all() if (entry.user_id, entry.job) == (user_id, job)]

    async def _begin(self, request: pb.MoveDescription, having: Sequence[GateProcess]) -> Moving:
        for other in self.moves.values():
            if other.log.begin.is_of_job(request.user_id, request.job) and other.log.last_mark is not Mark.SETTLED:
                raise Busy(f"the gates of job {request.job} are closed for move {other.log.move}")
        begin = Begin(
            move=request.move,
            role="gate",
            rank_uid=request.rank_uid,
            job=request.job,
            rank=request.rank,
            source_node=request.source_node,
            source_endpoint=request.source_endpoint,
            target_node=request.target_node,
            target_endpoint=request.target_endpoint,
            nonce=request.nonce.hex(),
            boot_id=host.boot_id(),
            begun_unix_s=time.time(),
            user_id=request.user_id,
            kind="job" if request.whole_job else "",
        )
        move_log = await in_thread(self.journal.begin, begin)
        await in_thread(move_log.mark, Mark.GATED, gate_processes=list(having))
        return self._track(move_log, DRIVER_FIRST_S)

    async def _add_newcomers(self, moving: Moving, request: pb.MoveDescription) -> None:
        """Adds processes that have created their first communicator since the first Close: its other members may wait for
        them at their gates."""
        known = moving.log.record.gate_processes
        having = [each for each, _ in await gate_processes.find(self._ranks(request.user_id, request.job))]
        fresh = [each for each in having if each not in known]
        async with moving.lock:
            if fresh and moving.log.outcome is None:
                await in_thread(moving.log.mark, moving.log.last_mark, gate_processes=[*known, *fresh])

    def closed(self, move: str = "") -> list[pb.ClosedGate]:
        """The gates that are closed here, for one move or for any. Blocking."""
        found = []
        for move_log in self.journal.all():
            if move_log.last_mark is Mark.SETTLED or move not in {"", move_log.move}:
                continue
            moving = self.moves.get(move_log.move)
            found.append(
                pb.ClosedGate(
                    move=move_log.move,
                    job=move_log.begin.job,
                    ranks=sorted({each.rank for each in gate_processes.alive(move_log)}),
                    since_unix_s=move_log.begin.begun_unix_s,
                    waiting_for=moving.waiting_for if moving else "",
                    user_id=user_id if (user_id := move_log.begin.user_id) >= 0 else None,
                )
            )
        return found

    def closed_for(self, move: str) -> bool:
        """Whether gates here are closed for this move."""
        move_log = self.journal.find(move)
        return move_log is not None and move_log.last_mark is not Mark.SETTLED


def _check_user(request: pb.MoveDescription | pb.GateReportRequest) -> None:
    """A job is named by its user and its name; proto3 would read a missing user as root. Raises Usage."""
    if not request.HasField("user_id"):
        raise Usage(
            f"the request does not say whose job {request.job[:60]!r} is", remedy="upgrade `migrator`, then retry"
        )
