"""Carries out a peer's steps of a move: this node has the peers' sockets of the rank's connections, in processes that stay.

Each is re-pointed in place at the target, under a packet filter, just before COMMIT. Once the outcome is known the filter is
dropped; after an ABORT the socket is pointed back first. The processes are stopped only while their sockets are changed.

Invariant: while this node does not know the outcome, no packet of these connections leaves or enters it, with the old or
the new address; so whatever the rank's sockets do meanwhile, nothing here can be answered with a reset. The state of a socket
is on RAM-backed storage before it is changed. A peer that does not know the outcome asks the source and the target, and
waits (`peer_next` of snapshotd/moves/rules.py).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Busy, Denied, Refused, SnapshotError, Usage, Where
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.moves import rules
from snapshotd.moves.journal import Journal, MoveLog, check_move_id
from snapshotd.moves.moving import Moving
from snapshotd.moves.node import Node
from snapshotd.moves.peers import socket_options
from snapshotd.moves.peers.connections import new_pair, old_pair, peer_table
from snapshotd.moves.record import Begin, PeerSocket, SocketTimers, parse_pair
from snapshotd.moves.rules import CopyState, Mark, Outcome, PeerDecision, PeerFacts
from snapshotd.moves.steps import Steps, settle_loop, step
from snapshotd.net import filter as packets
from snapshotd.net import forward, refusals, repoint, sockets, timers, tracking
from snapshotd.net.flows import BadAddress, Flow, Pair
from snapshotd.proc import host
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
DRIVER_FIRST_S = 3.0


class PeerSteps(Steps):
    """One instance per daemon."""

    role = "peer"
    not_here = "no connection of move {move} ends here"

    def __init__(self, node: Node) -> None:
        # A journal of its own: this node may be the move's source or target too.
        super().__init__(Journal(node.config.state_dir / "peer", node.reserve))
        self.node = node

    # ------------------------------------------------------------------ steps

    async def inspect_connections(self, rewires: list[pb.Rewire]) -> list[pb.Check]:
        """Preflight: whether the peers' sockets are here and can be re-pointed. Changes nothing."""
        try:
            _, problems = await in_thread(self._ends, rewires)
        except (SnapshotError, OSError, ValueError) as error:
            problems = [str(error)]
        name = "connection-ends"
        if problems:
            return [
                pb.Check(
                    name=name,
                    verdict=pb.Check.REFUSE,
                    reason=f"on {self.node.config.node}: {'; '.join(problems[:5])}",
                    remedy="try again in a moment; a connection that is closing or opening settles by itself",
                )
            ]
        return [pb.Check(name=name, reason=f"{len(rewires)} connections end on {self.node.config.node}")]

    @step
    async def suspend_timeouts(self, request: pb.RepointRequest) -> pb.SuspendTimeoutsReply:
        """Before the freeze: switches off the sockets' time-outs, and lets this kernel learn the round-trip time to the
        target."""
        description = _check(request)
        if self.journal.find(description.move) is None:
            await self._begin(description)
        async with self.working_on(description.move, "suspend") as moving:
            ends, _ = await in_thread(self._ends, list(request.rewires))  # later steps report the problems
            await reach(Point.BEFORE_SUSPEND)
            found = await in_thread(_all_timers, moving.log, [flow for _, flow in ends])
            await in_thread(moving.log.mark, Mark.TIMEOUTS_SUSPENDED, socket_timers=found)
            await in_thread(socket_options.suspend, found)
            await reach(Point.SUSPEND)
            for ip in {rewire.new_remote.ip for rewire, _ in ends}:
                await in_thread(timers.meet, ip, description.target_endpoint)
        return pb.SuspendTimeoutsReply(sockets=len(ends))

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
            ends, problems = await in_thread(self._ends, list(request.rewires))
            if problems:
                raise Refused(f"connection-ends: {'; '.join(problems[:5])}", where=Where.SOURCE_FROZEN)
            found = [_peer_socket(rewire, flow) for rewire, flow in ends]
            off = await in_thread(_all_timers, moving.log, [flow for _, flow in ends])
            await in_thread(moving.log.mark, Mark.REPOINTING, socket_timers=off, peer_sockets=found)
            await in_thread(socket_options.suspend, off)
            try:
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
        answers: tuple[Outcome | None, CopyState] = None, CopyState.UNREACHABLE
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
                    asked, answers = True, await self._ask(move_log)
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

    async def _ask(self, move_log: MoveLog) -> tuple[Outcome | None, CopyState]:
        """The source's outcome, and whether the target runs the rank. No answer counts as undecided."""
        begin, request, outcome = move_log.begin, pb.MoveRequest(move=move_log.move), None
        with contextlib.suppress(SnapshotError):
            async with self.node.client(begin.source_node, begin.source_endpoint) as source:
                answer = await source.source.GetOutcome(request, timeout_s=5)
            if answer.kind == pb.UNDECIDED:
                return None, CopyState.UNREACHABLE
            outcome = Outcome(pb.OutcomeKind.Name(answer.kind))
            if outcome is Outcome.ABORT:
                return outcome, CopyState.UNREACHABLE
            if answer.where == Where.TARGET_RUNNING:
                return outcome, CopyState.RUNNING
        with contextlib.suppress(SnapshotError):
            async with self.node.client(begin.target_node, begin.target_endpoint) as target:
                copy = await target.target.GetCopy(request, timeout_s=5)
            return outcome, CopyState[pb.Copy.State.Name(copy.state)]
        return outcome, CopyState.UNREACHABLE

    async def _bring(self, move_log: MoveLog, *, towards_target: bool) -> None:
        await in_thread(self._repoint_all, move_log.move, move_log.record.peer_sockets, towards_target)

    # ------------------------------------------------------------------ sockets

    def _ends(self, rewires: list[pb.Rewire]) -> tuple[list[tuple[pb.Rewire, Flow]], list[str]]:
        """The sockets here that the rewirings are about, and the problems with them. Blocking."""
        pairs = {old_pair(rewire): rewire for rewire in rewires}
        found = self._find(pairs)
        missing = [
            f"the peer's socket of {pair[0]} - {pair[1]} is in no process here" for pair in pairs if pair not in found
        ]
        unheld = [f"{flow} belongs to no process" for flow in found.values() if not flow.holders]
        wrong = [str(problem) for problem in refusals.problems(found.values())]
        leaving = {pid: entry for entry in self.node.ranks.all() if entry.moving for pid in entry.group.pids()}
        holders = {holder.pid for flow in found.values() for holder in flow.holders}
        wrong += [
            f"rank {entry.rank} of job {entry.job}, which has the peer's socket, is being moved itself"
            for entry in {leaving[pid].uid: leaving[pid] for pid in holders & leaving.keys()}.values()
        ]
        return [(pairs[pair], flow) for pair, flow in found.items()], missing + unheld + wrong

    def _find(self, pairs: Iterable[Pair]) -> dict[Pair, Flow]:
        """The peers' sockets, by the address pair as the rank has it. A forwarded connection has another pair here."""
        forwarded = {old: new for known in forward.listed().values() for old, new in known.items()}
        if not forwarded:
            return sockets.find_peers(pairs)
        by_wire = {known.wire: known.socket for known in tracking.translations()}
        names: dict[Pair, Pair] = {}
        for rank, peer in pairs:
            own, far = by_wire.get((peer, rank), (peer, rank))
            names[far, own] = rank, peer
        return {names[name]: flow for name, flow in sockets.find_peers(names, forwarded).items()}

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
        if found:
            packets.hold(peer_table(move), [pair for one in found for pair in one.pairs])
        states = self._states(move)
        states.mkdir(mode=0o700, parents=True, exist_ok=True)
        stopped_s = repoint.repoint_all([_change(one, towards_target, states) for one in found])
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


def _all_timers(move_log: MoveLog, flows: Iterable[Flow]) -> list[SocketTimers]:
    """The time-outs of these connections; of those that are switched off already, as journalled. Blocking."""
    known = move_log.record.socket_timers
    inodes = {one.inode for one in known}
    fresh = [socket_options.timers_of(flow) for flow in flows if flow.inode not in inodes]
    return known + [one for one in fresh if one is not None]


def _peer_socket(rewire: pb.Rewire, flow: Flow) -> PeerSocket:
    rank_old, far_old = old_pair(rewire)
    rank_new, far_new = new_pair(rewire)
    local, remote = flow.endpoints
    return PeerSocket(
        inode=flow.inode,
        holders=[(holder.pid, holder.start_ticks, holder.fd) for holder in flow.holders],
        own=(str(local), str(remote)),
        old=(str(far_old), str(rank_old)),
        new=(str(far_new), str(rank_new)),
    )


def _change(one: PeerSocket, towards_target: bool, states: Path) -> repoint.Change:
    local, remote = parse_pair(one.new if towards_target else one.old)
    return repoint.Change(one.descriptors, one.inode, local, remote, states / str(one.inode))
