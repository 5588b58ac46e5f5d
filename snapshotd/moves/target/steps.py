"""The target's side of a move: take the image in, restore it stopped, and let it go only with the source's token.

Invariant: a restored copy is stopped and its cgroup frozen until the journal here says ACTIVATED, and that is written only
for a COMMIT: the source's token, or a person's recorded word. A target that does not know the outcome asks and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Damaged, Denied, NotFound, RankGone, SnapshotError, Usage, Where, WrongState
from snapshotd.config import split_address
from snapshotd.cuda import pairing
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.keepers.relay import Relays
from snapshotd.moves import rules
from snapshotd.moves.device import gpu
from snapshotd.moves.journal import MoveLog, check_move_id
from snapshotd.moves.nccl import held_copy
from snapshotd.moves.node import Moving, Node, now_unix_s, to_the_end
from snapshotd.moves.peers import connections, socket_options
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import CopyState, Mark, Outcome, TargetDecision, TargetFacts
from snapshotd.moves.target.device_channels import Inlets
from snapshotd.moves.target.restore import Restore
from snapshotd.proc import host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.logs import move_context
from snapshotd.transport.image.bulk_receiver import BulkReceivers

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
WAKE_S = 20.0
#: After so long without a word a target starts asking the source; the driver's own words come much faster.
DRIVER_FIRST_S = 3.0


class TargetOps:
    """One instance per daemon."""

    def __init__(self, node: Node, relays: Relays, forwarding: Forwarding) -> None:
        self.node = node
        self.relays = relays
        self.forwarding = forwarding
        self.moves: dict[str, Moving] = {}
        self.restores: dict[str, Restore] = {}
        self._choosing = asyncio.Lock()
        hosts = [split_address(address)[0] for address in (node.config.advertise, node.config.listen)]
        self.bulk_receivers = BulkReceivers(node.store, node.credentials, hosts)
        self.inlets = Inlets(hosts)

    # ------------------------------------------------------------------ steps, each idempotent by (move, step)

    async def examine(self, facts: pb.RankFacts, info: pb.NodeInfo, gpu_wish: str) -> list[pb.Check]:
        return list(
            await in_thread(
                preflight.examine,
                facts,
                info,
                carry_paths=self.node.config.carry_paths,
                may_replace=self.node.carry.may_replace,
                gpu_wish=gpu_wish,
            )
        )

    def with_reservations(self, found: Iterable[pb.Gpu]) -> list[pb.Gpu]:
        """This node's GPUs, each with the move that will use it. A reservation is a line in the journal: it lasts until the
        move has ended, and no crash forgets it or leaves it behind. A rank that is leaving may have to come back to the GPU
        it was on."""
        reserved: dict[str, str] = {}
        for move_log in self.node.journal.all():
            role, last = move_log.begin.role, move_log.last_mark
            if role == "target" and last not in {Mark.DISCARDED, Mark.ACTIVATED}:
                reserved |= dict.fromkeys(move_log.record.gpus_reserved, move_log.move)
            elif role == "source" and last is not Mark.SETTLED and move_log.begin.boot_id == host.boot_id():
                reserved |= dict.fromkeys(move_log.record.gpu_uses, move_log.move)
        answer = []
        for each in found:
            copy = pb.Gpu(reserved_for=reserved.get(each.uuid, ""))
            copy.MergeFrom(each)
            answer.append(copy)
        return answer

    async def _choose(self, request: pb.PrepareRequest) -> list[tuple[str, str]]:
        """(GPU of the source, GPU here that takes its place), for each; nothing for a rank without CUDA."""
        if not request.facts.HasField("gpu"):
            return []
        inventory = await self.node.gpus.inventory(fresh=True)
        pairs, where = pairing.choose(request.facts.gpu, self.with_reservations(inventory.gpus), request.gpu)
        log.info("move %s: %s", request.move, where)
        return [(pair.old_uuid, pair.new_uuid) for pair in pairs]

    @to_the_end
    async def prepare(self, request: pb.PrepareRequest) -> pb.PrepareReply:
        """Reserves room for the image and gives the nonce that the source's token is made from."""
        check_move_id(request.move)
        if self.node.journal.find(request.move) is not None:
            known = self._moving(request.move)
            self._undecided(known)
            return _prepared(known.log)
        facts, config = request.facts, self.node.config
        check_rank_uid(facts.rank.uid)
        if facts.source_node == config.node:
            raise Usage("a rank cannot be moved to the node it is on")
        for older in self.node.journal.all():
            same = (older.begin.rank_uid, older.begin.role) == (facts.rank.uid, "source")
            if same and older.last_mark is not Mark.SETTLED:
                raise Busy(f"move {older.move} of this rank away from here is not cleaned up yet")
        await reach(Point.BEFORE_PREPARE)
        async with self._choosing:  # two moves that begin at the same moment get different GPUs
            pairs = await self._choose(request)
            used = {use.uuid for use in facts.gpu.uses}
            await in_thread(self.node.store.create, request.move, facts.memory_bytes + facts.carried_bytes)
            begin = Begin(
                move=request.move,
                role="target",
                rank_uid=facts.rank.uid,
                job=facts.rank.job,
                rank=facts.rank.rank,
                source_node=facts.source_node,
                source_endpoint=request.source_endpoint,
                target_node=config.node,
                target_endpoint=config.advertise,
                nonce=secrets.token_hex(32),
                boot_id=host.boot_id(),
                begun_unix_s=now_unix_s(),
            )
            move_log = await in_thread(self.node.journal.begin, begin)
            reserved = [new for old, new in pairs if old in used]
            await in_thread(move_log.mark, Mark.PREPARED, gpu_pairs=pairs, gpus_reserved=reserved)
        self._track(move_log)
        await reach(Point.PREPARE)
        return _prepared(move_log)

    @to_the_end
    async def open_image_channel(self, move: str, caller: str) -> pb.OpenImageChannelReply:
        """A port and a key for the images of this move alone, until they are sealed or dropped."""
        self.authorise_source(move, caller)
        moving = self._moving(move)
        await reach(Point.RECEIVING)
        async with moving.lock:
            self._undecided(moving)
            port, key = await in_thread(self.bulk_receivers.open, move, moving.log.begin.source_node)
        return pb.OpenImageChannelReply(port=port, key=key)

    @to_the_end
    async def open_device_channel(self, request: pb.OpenDeviceChannelRequest, caller: str) -> pb.OpenDeviceChannelReply:
        """A port and a key for the parked device memory of this move; open until the rank runs here or is dropped."""
        self.authorise_source(request.move, caller)
        moving = self._moving(request.move)
        async with moving.lock:
            self._undecided(moving)
            if moving.log.last_mark is not Mark.PREPARED:
                raise WrongState(f"move {request.move} is {moving.log.last_mark}", where=Where.SOURCE_RUNNING)
            plain = request.plain and self.node.config.device_channel == "plain"
            incoming = await self.inlets.open(
                request.move,
                self.node.store.path(request.move),
                request.names,
                caller,
                plain=plain,
                expected_bytes=request.expected_bytes,
            )
            await in_thread(self.node.store.set_aside, request.move, request.names, request.expected_bytes)
        return pb.OpenDeviceChannelReply(port=incoming.port, key=incoming.key, plain=plain)

    @to_the_end
    async def seal(self, request: pb.SealRequest, caller: str) -> pb.SealReply:
        """The source says that all is sent: verifies that it is here, whole."""
        moving = self._moving(request.move)
        self.authorise_source(request.move, caller)
        async with moving.lock:
            self._undecided(moving)
            damaged = await in_thread(self.node.store.seal, request.move, request.files)
            if not damaged:
                await in_thread(self.bulk_receivers.close, request.move)
            if not damaged and moving.log.last_mark is Mark.PREPARED:
                await in_thread(moving.log.mark, Mark.SEALED)
                await reach(Point.SEAL)
            return pb.SealReply(damaged=damaged)

    def authorise_source(self, move: str, caller: str) -> None:
        """Only the node that is left may send the image of a move."""
        moving = self._moving(move)
        if caller != moving.log.begin.source_node:
            raise Denied(f"{caller} is not the source of move {move}")
        self._undecided(moving)

    async def restore(self, move: str) -> pb.RestoreReply:
        """Restores the tree, stopped. If it fails, nothing of it is left here and the source still has the rank.

        Not `to_the_end`: a driver that gave up waiting does not want it any more, and without its receipt none commits.
        """
        moving = self._moving(move)
        began, parts = host.boottime_s(), gpu.Parts()
        async with moving.lock:
            self._undecided(moving)
            with move_context(move=move, rank=moving.log.begin.rank, phase="restore"):
                if moving.log.last_mark is Mark.HELD:
                    if not copy_exists(moving.log):
                        raise RankGone("the restored copy died while it was held", where=Where.SOURCE_FROZEN)
                else:
                    if moving.log.last_mark is not Mark.SEALED:
                        raise WrongState(
                            f"move {move} is {moving.log.last_mark}, not sealed", where=Where.SOURCE_FROZEN
                        )
                    await reach(Point.BEFORE_RESTORE)
                    await in_thread(moving.log.mark, Mark.RESTORING)
                    restore = self.restores[move] = Restore(self.node, moving.log)
                    try:
                        held = await restore.run(parts, self.inlets.find(move))
                    except BaseException as error:
                        moving.failure = str(error)
                        if isinstance(error, SnapshotError):
                            error.where = Where.SOURCE_FROZEN  # also where a process of the copy here has ended
                        await self.inlets.close(move)
                        await restore.sweep(self.node, moving.log)
                        raise
                    await reach(Point.RESTORED)
                    await in_thread(moving.log.mark, Mark.HELD, **held)
                    metrics.phase("restore", host.boottime_s() - began)
                    log.info("restored rank %s, held", moving.log.begin.rank)
                    await reach(Point.RESTORE)
        receipt = rules.proof(moving.log.nonce, "HELD", move)
        return pb.RestoreReply(held_receipt=receipt, seconds=host.boottime_s() - began, parts=parts.all)

    @to_the_end
    async def activate(self, move: str, token: bytes) -> pb.ActivateReply:
        """With the source's token for COMMIT the copy here is the rank: lets it go."""
        moving = self._moving(move)
        if not rules.proves(token, moving.log.nonce, "COMMIT", move):
            raise Denied(
                f"that is not the source's COMMIT token for move {move}",
                remedy="only the source's outcome record gives it",
                where=Where.TARGET_HELD,
            )
        async with moving.lock:
            await self._learn(moving, Outcome.COMMIT, "the source's token", "source")
            await self._settle_once(moving)
            return pb.ActivateReply(running=moving.log.last_mark is Mark.ACTIVATED)

    @to_the_end
    async def discard(self, move: str, token: bytes) -> pb.DiscardReply:
        """With the source's token for ABORT the copy here is forgotten."""
        check_move_id(move)
        if self.node.journal.find(move) is None:
            return pb.DiscardReply()
        moving = self._moving(move)
        if not rules.proves(token, moving.log.nonce, "ABORT", move):
            moving.kick.set()  # a source that was never told of the move has no nonce for its token: ask it ourselves, now
            raise Denied(f"that is not the source's ABORT token for move {move}")
        async with moving.lock:
            await self._learn(moving, Outcome.ABORT, "the source's token", "source")
            await self._settle_once(moving)
            return pb.DiscardReply()

    async def copy_state(self, move: str) -> pb.Copy:
        check_move_id(move)
        found = self.node.journal.find(move)
        if found is None or found.begin.role != "target":
            return pb.Copy(state=pb.Copy.NO_SUCH_MOVE)
        state = rules.target_answer(self._facts(found))
        if state is CopyState.GONE:  # final only if nobody is just about to mark it ACTIVATED
            async with self._moving(move).lock:
                state = rules.target_answer(self._facts(found))
        return pb.Copy(state=pb.Copy.State.Value(state.name))

    @to_the_end
    async def declare_source_dead(self, move: str, by: str) -> pb.ActivateReply:
        """A person's word that the source is dead: the held copy goes on here; a half-received one is dropped."""
        moving = self._moving(move)
        if await self._source_answers(moving.log.begin):
            raise WrongState(f"the source answers and knows move {move}: it is not dead", where=Where.UNKNOWN)
        async with moving.lock:
            held = moving.log.last_mark in {Mark.HELD, Mark.ACTIVATED}
            outcome = Outcome.COMMIT if held else Outcome.ABORT
            await self._learn(moving, outcome, "a person declared the source dead", by)
            await self._settle_once(moving)
            return pb.ActivateReply(running=moving.log.last_mark is Mark.ACTIVATED)

    async def _source_answers(self, begin: Begin) -> bool:
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as client:
                await client.source.GetOutcome(pb.MoveRequest(move=begin.move), timeout_s=5)
        except SnapshotError:
            return False
        return True

    # ------------------------------------------------------------------ settling

    async def adopt_journal(self) -> None:
        """At start: takes up every unsettled move of an earlier life; drops what cannot be carried on."""
        for move_log in self.node.journal.all():
            if move_log.begin.role != "target" or move_log.last_mark is Mark.DISCARDED:
                continue
            try:
                await self._adopt(move_log)
            except (SnapshotError, OSError) as error:  # settling tries again; this daemon has other ranks to serve
                log.error("move %s is not cleaned up yet: %s", move_log.move, error)

    async def _adopt(self, move_log: MoveLog) -> None:
        if move_log.last_mark is Mark.ACTIVATED:
            await in_thread(self.node.store.drop, move_log.move)
            await in_thread(connections.let_go, move_log)  # before `Adoption.sweep` wakes what was not woken
            return
        log.info("taking up move %s of an earlier life: %s", move_log.move, move_log.last_mark)
        moving = self._track(move_log, driver_first_s=0.0)
        if move_log.last_mark in {Mark.PREPARED, Mark.RESTORING} or not moving.same_boot:
            moving.failure = "this daemon was restarted in the middle of it"
            await Restore.sweep(self.node, move_log)

    def follow(self, move_log: MoveLog) -> None:
        """A copy that may run and could not be woken at start: settling goes on trying."""
        self._track(move_log, driver_first_s=ASK_AGAIN_S)

    def _track(self, move_log: MoveLog, driver_first_s: float = DRIVER_FIRST_S) -> Moving:
        moving = Moving(move_log)
        self.moves[move_log.move] = moving
        moving.settling = asyncio.create_task(self._settle(moving, driver_first_s), name=f"settle {move_log.move}")
        return moving

    async def _settle(self, moving: Moving, driver_first_s: float) -> None:
        """Follows one move until it ran or was dropped here. Without an outcome: asks the source, for ever."""
        with move_context(move=moving.log.move, rank=moving.log.begin.rank, phase="settle"):
            said = ""
            await moving.nap(driver_first_s)
            while not moving.done:
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
                await moving.nap(ASK_AGAIN_S)

    async def _settle_once(self, moving: Moving) -> None:
        for _ in range(3):
            decision, moving.waiting_for = rules.target_next(self._facts(moving.log))
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
                    # ACTIVATED is never overwritten: the copy ran, and the source must hear so, not that it was dropped.
                    if moving.log.last_mark is Mark.ACTIVATED:
                        await in_thread(
                            connections.let_go, moving.log
                        )  # nobody goes on with them: let the others hear it
                        await self._forget_images(moving.log.move)
                    elif moving.log.last_mark is not Mark.DISCARDED:
                        await self._discard(moving)
                    moving.done = True
                    return

    async def _ask_source(self, moving: Moving) -> bool:
        """Asks how the move ended. True when that was answered and recorded."""
        begin = moving.log.begin
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as client:
                answer = await client.source.GetOutcome(pb.MoveRequest(move=begin.move), timeout_s=5)
        except NotFound:
            if moving.log.last_mark in {Mark.HELD, Mark.ACTIVATED}:
                moving.waiting_for = "the source has no record of this move; a person must say whether it is dead"
                return False
            await self._learn(moving, Outcome.ABORT, "the source never began this move", "target")
            return True
        except SnapshotError as error:
            moving.waiting_for = f"the source does not answer: {error.message.splitlines()[0]}"
            return False
        if answer.kind == pb.UNDECIDED:
            moving.waiting_for = "the source has not decided yet"
            return False
        outcome = Outcome(pb.OutcomeKind.Name(answer.kind))
        # A source that was asked to abort what it had never begun has no nonce. Its own word (TLS) is enough for that.
        never_begun = outcome is Outcome.ABORT and moving.log.last_mark not in {Mark.HELD, Mark.ACTIVATED}
        if not never_begun and not rules.proves(answer.token, moving.log.nonce, outcome.value, begin.move):
            raise Damaged(f"the source's token for {outcome} is wrong", where=Where.TARGET_HELD)
        await self._learn(moving, outcome, answer.reason, "source")
        return True

    async def _learn(self, moving: Moving, outcome: Outcome, reason: str, by: str) -> None:
        standing = await in_thread(moving.log.decide, outcome, reason, by)
        if standing.outcome is not outcome:
            raise WrongState(
                f"move {moving.log.move} has already ended here with {standing.outcome} ({standing.reason})",
                where=Where.UNKNOWN,
            )

    # ------------------------------------------------------------------ acts

    async def _activate(self, moving: Moving) -> None:
        """COMMIT stands: lets the copy run. Journalled first, so that a crash in between is finished, not undone."""
        move_log = moving.log
        if move_log.last_mark is not Mark.ACTIVATED:
            await reach(Point.BEFORE_ACTIVATE)
            await in_thread(move_log.mark, Mark.ACTIVATED)
            metrics.move_ended(Outcome.COMMIT)
            await reach(Point.ACTIVATED)
        if moving.done:
            return  # driver and source hand over the token alike; the first was enough
        entry = self.node.ranks.get(move_log.begin.rank_uid, "guest")
        if entry is None or entry.cgroup != move_log.record.cgroup or entry.moving not in {"", move_log.move}:
            # It ran and has ended, or is the frozen source of a later move: that one alone may wake it.
            log.warning("rank %s is not this move's to wake any more", move_log.begin.rank)
            await self._forget_images(move_log.move)
            moving.done = True
            return
        await wake(move_log)
        entry.moving = ""
        self.forwarding.publish(entry, left=move_log.begin.source_node)
        if not entry.keeper_alive():
            await self.node.lost(entry)
        elif entry.link is not None:
            with contextlib.suppress(SnapshotError):  # told again when it reconnects
                await entry.link.activated(move_log.move)
            self.relays.start(entry, entry.link)
        await self._forget_images(move_log.move)
        moving.done = True
        await reach(Point.ACTIVATE)
        log.info("rank %s runs here now", move_log.begin.rank)

    async def _forget_images(self, move: str) -> None:
        await self.inlets.close(move)  # not before: the source hears from it that all has arrived
        self.node.store.drop_soon(move)  # the rank runs, and its peers wait for this answer

    async def _discard(self, moving: Moving) -> None:
        """ABORT stands, or the copy never came to run: leaves nothing of it."""
        await reach(Point.BEFORE_DISCARD)
        await in_thread(self.bulk_receivers.close, moving.log.move)
        await self.inlets.close(moving.log.move)
        await Restore.sweep(self.node, moving.log)
        await in_thread(moving.log.mark, Mark.DISCARDED)
        await reach(Point.DISCARD)

    # ------------------------------------------------------------------ small questions

    def _moving(self, move: str) -> Moving:
        """The move, also one that ended in an earlier life of this daemon: the journal answers for it."""
        found = self.moves.get(check_move_id(move))
        if found is None:
            move_log = self.node.journal.find(move)
            if move_log is None or move_log.begin.role != "target":
                raise NotFound(f"this node is not the target of move {move}")
            # Of those that had ended, `Adoption.sweep` has woken what was still to wake, and follows it itself.
            found = self.moves[move] = Moving(move_log, done=move_log.last_mark in {Mark.ACTIVATED, Mark.DISCARDED})
        return found

    def held(self, move: str) -> Moving | None:
        """The move whose copy is held here and may neither run nor go yet."""
        moving = self.moves.get(move)
        if moving is None or moving.log.last_mark is not Mark.HELD or moving.log.outcome is not None:
            return None
        return moving if copy_exists(moving.log) else None

    def _undecided(self, moving: Moving) -> None:
        outcome = moving.log.outcome
        if outcome is not None:
            raise WrongState(f"move {moving.log.move} has ended: {outcome.outcome} ({outcome.reason})")
        if moving.failure:
            raise WrongState(f"move {moving.log.move} cannot go on: {moving.failure}", where=Where.SOURCE_FROZEN)

    def _facts(self, move_log: MoveLog) -> TargetFacts:
        outcome = move_log.outcome
        return TargetFacts(move_log.last_mark, outcome.outcome if outcome else None, copy_exists(move_log))


