"""Protects a job: takes snapshots at intervals, and rolls the job back when a rank has failed or its node is lost.

Decides when to ask; what is decided, the coordinator decides. It may end and be started again at any time. A failure that
comes back after a rollback, before the next snapshot, is a fault of the job: after some tries it is passed on, which is what
the keepers do by themselves when they have waited long enough.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from migrator import jobs
from migrator.cluster import Cluster
from migrator.driver.peers import node_infos
from migrator.find_rank import Found, all_ranks
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions
from migrator.jobs import interval
from migrator.jobs.finding import all_jobs, mine_of
from migrator.jobs.postponing import Postponing
from migrator.jobs.recall import recall
from migrator.jobs.tries import Tries
from migrator.results import Event
from migrator.rollbacks import all_rollbacks, described
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Ambiguous, SnapshotError

LOOK_S = 1.0
#: A node that does not answer, or a rank that no node has, counts as lost after this time.
LOST_S = 10.0
#: The same while a snapshot is taken, when all nodes are busy. The snapshot would wait for a lost node for longer.
BUSY_LOST_S = 20.0
#: How long an undo of such a snapshot may take before the job is rolled back. The coordinator ends it then.
UNDO_S = 5.0
AGAIN_S = 10.0
#: The same for a rollback: the job stands still meanwhile.
ROLL_BACK_AGAIN_S = 3.0
#: For a snapshot that counts, and that a node has not confirmed: the node may be lost, and until then nothing looks for it.
CONFIRM_S = 10.0
#: If this process dies in the middle of a snapshot or of a rollback, the job stands still for so long.
LEASE_S = 15.0


@dataclass
class Sight:
    """What was seen of a job, over time."""

    since_s: dict[str, float] = field(default_factory=dict)  # uid of a rank that is missing -> since when
    nodes: dict[str, str] = field(default_factory=dict)  # uid -> the node that had it last
    numbers: dict[str, int] = field(default_factory=dict)  # uid -> the rank's number
    well_s: float | None = None  # when nothing was wrong, for the last time
    first_home: str = ""  # the home node of rank 0
    first_silent_s: float | None = None  # since when that does not answer

    def trouble(
        self,
        ranks: Sequence[Found],
        silent: Mapping[str, object],
        now_s: float,
        lost_s: float = LOST_S,
        asked_s: float | None = None,
    ) -> str:
        """What is wrong with the job; empty: nothing, as far as can be seen. `ranks`: all that nodes know of the job.
        `lost_s`: after what time a rank that is missing counts as lost. `asked_s`: when the nodes were asked, which is when a
        node that does not answer was silent already."""
        here = {one.rank.uid: one for one in ranks if one.rank.place == pb.Rank.HERE}
        if is_suspended(ranks):
            self.since_s = {}
            return ""
        for uid, one in here.items():
            self.nodes[uid], self.numbers[uid] = one.node, one.rank.rank
            if one.rank.HasField("failed"):
                return f"rank {one.rank.rank} on {one.node} failed ({failure(one.rank.failed)})"
        missing = {uid: node for uid, node in self.nodes.items() if uid not in here}
        self.since_s = {uid: self.since_s.get(uid, now_s if asked_s is None else asked_s) for uid in missing}
        if not missing and here:
            self.well_s = now_s
        for uid, node in missing.items():
            known = node in silent or any(one.rank.uid == uid for one in ranks)
            if known and now_s - self.since_s[uid] >= lost_s:
                return f"{node} lost (does not answer)" if node in silent else f"rank {uid} is not on {node} any more"
        return ""

    def forgotten(self, ranks: Sequence[Found], silent: Mapping[str, object]) -> dict[int, str]:
        """The ranks that no node knows any more, although their nodes answer: they have ended, or their nodes were booted.
        After a rollback a rank may never have been seen to run: its node may be booted as soon as it has come back."""
        known = {one.rank.uid for one in ranks}
        return {
            number: self.nodes[uid]
            for uid, number in self.numbers.items()
            if uid not in known and self.nodes[uid] not in silent
        }

    def first_is_lost(
        self, ranks: Sequence[Found], silent: Mapping[str, object], now_s: float, asked_s: float | None = None
    ) -> bool:
        """Whether the home node of rank 0 has not answered for long."""
        homes = [one.rank.home_node or one.node for one in ranks if one.rank.rank == 0]
        self.first_home = homes[0] if homes else self.first_home
        if self.first_home not in silent:
            self.first_silent_s = None
            return False
        if self.first_silent_s is None:
            self.first_silent_s = now_s if asked_s is None else asked_s
        return now_s - self.first_silent_s >= LOST_S

    def has_ended(self, ranks: Sequence[Found], silent: Mapping[str, object]) -> bool:
        """Whether no node knows a rank of the job."""
        return not ranks and not silent and bool(self.nodes)


def is_suspended(ranks: Sequence[Found]) -> bool:
    """Whether the job is suspended, or is just being resumed: of a rank there is an image, and no process. An image whose
    number another process has is one of an earlier job with the same name."""
    here = {one.rank.rank for one in ranks if one.rank.place == pb.Rank.HERE}
    return any(one.rank.place == pb.Rank.SUSPENDED and one.rank.rank not in here for one in ranks)


def failure(status: int) -> str:
    """A wait status in words."""
    return f"killed by signal {status & 127}" if status & 127 else f"exit status {status >> 8}"


class Protection:
    def __init__(
        self,
        cluster: Cluster,
        options: JobOptions,
        every_s: float | None,
        tries: int,
        say: Callable[[str], None],
        node_mtbf_s: float = interval.NODE_MTBF_S,
        *,
        stands_by: bool = False,
        first_s: float = 0.0,
        postponing: Postponing | None = None,
    ) -> None:
        """`every_s` None: what costs least for the measured pause and `node_mtbf_s`, the time between failures of a node.
        `stands_by`: another one, beside the home keeper of rank 0, protects the job as long as that keeper's node answers.
        `first_s`: the time until the first snapshot, for a job that has just been started."""
        self.cluster, self.options, self.every_s, self.say = cluster, options, every_s, say
        self.node_mtbf_s = node_mtbf_s
        self.stands_by, self.first_s = stands_by, first_s
        self.postponing = postponing or Postponing()
        self._said_no = ""  # why there is no snapshot
        self._warned: Sequence[str] = ()  # with the last snapshot
        self.said_s = 0.0  # the interval that was announced last
        self.sight = Sight()
        self.tries = Tries(tries)
        self.boots: dict[str, str] = {}  # node -> its boot id when all ranks were there for the last time
        self.recalled = False  # whether the records of the job were read
        self.trouble = self.refusal = ""  # what was said last about a rollback that is tried again
        self.suspended = False  # whether it was said that the job is suspended
        self._undoing: set[asyncio.Task[float | None]] = set()  # snapshots that were given up

    async def run(self) -> int:
        """Runs until the job has ended, or has failed too often. Returns the exit code."""
        next_s = time.monotonic() + self.first_s
        self.boots = await self._boots()
        while True:
            asked_s = time.monotonic()
            mine, silent = await self._look()
            now_s = time.monotonic()
            waits = await self._recall(mine) if not self.recalled else ""
            if self.sight.has_ended(mine, silent):
                self.say("the job has ended")
                return 0
            suspended = self._is_suspended(mine, silent)
            rebooted, lost_with_it = ("", "") if suspended else await self._rebooted(self.sight.forgotten(mine, silent))
            trouble = waits or self.sight.trouble(mine, silent, now_s, asked_s=asked_s) or lost_with_it
            if self.stands_by:
                silent_first = self.sight.first_is_lost(mine, silent, now_s, asked_s)
                if silent_first or (rebooted and rebooted == self.sight.first_home):
                    what = "does not answer" if silent_first else "was booted"
                    self.say(f"{self.sight.first_home}, where the job was protected from, {what}: taking over")
                    self.stands_by = self.recalled = False
                    continue
            elif suspended:
                self._wait_for_resumption()
                next_s = (
                    now_s  # the snapshot is of no use then: a job that was suspended since is not rolled back to it
                )
            elif trouble:
                if not self.tries.failed(now_s):
                    self.say(f"{trouble}, after {self.tries.count} rollbacks: it is passed on")
                    return 1
                await self._roll_back(trouble)
            elif now_s >= next_s and mine and not self.sight.since_s:
                if self.suspended:
                    self.say("the job was resumed, and is protected again from its next snapshot on")
                    self.suspended = False
                pause_s = await self._take_or_postpone(mine)
                next_s = time.monotonic() + (AGAIN_S if pause_s is None else self._until_next(mine, pause_s))
            await asyncio.sleep(LOOK_S)

    def _is_suspended(self, ranks: Sequence[Found], silent: Mapping[str, object]) -> bool:
        """It still is if its nodes do not answer for a while."""
        runs = any(one.rank.place == pb.Rank.HERE for one in ranks)
        return is_suspended(ranks) or (self.suspended and bool(silent) and not runs)

    def _wait_for_resumption(self) -> None:
        if not self.suspended:
            job = self.options.job
            self.say(f"the job is suspended: it is protected again when it is resumed (`migrator job resume {job}`)")
        self.suspended, self.trouble, self.refusal = True, "", ""

    async def _look(self) -> tuple[list[Found], Mapping[str, object]]:
        """What nodes know of the job, and the nodes that do not answer."""
        found, silent = await all_ranks(self.cluster)
        return [one for one in found if self._is_mine(one)], silent

    async def _recall(self, ranks: Sequence[Found]) -> str:
        """Learns from the job's records what an earlier protection left. Returns the trouble that the job is in."""
        found, _ = await all_jobs(self.cluster)
        try:
            mine = mine_of(found, self.options.job, self.options.user_id)
        except Ambiguous:  # as `_take` will say
            return ""
        known = recall(mine, {one.rank.uid for one in ranks})
        if known is None:
            return ""
        self.recalled = True
        self.sight.nodes = {**known.nodes, **self.sight.nodes}
        return f"the rollback {known.waits} is not finished" if known.waits else ""

    async def _boots(self) -> dict[str, str]:
        """The boot ids of the nodes that answer."""
        return {node: info.boot_id for node, info in (await node_infos(self.cluster)).items()}

    async def _rebooted(self, ranks: Mapping[int, str]) -> tuple[str, str]:
        """A node that was booted, and what that means: one of these ranks (number -> node) has ended with it. Empty: none."""
        now = await self._boots() if ranks else {}
        for number, node in sorted(ranks.items()):
            if node in now and self.boots.get(node, now[node]) != now[node]:
                return node, f"{node} was booted, and rank {number} has ended with it"
        return "", ""

    def _is_mine(self, one: Found) -> bool:
        return one.rank.job == self.options.job and self.options.user_id in (None, one.rank.user_id)

    def _until_next(self, ranks: Sequence[Found], pause_s: float) -> float:
        if self.every_s is not None:
            return self.every_s
        nodes = {one.node for one in ranks if one.rank.place == pb.Rank.HERE}
        found = interval.best(pause_s, len(nodes), self.node_mtbf_s)
        if abs(found.every_s - self.said_s) > 0.2 * self.said_s:
            self.say(str(found))
            self.said_s = found.every_s
        return found.every_s

    async def _take_or_postpone(self, ranks: Sequence[Found]) -> float | None:
        """Takes a snapshot, if nothing is against it; how long it paused the job."""
        if why := self.postponing.why(ranks):
            self._no_snapshot(why)
            return None
        pause_s = await self._take_unless_lost()
        if pause_s is not None:
            self.postponing.measured(pause_s, ranks)
        return pause_s

    async def _take_unless_lost(self) -> float | None:
        """Takes a snapshot, and gives it up as soon as the job must be rolled back; how long it paused the job."""
        taking = asyncio.create_task(self._take())
        while not taking.done():
            await asyncio.wait([taking], timeout=LOOK_S)
            asked_s = time.monotonic()
            mine, silent = await self._look()
            now_s = time.monotonic()
            if not taking.done() and self.sight.trouble(mine, silent, now_s, BUSY_LOST_S, asked_s):
                taking.cancel()
                self._undoing.add(taking)
                taking.add_done_callback(self._undoing.discard)
                await asyncio.wait([taking], timeout=UNDO_S)
                return None
        return await taking

    async def _take(self) -> float | None:
        """Takes a snapshot; how long it paused the job, None if there is none."""
        boots = await self._boots()
        try:
            asked = replace(self.options, confirm_s=CONFIRM_S, lease_s=LEASE_S)
            result = await jobs.snapshot(self.cluster, asked, lambda event: None)
        except SnapshotError as error:
            self._no_snapshot(f"{error.message}; {error.advice}" if error.advice else error.message)
            return None
        if result.outcome is not JobVerdict.SNAPSHOTTED:
            self._no_snapshot(result.reason)
            return None
        self.recalled, self.boots, self._said_no = True, boots, ""
        for warning in result.warnings:
            if warning not in self._warned:  # each snapshot has them again
                self.say(f"warning: {warning}")
        self._warned = result.warnings
        self.tries.snapshot(time.monotonic())
        self.say(f"snapshot {result.record}: {result.bytes >> 20} MiB, paused {result.pause_s:.2f} s")
        return result.pause_s

    def _no_snapshot(self, why: str) -> None:
        """Says it once for each reason: it is tried again every few seconds."""
        if why != self._said_no:
            self.say(f"no snapshot was taken: {why}")
        self._said_no = why

    async def _not_rolled_back(self, why: str, text: str) -> None:
        """Says it once for each reason, and waits: an attempt sends whole images again."""
        if why != self.refusal:
            self.say(f"the job could not be rolled back yet: {text}")
        self.refusal = why
        await asyncio.sleep(ROLL_BACK_AGAIN_S)

    async def _roll_back(self, trouble: str) -> None:
        down_for_s = time.monotonic() - self.sight.well_s if self.sight.well_s is not None else 0.0
        if trouble != self.trouble:
            self.trouble = trouble
            self.say(f"{trouble}: rolling the job back")
        said = list[str]()

        def hear(event: Event) -> None:
            if event.kind == "note":
                said.append(event.text)
                self.say(event.text)

        try:
            asked = replace(self.options, reason=trouble, down_for_s=down_for_s, lease_s=LEASE_S)
            boots, result = await asyncio.gather(self._boots(), jobs.rollback(self.cluster, asked, hear))
        except SnapshotError as error:
            await self._not_rolled_back(error.message, f"{error.message}. {error.advice}")
            return
        if result.outcome is not JobVerdict.ROLLED_BACK:
            await self._not_rolled_back(result.reason, result.reason)
            return
        self.tries.rolled_back(time.monotonic())
        for image in result.bad_images:
            if image.text not in said:
                self.say(image.text)
        for file in result.changed_files:
            self.say(f"rank {file.rank}: {file.text}")
        self.boots = boots
        self.trouble = self.refusal = ""
        self.sight = Sight(
            nodes={one.uid: one.node for one in result.ranks}, numbers={one.uid: one.rank for one in result.ranks}
        )
        found, _ = await all_rollbacks(self.cluster)
        mine = [one for one in found if (one.job, one.user_id) == (result.job, result.user_id)]
        if mine:
            self.say(max(mine, key=lambda one: one.ended_unix_s).words)
        else:  # the coordinator does not answer just now
            self.say(described(None, down_for_s + result.seconds, trouble))
