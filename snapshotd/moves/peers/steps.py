"""Carries out a peer's steps of a move: this node has the peers' sockets of the rank's connections, in processes that stay.

Their packets are filtered from the freeze on. Each socket is re-pointed in place at the target just before COMMIT. Once the
outcome is known the filter is dropped; after an ABORT the socket is pointed back first. The processes are stopped only while
their sockets are changed.

Invariant: from the freeze on, while this node does not know the outcome, no packet of these connections leaves or enters it,
with the old or the new address; so whatever the rank's sockets do meanwhile, nothing here can be answered with a reset. The
state of a socket is on RAM-backed storage before it is changed. Only connections that the move may change (permission.py) are
changed. A peer that does not know the outcome asks the source and the target, and waits (`peer_next` of
snapshotd/moves/rules.py).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Denied, NotFound, Refused, SnapshotError, Unreachable, Usage, Where
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.peers import ends as ends_here
from snapshotd.moves.peers import new_paths, permission, socket_options
from snapshotd.moves.peers.connections import new_pair, old_pair, peer_table
from snapshotd.moves.peers.ends import Ends
from snapshotd.moves.record import Begin
from snapshotd.moves.record_parts import PeerSocket, SocketTimers, parse_pair
from snapshotd.moves.rules import CopyState, Mark, Outcome, PeerDecision, PeerFacts
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.net import filter as packets
from snapshotd.net import repoint, timers, tracking
from snapshotd.net.flows import BadAddress, Flow
from snapshotd.proc import host
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
DRIVER_FIRST_S = 3.0
CHECK_TIMEOUT_S = 10.0
#: Without an answer of source and target for this long, connections that were not re-pointed are let go: as with gates, a job
#: that fails is better than one that hangs for ever.
LOST_S = 900.0


class PeerSteps(Steps):
    """One instance per daemon."""

    role = "peer"
    not_here = "no connection of move {move} ends here"

    def __init__(self, node: Node) -> None:
        # A journal of its own: this node may be the move's source or target too.
        super().__init__(Journal(node.config.state_dir / "peer", node.reserve))
        self.node = node
        self._permission = permission.Permission(node.config)

    # ------------------------------------------------------------------ steps

    async def inspect_connections(self, request: pb.InspectConnectionsRequest) -> list[pb.Check]:
        """Preflight: whether the peers' sockets are here and can and may be re-pointed. Changes nothing."""
        rewires, here = list(request.rewires), self.node.config.node
        ends: Ends = []
        blocked: list[str] = []
        try:
            ends, problems = await in_thread(ends_here.inspect, self.node.ranks, rewires)
            # A migrator that does not describe the move is refused later.
            forbidden = await self._forbidden(request.description, ends) if request.HasField("description") else {}
            if request.HasField("description") and not problems and not any(forbidden.values()):
                blocked = await new_paths.blocked(self.node, request.description, [rewire for rewire, _ in ends])
        except (SnapshotError, OSError, ValueError) as error:
            problems, forbidden = [str(error)], {}
        remedy = "try again in a moment; a connection that is closing or opening settles by itself"
        found = [("connection-ends", problems, remedy)]
        found += [(name, why, permission.REMEDY[name]) for name, why in forbidden.items()]
        found.append((new_paths.CHECK, blocked, new_paths.REMEDY))
        refused = [
            pb.Check(
                name=name,
                verdict=pb.Check.REFUSE,
                reason=f"on {here}: {'; '.join(why[:5])}",
                remedy=remedy,
            )
            for name, why, remedy in found
            if why
        ]
        return refused or [pb.Check(name="connection-ends", reason=f"{len(rewires)} connections end on {here}")]

    @step
    async def suspend_timeouts(self, request: pb.RepointRequest) -> pb.SuspendTimeoutsReply:
        """Before the freeze: switches off the sockets' time-outs, and lets this kernel learn the round-trip time to the
        target."""
        description = _check(request)
        if self.journal.find(description.move) is None:
            await self._begin(description)
        async with self.working_on(description.move, "suspend") as moving:
            ends = (await in_thread(ends_here.find, self.node.ranks, list(request.rewires))).ends  # problems: later
            await self._refuse_forbidden(description, ends, Where.SOURCE_RUNNING)
            await reach(Point.BEFORE_SUSPEND)
            found = await in_thread(_all_timers, moving.log, [flow for _, flow in ends])
            await in_thread(moving.log.mark, Mark.TIMEOUTS_SUSPENDED, socket_timers=found)
            await in_thread(socket_options.suspend, found)
            await reach(Point.SUSPEND)
            for ip in {rewire.new_remote.ip for rewire, _ in ends}:
                await in_thread(timers.meet, ip, description.target_endpoint)
        return pb.SuspendTimeoutsReply(sockets=len(ends))

    @step
    async def hold(self, request: pb.RepointRequest) -> pb.HoldReply:
        """Once the rank is frozen: filters the connections here too. A source that reboots loses its own filter, and its
        kernel would reset them."""
        description = _check(request)
        if self.journal.find(description.move) is None:
            await self._begin(description)
        async with self.working_on(description.move, "hold") as moving:
            if moving.log.last_mark in {Mark.REPOINTING, Mark.REPOINTED}:  # a late request
                return pb.HoldReply(sockets=len(moving.log.record.peer_sockets))
            await reach(Point.BEFORE_HOLD)
            with span("find sockets"):
                every = await in_thread(ends_here.find, self.node.ranks, list(request.rewires))
            # Repoint reports the other problems: until then a connection that waits to be accepted settles, for example.
            every.check_closed()
            ends = [(rewire, flow) for rewire, flow in every.ends if flow.holders]
            await self._refuse_forbidden(description, ends, Where.SOURCE_FROZEN)
            found = [ends_here.peer_socket(rewire, flow) for rewire, flow in ends]
            off = await in_thread(_all_timers, moving.log, [flow for _, flow in ends])
            await in_thread(moving.log.mark, Mark.FILTERED, socket_timers=off, peer_sockets=found)
            await in_thread(socket_options.suspend, off)
            with span("filter"):
                await in_thread(_filter, description.move, found)
            await reach(Point.HOLD)
        return pb.HoldReply(sockets=len(found))

    @step
    async def repoint(self, request: pb.RepointRequest) -> pb.RepointReply:
        """Points the sockets here at the target, under a filter. The last step before COMMIT."""
        description = _check(request)
        if self.journal.find(description.move) is None:
            await self._begin(description)
        async with self.working_on(description.move, "re-point") as moving:
            if moving.log.last_mark is Mark.REPOINTED:
                return pb.RepointReply(sockets=len(moving.log.record.peer_sockets))
            began = host.boottime_s()
            await reach(Point.BEFORE_REPOINT)
            with span("find sockets"):
                every = await in_thread(ends_here.find, self.node.ranks, list(request.rewires))
            every.check()
            ends = every.ends
            await self._refuse_forbidden(description, ends, Where.SOURCE_FROZEN)
            found = [ends_here.peer_socket(rewire, flow) for rewire, flow in ends]
            off = await in_thread(_all_timers, moving.log, [flow for _, flow in ends])
            await in_thread(moving.log.mark, Mark.REPOINTING, socket_timers=off, peer_sockets=found)
            await in_thread(socket_options.suspend, off)
            try:
                with span("re-point"):
                    stopped_s = await in_thread(self._repoint_all, description.move, found, True)
                await reach(Point.REPOINTING)
            except BaseException:
                moving.interrupted = True  # repaired at once, not with the outcome: a process may be stopped
                moving.wake()
                raise
            await in_thread(moving.log.mark, Mark.REPOINTED)
            metrics.phase("re-point", host.boottime_s() - began)
            log.info("re-pointed %d connections at %s", len(found), description.target_node)
            await reach(Point.REPOINT)
            return pb.RepointReply(sockets=len(found), stopped_s=stopped_s)

    @step
    async def settle(self, move: str, token: bytes) -> pb.SettleReply:
        """With the source's token: drops the filter; after an ABORT points the sockets back first."""
        check_move_id(move)
        if self.journal.find(move) is None:
            return pb.SettleReply(settled=True)
        moving = self.moving(move)
        outcome = next((item for item in Outcome if rules.proves(token, moving.log.nonce, item.value, move)), None)
        if outcome is None:
            raise Denied(f"that is not the source's token for move {move}")
        async with moving.lock:
            await in_thread(moving.log.decide, outcome, "the source's token", "source")
            await self._settle_once(moving)
        return pb.SettleReply(settled=moving.log.last_mark is Mark.SETTLED)

    # ------------------------------------------------------------------ settling

    def adopt_journal(self) -> None:
        """At start: takes up every unsettled move from before the restart."""
        for move_log in self.journal.all():
            if move_log.last_mark is not Mark.SETTLED:
                self._track(move_log, 0.0)

    def _track(self, move_log: MoveLog, driver_first_s: float) -> Moving:
        moving = self.moves[move_log.begin.move] = Moving(move_log)
        moving.interrupted = move_log.last_mark is Mark.REPOINTING
        self.follow(moving, settle_loop(moving, self._settle_once, driver_first_s, ASK_AGAIN_S, "connections"))
        return moving

    async def _settle_once(self, moving: Moving) -> None:
        """Carries out decisions of the rules until it has to wait. The caller holds the move's lock."""
        move_log, asked = moving.log, False
        answers: tuple[Outcome | None, CopyState, bool, bool] = None, CopyState.UNREACHABLE, False, False
        while True:
            known = move_log.outcome
            facts = PeerFacts(move_log.last_mark, known.outcome if known else None, moving.interrupted, *answers)
            decision, moving.waiting_for = rules.peer_next(facts)
            if known is not None and facts.mark is not Mark.SETTLED:
                await reach(Point.BEFORE_SETTLE)
            match decision:
                case PeerDecision.ASK:
                    if asked:
                        return
                    asked, answers = True, await self._ask(moving)
                case PeerDecision.LEARN_COMMIT:
                    await in_thread(move_log.decide, Outcome.COMMIT, moving.waiting_for, "target")
                case PeerDecision.LEARN_ABORT:
                    await in_thread(move_log.decide, Outcome.ABORT, moving.waiting_for, "source")
                case PeerDecision.MEND:
                    await self._bring(move_log, towards_target=False)
                    moving.interrupted = False
                case PeerDecision.FINISH:
                    await self._bring(move_log, towards_target=True)
                    await in_thread(move_log.mark, Mark.REPOINTED)
                case PeerDecision.POINT_BACK:
                    await self._bring(move_log, towards_target=False)
                    await in_thread(move_log.mark, Mark.POINTED_BACK)
                case PeerDecision.UNFILTER:
                    await in_thread(packets.drop_table, peer_table(move_log.move))
                    await in_thread(socket_options.resume, move_log.record.socket_timers)
                    await in_thread(shutil.rmtree, self._states(move_log.move), ignore_errors=True)
                    await in_thread(move_log.mark, Mark.SETTLED)
                case PeerDecision.CLOSE:
                    if move_log.last_mark is not Mark.SETTLED:
                        await in_thread(socket_options.resume, move_log.record.socket_timers)
                        await in_thread(move_log.mark, Mark.SETTLED)
                    moving.waiting_for = ""
                    moving.wake()
                    return

    async def _ask(self, moving: Moving) -> tuple[Outcome | None, CopyState, bool, bool]:
        """The source's outcome, whether the target runs the rank, whether the source answers that it does not know the move,
        and whether it has been silent for LOST_S. No answer counts as undecided."""
        begin, request, outcome = moving.log.begin, pb.MoveRequest(move=moving.log.move), None
        unknowing = lost = False
        try:
            async with self.node.client(begin.source_node, begin.source_endpoint) as source:
                answer = await source.source.GetOutcome(request, timeout_s=5)
            moving.answered_s = host.boottime_s()
            if answer.kind == pb.UNDECIDED:
                return None, CopyState.UNREACHABLE, False, False
            outcome = Outcome(pb.OutcomeKind.Name(answer.kind))
            if outcome is Outcome.ABORT:
                return outcome, CopyState.UNREACHABLE, False, False
            if answer.where == Where.TARGET_RUNNING:
                return outcome, CopyState.RUNNING, False, False
        except NotFound:
            unknowing = True
        except SnapshotError as error:
            lost = host.boottime_s() - moving.answered_s > LOST_S
            log.debug("move %s: the source does not answer: %s", moving.log.move, error.message)
        with contextlib.suppress(SnapshotError):
            async with self.node.client(begin.target_node, begin.target_endpoint) as target:
                copy = await target.target.GetCopy(request, timeout_s=5)
            return outcome, CopyState[pb.Copy.State.Name(copy.state)], unknowing, lost
        return outcome, CopyState.UNREACHABLE, unknowing, lost

    async def _bring(self, move_log: MoveLog, *, towards_target: bool) -> None:
        await in_thread(self._repoint_all, move_log.move, move_log.record.peer_sockets, towards_target)

    # ------------------------------------------------------------------ sockets

    async def _forbidden(self, move: pb.MoveDescription, ends: Ends) -> dict[str, list[str]]:
        """By check: why connections of this move may not be changed here."""
        addresses = await in_thread(self._permission.addresses, move, [rewire for rewire, _ in ends])
        users = await in_thread(self._permission.users, move, [flow for _, flow in ends])
        return {permission.ADDRESSES: addresses, permission.USERS: users}

    async def _refuse_forbidden(self, move: pb.MoveDescription, ends: Ends, where: Where) -> None:
        for name, why in (await self._forbidden(move, ends)).items():
            if why:
                log.warning("connections are not re-pointed: %s: %s", name, "; ".join(why[:5]))
                text = f"{name}: on {self.node.config.node}: {'; '.join(why[:5])}"
                raise Refused(text, remedy=permission.REMEDY[name], where=where)

    def pending(self, pids: Iterable[int]) -> str:
        """The unfinished move of another rank that has re-pointed a socket of these processes; "" if there is none."""
        wanted = set(pids)
        for moving in self.moves.values():
            if moving.log.last_mark is not Mark.SETTLED:
                known = moving.log.record.peer_sockets
                if any(pid in wanted for one in known for pid, _, _ in one.holders):
                    return moving.log.move
        return ""

    def _repoint_all(self, move: str, found: list[PeerSocket], towards_target: bool) -> float:
        """Points every socket at its new addresses, or back at the old ones, under the filter. Blocking. Idempotent, also
        after a crash."""
        _filter(move, found)
        states = self._states(move)
        states.mkdir(mode=0o700, parents=True, exist_ok=True)
        stopped_s = repoint.repoint_all([ends_here.change(one, towards_target, states) for one in found])
        # A connection that came through a forwarding has its real address now: the kernel must not translate it as well.
        tracking.untrack([parse_pair(one.own) for one in found if one.own != one.old])
        return stopped_s

    def _states(self, move: str) -> Path:
        return self.node.config.image_dir / "sockets" / move

    # ------------------------------------------------------------------ small questions

    async def _begin(self, description: pb.MoveDescription) -> Moving:
        for other in self.moves.values():
            if other.log.begin.rank_uid == description.rank_uid and other.log.last_mark is not Mark.SETTLED:
                raise Busy(f"move {other.log.move} of this rank is not settled here yet", where=Where.SOURCE_FROZEN)
        await self._check_source(description)
        begin = Begin(
            move=description.move,
            role="peer",
            rank_uid=description.rank_uid,
            job=description.job,
            rank=description.rank,
            source_node=description.source_node,
            source_endpoint=description.source_endpoint,
            target_node=description.target_node,
            target_endpoint=description.target_endpoint,
            nonce=description.nonce.hex(),
            boot_id=host.boot_id(),
            begun_unix_s=time.time(),
            user_id=description.user_id if description.HasField("user_id") else -1,
        )
        return self._track(await in_thread(self.journal.begin, begin), DRIVER_FIRST_S)

    async def _check_source(self, description: pb.MoveDescription) -> None:
        """A source journals a move before it is announced here. Raises NotFound if this one does not know it, and Unreachable
        if it does not answer: then this node could not learn how the move ends."""
        name, endpoint = description.source_node, description.source_endpoint
        try:
            async with self.node.client(name, endpoint) as source:
                await source.source.GetOutcome(pb.MoveRequest(move=description.move), timeout_s=CHECK_TIMEOUT_S)
        except NotFound as error:
            raise NotFound(
                f"{name} has not begun move {description.move}, so nothing is changed here for it"
            ) from error
        except SnapshotError as error:
            raise Unreachable(
                f"{name}, the source of move {description.move}, does not answer {self.node.config.node} at {endpoint}:"
                f" {error.headline}",
                where=Where.UNKNOWN,
            ) from error


def _check(request: pb.RepointRequest) -> pb.MoveDescription:
    """Validates a request before any of it is journalled, and returns its description of the move."""
    description = request.description
    check_move_id(description.move)
    check_rank_uid(description.rank_uid)
    try:
        for rewire in request.rewires:
            old_pair(rewire), new_pair(rewire)
    except BadAddress as error:
        raise Usage(f"an address to be re-pointed is invalid: {error}") from error
    return description


def _filter(move: str, found: Iterable[PeerSocket]) -> None:
    if pairs := [pair for one in found for pair in one.pairs]:
        packets.hold(peer_table(move), pairs)


def _all_timers(move_log: MoveLog, flows: Iterable[Flow]) -> list[SocketTimers]:
    """The time-outs of these connections; of those that are switched off already, as journalled. Blocking."""
    known = move_log.record.socket_timers
    inodes = {one.inode for one in known}
    fresh = [socket_options.timers_of(flow) for flow in flows if flow.inode not in inodes]
    return known + [one for one in fresh if one is not None]
