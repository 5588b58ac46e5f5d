"""Settles a move on its target, with or without a driver: wakes the copy after COMMIT, or drops it after ABORT.

Invariant: a restored copy is stopped and its cgroup frozen until the journal here says ACTIVATED, and that is written only
for a COMMIT: the source's token, or an operator's recorded declaration. Without an outcome a target asks and waits.
"""

from __future__ import annotations

import contextlib
import logging

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.addresses import split_address
from snapshotd.api.errors import Damaged, NotFound, SnapshotError, Where, WrongState
from snapshotd.keepers.relay import Relays
from snapshotd.moves import rules
from snapshotd.moves.device import hold
from snapshotd.moves.job_rules import Answer
from snapshotd.moves.jobs import asking
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.rules import Mark, Outcome, TargetDecision, TargetFacts
from snapshotd.moves.steps import Steps, settle_loop
from snapshotd.moves.target import copies
from snapshotd.moves.target.device_channels import DeviceChannels
from snapshotd.moves.target.restore import Restore
from snapshotd.moves.target.spare_children import start_spares_later
from snapshotd.moves.target.waking import wake
from snapshotd.proc import host
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.transport.image.bulk_receiver import BulkReceivers

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
#: A target begins to ask the source after this time without a request; the driver's own requests come much faster.
DRIVER_FIRST_S = 3.0
#: A move whose image is neither complete nor arriving is dropped if its source is silent for this long. The source cannot
#: commit it without the receipt for a whole copy, so this never decides against a copy that runs.
NEVER_BEGAN_S = 600.0


