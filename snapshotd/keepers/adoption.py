"""Updates the registry when keepers connect, reconnect or end.

Invariant: a rank never outlives its home keeper, on whichever node it runs. A keeper that only lost its link (daemon
restart) changes nothing. If a keeper is killed during a move, the move is ended first, so that no other node runs a rank
without a keeper.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable

from shim.keeper.holdback import HOLD_BACK_S
from snapshotd.api.errors import Damaged, Denied, NotFound, SnapshotError, Usage
from snapshotd.keepers.hello import Hello
from snapshotd.keepers.job_names import Name, OtherNodes, free_name
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.listener import KeeperEvents, NotWanted, Welcome
from snapshotd.keepers.ranks import RankEntry, cgroup_for_home, new_uid
from snapshotd.keepers.relay import Relays
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.peers.forwarding import Forwarding
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.source.steps import SourceSteps
from snapshotd.moves.target.steps import TargetSteps
from snapshotd.moves.target.waking import asleep, wake
from snapshotd.proc import host
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import USERS, in_thread

log = logging.getLogger(__name__)

KILL_S = 10.0
#: How often keepers that have not reconnected are checked.
CHECK_AGAIN_S = 1.0
SIGKILL_STATUS = 9


class Adoption:
    """Keeps the registry consistent with the keepers."""

    def __init__(
        self, node: Node, source: SourceSteps, target: TargetSteps, relays: Relays, forwarding: Forwarding
    ) -> None:
        self.node, self.source, self.target, self.relays = node, source, target, relays
        self.forwarding = forwarding
        self._others = OtherNodes(node)
        self._reports: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.Task[None] | None = None

    def events(self) -> KeeperEvents:
        return KeeperEvents(self.connected, self.closed, self.exited, self.died, self.failed)

    async def adopt(self, hello: Hello, keeper: Process, rank: Process | None) -> Welcome:
        """Registers the rank of a keeper: a new rank gets a uid and a cgroup, a known one is looked up."""
        if hello.role == "home":
            elsewhere = await self._others.names() if hello.alone and not hello.uid else []
            entry = self._new_home(hello, keeper, rank, elsewhere) if not hello.uid else self._known_home(hello, keeper)
        else:
            entry = self._known_guest(hello, keeper)
        if rank is not None:
            if entry.pid and entry.process != rank and not entry.away_node:
                raise Denied(
                    f"rank {entry.uid} is process {entry.pid}, not {rank.pid}",
                    remedy="start the rank with `migrator run`",
                )
            entry.pid, entry.start_ticks = rank.pid, rank.start_ticks
        await in_thread(self.node.ranks.put, entry)
        user_id = entry.process_user_id if entry.role == "guest" and entry.process_user_id >= 0 else None
        return Welcome(entry.uid, self.node.config.node, self.node.config.advertise, user_id)

    def _new_home(self, hello: Hello, keeper: Process, rank: Process | None, elsewhere: list[Name]) -> RankEntry:
        """`elsewhere`: the names of jobs on other nodes. Without a pause: two keepers must not get the same name."""
        if rank is None:
            raise Usage(
                "a keeper registered a new rank without its process", remedy="start the rank with `migrator run`"
            )
        mine = [entry for entry in self.node.ranks.all() if entry.role == "home" and entry.user_id == hello.user_id]
        for entry in mine:
            if entry.keeper == keeper:
                if entry.relay_key == hello.relay_key and entry.process == rank:
                    return entry  # it did not receive the answer to its first hello
                raise Denied(f"this keeper is that of rank {entry.uid}", remedy="use one `migrator run` for each rank")
        if hello.user_id != 0 and len(mine) >= self.node.config.ranks_per_user:
            raise Denied(
                f"user {hello.user_id} has {len(mine)} ranks on this node, which is the limit",
                remedy="end some of them, or have ranks_per_user raised in snapshotd.toml",
            )
        job = hello.job
        if hello.alone:
            here = [(entry.user_id, entry.rank, entry.job) for entry in self.node.ranks.all()]
            job = free_name(hello.job, hello.user_id, hello.rank, [*here, *elsewhere])
        uid = new_uid(job, hello.rank)
        group = cgroup_for_home(keeper.pid, uid)
        group.add(rank.pid)
        return self._home_entry(hello, job, keeper, uid, str(group.path))

    def _known_home(self, hello: Hello, keeper: Process) -> RankEntry:
        entry = self.node.ranks.get(hello.uid, "home")
        if entry is None:
            raise NotFound(f"rank {hello.uid} is not registered on this node")
        if entry.keeper != keeper or entry.relay_key != hello.relay_key:
            raise Denied(f"rank {hello.uid} has another keeper", remedy="start the rank with `migrator run`")
        return entry

    def _known_guest(self, hello: Hello, keeper: Process) -> RankEntry:
        entry = self.node.ranks.get(hello.uid, "guest")
        # A keeper belongs to one move. That of an earlier move of the same rank has the same uid and the same key.
        if entry is not None and entry.restored_by not in {"", hello.move}:
            entry = None
        if entry is None or entry.relay_key != hello.relay_key:
            known = self.node.journal.find(hello.move) if hello.move else None
            if known is not None and known.last_mark in {Mark.HELD, Mark.ACTIVATED}:
                raise NotFound(f"rank {hello.uid} is not registered on this node")
            raise NotWanted(f"rank {hello.uid} is not being restored on this node by move {hello.move}")
        if entry.keeper_pid and entry.keeper != keeper:
            raise Denied(f"rank {hello.uid} has another keeper", remedy="start the rank with `migrator run`")
        # The daemon starts it as root. It becomes the rank's user when it was welcomed, and connects as that one later.
        if hello.user_id != 0 and not (entry.keeper_pid and hello.user_id == entry.process_user_id):
            raise Denied(
                f"user {hello.user_id} may not run a guest keeper",
                remedy="use `migrator run`; only the daemon starts guest keepers",
            )
        entry.keeper_pid, entry.keeper_start_ticks = keeper.pid, keeper.start_ticks
        return entry

    def _home_entry(self, hello: Hello, job: str, keeper: Process, uid: str, cgroup: str) -> RankEntry:
        return RankEntry(
            uid=uid,
            job=job,
            rank=hello.rank,
            role="home",
            keeper_pid=keeper.pid,
            keeper_start_ticks=keeper.start_ticks,
            cgroup=cgroup,
            home_node=self.node.config.node,
            home_endpoint=self.node.config.advertise,
            relay_key=hello.relay_key,
            boot_id=host.boot_id(),
            user_id=hello.user_id,
            command=hello.command,
            started_unix_s=hello.started_unix_s,
        )

    # ------------------------------------------------------------------ events

    async def connected(self, link: KeeperLink) -> None:
        """Informs a keeper that has just been welcomed of decisions that were made while it was not connected."""
        entry = self.node.ranks.get(link.uid, link.role)
        if entry is None:
            return
        entry.link = link
        if entry.tethered:
            await link.protect()
        if link.role == "guest":
            await self._guest_connected(entry, link)
        elif move := link.info.held_move:
            move_log = self.node.journal.find(move)
            outcome = move_log.outcome if move_log is not None else None
            if move_log is None or (outcome is not None and outcome.outcome is Outcome.ABORT):
                await link.resume(move)
            elif outcome is not None and move_log.last_mark is Mark.SETTLED:
                await link.away(move, move_log.begin.target_node)

    async def _guest_connected(self, entry: RankEntry, link: KeeperLink) -> None:
        restore = self.target.restores.get(link.info.move)
        if restore is not None and not restore.link.done():
            restore.link.set_result(link)
            return
        move_log = self.node.journal.find(link.info.move) if link.info.move else None
        if move_log is not None and move_log.last_mark is Mark.ACTIVATED:
            if not link.info.activated:
                await link.activated(move_log.move)
            self.relays.start(entry, link)
        if (held := link.info.held_move) and (move_log := self.node.journal.find(held)) is not None:
            outcome = move_log.outcome
            if outcome is not None and outcome.outcome is Outcome.ABORT:
                await link.resume(held)

    async def closed(self, link: KeeperLink, keeper_alive: bool) -> None:
        entry = self.node.ranks.get(link.uid, link.role)
        if entry is None or entry.keeper != link.keeper:
            return
        if entry.link is link:
            entry.link = None
        if not keeper_alive:
            await self._keeper_died(entry)

    async def _keeper_died(self, entry: RankEntry) -> None:
        """The keeper has died, so its rank is ended."""
        log.warning("the %s keeper of rank %s has died", entry.role, entry.uid)
        if entry.away_node:
            await in_thread(self.node.ranks.bury, entry)
            self.forwarding.withdraw(entry)
            return
        moving = self.source.moves.get(entry.moving)
        if moving is not None and not moving.log.known.continued:  # else its snapshot does not need the rank any more
            reason = f"the rank's {entry.role} keeper was killed"
            if entry.role == "home":
                await self.source.abandon(entry.moving, reason)
            else:  # its home keeper lives: if the target holds a complete copy, that copy continues
                await self.source.abort(entry.moving, reason, "source")
            outcome = moving.log.outcome
            if outcome is not None and outcome.outcome is Outcome.COMMIT and entry.role == "home":
                await in_thread(self.node.ranks.bury, entry)
            return  # the copy here ends with the outcome, now or when the target has answered
        if entry.moving in self.target.moves:
            return  # a held copy has died: the source decides the outcome of the move
        await self.lost(entry)

    async def lost(self, entry: RankEntry) -> None:
        """Ends a rank on this node that has no keeper any more, and informs its home keeper if that is on another node: not
        at once if its job has snapshots, because it may be rolled back."""
        await _kill(entry)
        try:
            is_over = await in_thread(self.node.ranks.has_ended, entry)
        except Damaged as error:
            log.error("%s", error.message)
            is_over = False
        if entry.role == "guest" and entry.tethered and not is_over and entry.failed is None:
            entry.failed = SIGKILL_STATUS
            self._follow(self._lost_later(entry))
            return
        self.node.ranks.remove(entry)
        self.forwarding.withdraw(entry)
        if entry.role == "guest" and not is_over:  # of an incarnation that is over nothing is reported
            self._follow(self.relays.report_end(entry, SIGKILL_STATUS))
        elif entry.role == "guest" and entry.cut_off:
            self._follow(self.relays.tell_home(entry, entry.cut_off))

    async def _lost_later(self, entry: RankEntry) -> None:
        await asyncio.sleep(HOLD_BACK_S)
        if self.node.ranks.get(entry.uid, entry.role) is entry:  # else the job was rolled back
            await self.lost(entry)

    def _follow(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def failed(self, link: KeeperLink, status: int) -> None:
        """The rank has failed. Its keeper waits for a rollback of the job, and then passes the failure on."""
        entry = self.node.ranks.get(link.uid, link.role)
        if entry is not None:
            log.warning("rank %s failed with wait status %d; its keeper holds that back", entry.uid, status)
            entry.failed = status

    async def exited(self, link: KeeperLink, status: int) -> None:
        """The rank has ended by itself. Its keeper passes the exit status to the launcher."""
        entry = self.node.ranks.get(link.uid, link.role)
        if entry is None:
            return
        log.info("rank %s ended with wait status %d", entry.uid, status)
        self.forwarding.withdraw(entry)
        await _kill(entry)
        self.node.ranks.remove(entry)
        if entry.moving in self.source.moves:
            self.source.moves[entry.moving].wake()

    async def died(self, link: KeeperLink, move: str, status: int) -> None:
        """The local process ended during a move. The keeper waits until the rules have decided the outcome."""
        log.warning("rank %s ended during move %s with wait status %d", link.uid, move, status)
        if (moving := self.source.moves.get(move)) is not None:
            moving.wake()

    # ------------------------------------------------------------------ at start

    async def sweep(self) -> None:
        """After a restart: ends ranks whose keeper has died meanwhile, and wakes activated copies that were not woken.

        A failure of one rank is only logged: the daemon must start for all others."""
        for moving in [*self.source.moves.values(), *self.target.moves.values()]:
            role = moving.log.record.keeper_role or ("home" if moving.log.begin.role == "source" else "guest")
            if (entry := self.node.ranks.get(moving.log.begin.rank_uid, role)) is not None:
                entry.moving = moving.log.move
        for move_log in self.node.journal.all():
            if move_log.begin.role == "target" and move_log.last_mark is Mark.ACTIVATED:
                entry = self.node.ranks.get(move_log.begin.rank_uid, "guest")
                if entry is None or entry.moving:
                    continue
                if entry.cgroup == (await in_thread(move_log.whole)).cgroup:
                    await self._wake(entry, move_log)
        entries = self.node.ranks.all()
        await self._end_unkept(entries)
        self._waiting = asyncio.create_task(self._await_keepers(entries), name="keepers from before a restart")

    async def stop(self) -> None:
        """Stops waiting for keepers from before a restart."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)

    async def _end_unkept(self, entries: Iterable[RankEntry]) -> None:
        for entry in entries:
            if not entry.keeper_alive():
                try:
                    await self._keeper_died(entry)
                except (SnapshotError, OSError) as error:  # the daemon must serve the other ranks
                    log.error("rank %s has no keeper and could not be ended yet: %s", entry.uid, error)

    async def _await_keepers(self, entries: Iterable[RankEntry]) -> None:
        """Watches keepers that have not reconnected yet: if one of them is killed, no closed link reports it."""
        left = [one for one in entries if one.keeper_alive()]
        while left:
            await asyncio.sleep(CHECK_AGAIN_S)
            left = [one for one in left if one.link is None and self.node.ranks.get(one.uid, one.role) is one]
            await self._end_unkept(left)
            left = [one for one in left if one.keeper_alive()]

    async def _wake(self, entry: RankEntry, move_log: MoveLog) -> None:
        try:
            if await in_thread(asleep, move_log, entry.group):
                await wake(move_log)
        except (SnapshotError, OSError) as error:
            log.error("rank %s may run here but could not be woken yet: %s", entry.uid, error)
            if entry.keeper_alive():
                entry.moving = move_log.move  # no other move may begin until it is woken
                self.target.keep_waking(move_log)


async def _kill(entry: RankEntry) -> None:
    """Not in the threads of moves: processes that do not die (in a system call of a FUSE file system) take all of KILL_S."""
    async with USERS.turn(entry.process_user_id if entry.process_user_id >= 0 else entry.user_id):
        await in_thread(entry.group.kill, KILL_S)