def copy_exists(move_log: MoveLog) -> bool:
    """Whether the restored root process is still there."""
    if move_log.begin.boot_id != host.boot_id():
        return False
    return move_log.record.root.alive()


def _prepared(move_log: MoveLog) -> pb.PrepareReply:
    pairs = [pb.GpuPair(old_uuid=old, new_uuid=new) for old, new in move_log.record.gpu_pairs]
    return pb.PrepareReply(nonce=move_log.nonce, gpu_pairs=pairs)


_resuming: set[asyncio.Task[None]] = set()


async def wake(move_log: MoveLog) -> None:
    """Lets an activated copy run: its packets, SIGCONT, then the freezer, so that all of it goes at once, and the
    threads that were parked for the GPU, and its gates. Repeatable."""
    group = Cgroup(Path(move_log.record.cgroup))
    sockets = move_log.record.socket_options
    for refused in await in_thread(socket_options.put_back, group.pids(), sockets):
        log.warning("a socket of rank %s is not quite as it was: %s", move_log.begin.rank, refused)
    await in_thread(connections.let_go, move_log)
    await in_thread(tree.continue_all, group.pids(), move_log.record.stopped_before or [])
    await in_thread(group.thaw, WAKE_S)
    nccl = move_log.record.nccl_processes
    parked = gpu.parked_ones(move_log.record.cuda, held_copy.processes(nccl))
    await gpu.let_go([process for process in parked if process.alive()])
    if nccl and not move_log.record.gates_opened:
        await held_copy.open_gates(nccl)
        await in_thread(move_log.mark, Mark.ACTIVATED, gates_opened=True)
    if timers := sockets.timers:
        task = asyncio.create_task(in_thread(socket_options.resume_there, group.pids(), timers))
        _resuming.add(task)
        task.add_done_callback(_resuming.discard)