class TargetSettling(Steps):
    """The part of `TargetSteps` that needs no driver."""

    role = "target"
    not_here = "this node is not the target of move {move}"

    def __init__(self, node: Node, relays: Relays, forwarding: Forwarding) -> None:
        super().__init__(node.journal)
        self.node = node
        self.relays = relays
        self.forwarding = forwarding
        hosts = [split_address(address)[0] for address in (node.config.advertise, node.config.listen)]
        data_addresses = node.config.data_addresses
        self.bulk_receivers = BulkReceivers(node.store, node.credentials, hosts, data_addresses)
        self.device_channels = DeviceChannels(hosts, node.credentials, data_addresses)

    async def adopt_journal(self) -> None:
        """At start: takes up every unsettled move from before the restart; drops copies that cannot be completed."""
        for move_log in self.journal.all():
            if move_log.begin.role != "target" or move_log.last_mark is Mark.DISCARDED:
                continue
            try:
                await self._adopt(move_log)
            except (SnapshotError, OSError) as error:  # settling tries again; the daemon must serve its other ranks
                log.error("move %s is not cleaned up yet: %s", move_log.move, error)

    async def _adopt(self, move_log: MoveLog) -> None:
        if move_log.begin.kind == "copy":
            if not move_log.ended_unix_s:
                self.track(
                    move_log, driver_first_s=0.0
                ).failure = "this daemon was restarted in the middle of this move"
            return
        if move_log.last_mark is Mark.ACTIVATED:
            await in_thread(self.node.store.drop, move_log.move)
            await in_thread(connections.let_go, move_log)  # before `Adoption.sweep` wakes what was not woken
            return
        log.info("taking up move %s from before the restart: %s", move_log.move, move_log.last_mark)
        moving = self.track(move_log, driver_first_s=0.0)
        if move_log.last_mark in {Mark.PREPARED, Mark.RESTORING} or not moving.same_boot:
            moving.failure = "this daemon was restarted in the middle of this move"
            await Restore.sweep(self.node, move_log)

    def keep_waking(self, move_log: MoveLog) -> None:
        """Settling keeps trying to wake a copy that may run and could not be woken at start."""
        self.track(move_log, driver_first_s=ASK_AGAIN_S)

    def track(self, move_log: MoveLog, driver_first_s: float = DRIVER_FIRST_S) -> Moving:
        moving = self.moves[move_log.move] = Moving(move_log)
        work = settle_loop(
            moving, self.settle_once, driver_first_s, ASK_AGAIN_S, "target", finished=lambda: moving.done
        )
        self.follow(moving, work)
        return moving

    async def settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules. The caller holds the move's lock."""
        if moving.log.begin.kind == "copy":
            await copies.settle(self.node, self.bulk_receivers, moving)
            return
        for _ in range(3):
            decision, moving.waiting_for = rules.target_next(facts_of(moving.log))
            match decision:
                case TargetDecision.ACTIVATE:
                    await self._activate(moving)
                    return
                case TargetDecision.DISCARD:
                    await self._discard(moving)
                case TargetDecision.ASK_SOURCE:
                    if not await self._ask_source(moving):
                        return
                case TargetDecision.CLOSE:
                    # ACTIVATED is never overwritten: the source must learn that the copy ran, not that it was dropped.
                    if moving.log.last_mark is Mark.ACTIVATED:
                        await in_thread(connections.let_go, moving.log)  # its connections end with it
                        await self._forget_images(moving.log.move)
                    elif moving.log.last_mark is not Mark.DISCARDED:
                        await self._discard(moving)  # a resumption is then taken back by its coordinator
                    moving.done = True
                    return

    async def _ask_source(self, moving: Moving) -> bool:
        """Asks how the move ended. Returns True when the answer was recorded."""
        begin = moving.log.begin
        if begin.coordinator:
            return await self._ask_coordinator(moving)
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as client:
                answer = await client.source.GetOutcome(pb.MoveRequest(move=begin.move), timeout_s=5)
            moving.answered_s = host.boottime_s()
        except NotFound:
            if moving.log.last_mark in {Mark.HELD, Mark.ACTIVATED}:
                moving.waiting_for = (
                    "the source has no record of this move; an operator must declare whether it is dead"
                )
                return False
            await self.learn(moving, Outcome.ABORT, "the source never began this move", "target")
            return True
        except SnapshotError as error:
            if self._never_began(moving):
                reason = f"the source has sent nothing and has been silent for {NEVER_BEGAN_S / 60:.0f} minutes"
                await self.learn(moving, Outcome.ABORT, reason, "target")
                return True
            moving.waiting_for = f"the source does not answer: {error.headline}"
            return False
        if answer.kind == pb.UNDECIDED:
            moving.waiting_for = "the source has not decided yet"
            return False
        outcome = Outcome(pb.OutcomeKind.Name(answer.kind))
        # A source that was asked to abort a move it never began has no nonce. Its authenticated answer is enough for that.
        never_begun = outcome is Outcome.ABORT and moving.log.last_mark not in {Mark.HELD, Mark.ACTIVATED}
        if not never_begun and not rules.proves(answer.token, moving.log.nonce, outcome.value, begin.move):
            raise Damaged(f"the source's token for {outcome} is wrong", where=Where.TARGET_HELD)
        await self.learn(moving, outcome, answer.reason, "source", abandoned=answer.abandoned)
        return True

    async def _ask_coordinator(self, moving: Moving) -> bool:
        """The copy is one of a job that is resumed: the coordinator's record decides. Returns True when it was learnt."""
        said, why = await asking.ask(self.node, moving.log.begin)
        match said:
            case Answer.COMMIT:
                await self.learn(moving, Outcome.COMMIT, why, "coordinator")
            case Answer.ABORT:
                await self.learn(moving, Outcome.ABORT, why, "coordinator")
            case Answer.UNKNOWN if moving.log.last_mark is not Mark.HELD:
                await self.learn(moving, Outcome.ABORT, why, "target")  # it cannot commit without a held copy here
            case _:
                moving.waiting_for = f"the coordinator's record decides ({said}): {why}"
                return False
        return True

    def _never_began(self, moving: Moving) -> bool:
        silent_s = host.boottime_s() - moving.answered_s
        arriving = self.bulk_receivers.is_busy(moving.log.move)
        return moving.log.last_mark is Mark.PREPARED and not arriving and silent_s >= NEVER_BEGAN_S

    async def learn(self, moving: Moving, outcome: Outcome, reason: str, by: str, *, abandoned: bool = False) -> None:
        if abandoned and not moving.log.known.abandoned:  # also if the move has ended here: gates may still ask
            await in_thread(moving.log.mark, moving.log.last_mark, abandoned=True)
        standing = await in_thread(moving.log.decide, outcome, reason, by)
        if standing.outcome is not outcome:
            raise WrongState(
                f"move {moving.log.move} has already ended here with {standing.outcome} ({standing.reason})",
                where=Where.UNKNOWN,
            )

    async def _activate(self, moving: Moving) -> None:
        """COMMIT stands: lets the copy run. Journalled first, so that after a crash it is completed, not undone."""
        move_log = moving.log
        if move_log.last_mark is not Mark.ACTIVATED:
            await reach(Point.BEFORE_ACTIVATE)
            await in_thread(move_log.mark, Mark.ACTIVATED)
            metrics.move_ended(Outcome.COMMIT)
            await reach(Point.ACTIVATED)
        if moving.done:
            return  # both driver and source hand over the token
        entry = self.node.ranks.get(move_log.begin.rank_uid, "guest")
        if entry is None or entry.cgroup != move_log.record.cgroup or entry.moving not in {"", move_log.move}:
            # It ran and has ended, or it is the frozen source of a later move. Only that move may wake it.
            log.warning("rank %s does not belong to this move any more: it is not woken", move_log.begin.rank)
            await self._forget_images(move_log.move)
            moving.done = True
            return
        if await in_thread(self.node.ranks.has_ended, entry):
            await self.node.lost(entry)
            await self._forget_images(move_log.move)
            moving.done = True
            return
        await wake(move_log)
        entry.moving = ""
        self.forwarding.publish(entry, left=move_log.begin.source_node)
        if not entry.keeper_alive():
            await self.node.lost(entry)
        elif entry.link is not None:
            with contextlib.suppress(SnapshotError):  # it is notified again when it reconnects
                await entry.link.activated(move_log.move)
            self.relays.start(entry, entry.link)
        await self._forget_images(move_log.move)
        moving.done = True
        start_spares_later(self._under_way)
        await reach(Point.ACTIVATE)
        log.info("rank %s runs here now", move_log.begin.rank)

    async def _forget_images(self, move: str) -> None:
        await self.device_channels.close(move)  # not earlier: it confirms to the source that all has arrived
        await self._forget_held(move)
        self.node.store.drop_soon(move)  # not now: the rank's peers wait for this answer

    async def _forget_held(self, move: str) -> None:
        """Memory that was created on the GPU before a restart of this daemon."""
        with contextlib.suppress(SnapshotError):
            await in_thread(hold.let_go, self.node.holder, move)

    async def _discard(self, moving: Moving) -> None:
        """ABORT stands, or the copy never ran: removes all of it."""
        await reach(Point.BEFORE_DISCARD)
        with self.node.store.threads(moving.log.move):
            await in_thread(self.bulk_receivers.close, moving.log.move)
        await self.device_channels.close(moving.log.move)
        await self._forget_held(moving.log.move)
        await Restore.sweep(self.node, moving.log)
        await in_thread(moving.log.mark, Mark.DISCARDED)
        self.forwarding.hold_again(moving.log.begin.rank_uid)
        start_spares_later(self._under_way)
        await reach(Point.DISCARD)

    def _under_way(self) -> bool:
        return any(not moving.done for moving in self.moves.values())

    def recall(self, move_log: MoveLog) -> Moving:
        # A copy that was not woken before a restart is woken, and followed, by `Adoption.sweep`.
        return Moving(move_log, done=bool(move_log.ended_unix_s))


def facts_of(move_log: MoveLog) -> TargetFacts:
    outcome = move_log.outcome
    return TargetFacts(move_log.last_mark, outcome.outcome if outcome else None, move_log.copy_exists())
