"""Sends a rank's memory to the target while the rank runs, in rounds, and knows at the freeze what the target has.

Each process whose memory is followed (snapshotd/precopy/) has one file on the target, with a slot for each page. A round
sends the pages that were written since the last one. At the freeze it is known which pages were sent and not written since;
the others are sent in one more round, while criu dumps the rest of the rank (last_round.py).

Invariant: a page counts as sent only if its process was frozen, and had not written it, after its content was read. Whatever
fails here costs time in the pause, and nothing else: the move goes on without, and says so. Nothing here outlives the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from snapshotd.api.errors import SnapshotError, Timeout, Undone, Where
from snapshotd.inprocess import shimctl
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.precopied import Followed, Precopy
from snapshotd.moves.source.channel import streams_to_target
from snapshotd.precopy import devices, rounds
from snapshotd.precopy.tracker import Chunk, Tracker, Unsupported
from snapshotd.precopy.waiting import Waiting
from snapshotd.proc import host, stat, tree
from snapshotd.proc.files import GONE
from snapshotd.proc.page_frames import PAGE_BYTES
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span
from snapshotd.transport.image.frame import Frame, Kind, hole_frame
from snapshotd.transport.image.overlay import round_name
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)

#: Together with closed files, less than the step may take.
LIMIT_S = 240.0
#: For the round that is being sent when that time is over.
GRACE_S = 30.0
#: How long there is work, before a rest.
_WORK_S = 0.1
_STOPPED_EVERY_S = 0.1
#: Between protecting pages and reading them. A write by another process (process_vm_writev) may have looked at a page before
#: it was protected, and change it after: it is done by then.
_SETTLE_S = 0.2


async def run(
    node: Node,
    move_log: MoveLog,
    entry: RankEntry,
    percent: float,
    memory_bytes: int,
    stopped: Callable[[], bool],
) -> Precopy:
    """Sends rounds until a further one is not worth its time. Raises nothing but CancelledError and faults.

    `percent`: how much of its time the job may lose. `stopped`: whether the move is being undone."""
    made = Precopy()
    if percent <= 0 or move_log.begin.coordinator or memory_bytes < rounds.LEAST_BYTES:
        return made
    if PAGE_BYTES != rounds.PAGE_BYTES:  # on some arm64 machines
        made.warnings.append("no memory was sent before the freeze, so the pause is longer: the kernel has large pages")
        return made
    began_s = host.boottime_s()
    try:
        with span("follow memory"):
            made.followed = await in_thread(_follow, entry, made.warnings)
        await reach(Point.PRECOPY)
        if made.followed:
            made.begun = {one.inner_pid for one in made.followed}
            with span("send memory") as sending:
                await _unless(stopped, made, _Rounds(node, move_log, made, percent / 100).run())
                sending.bytes = made.sent_bytes
    except (OSError, SnapshotError, TimeoutError) as error:
        await in_thread(made.close)
        reason = error.message if isinstance(error, SnapshotError) else str(error)
        log.warning("no memory is sent before the freeze: %s", reason)
        made.warnings.append(f"no memory was sent before the freeze, so the pause is longer: {reason}")
    except BaseException:
        await in_thread(made.close)
        raise
    if made.sent_bytes:
        log.info("sent %d MiB of memory ahead in %.1f s", made.sent_bytes >> 20, host.boottime_s() - began_s)
    return made


async def _unless(stopped: Callable[[], bool], made: Precopy, work: Coroutine[None, None, None]) -> None:
    """Does the work until it is done, the move is undone, or it takes too long: a network may hang."""
    ends_s = host.boottime_s() + LIMIT_S + GRACE_S
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_STOPPED_EVERY_S)
            if stopped():
                raise Undone("the move is being undone", where=Where.SOURCE_RUNNING)
            if host.boottime_s() > ends_s:
                raise Timeout(f"sending it took more than {LIMIT_S:.0f} s", where=Where.SOURCE_RUNNING)
        await task
    finally:
        if not task.done():
            await in_thread(made.close)  # a thread that waits for a child gets an answer
            task.cancel()
            await asyncio.wait([task])


def _follow(entry: RankEntry, warnings: list[str]) -> list[Followed]:
    """Begins to follow what can be followed; the reason for the rest is logged. Blocking."""
    found: list[Followed] = []
    pids = entry.group.pids()
    try:
        for pid in pids:
            tracker: Tracker | None = None
            try:
                process = tree.Process.of(pid)
                mailbox = shimctl.find(process)
                if mailbox is None or not mailbox.serves():
                    continue
                if reason := devices.writers_of(pid):
                    log.info("the memory of process %d is not sent before the freeze: %s", pid, reason)
                    continue
                tracker = Tracker(process)
                tracker.begin(mailbox, forked=stat.read(pid).parent in pids)
                if tracker.layout.size_bytes:
                    found.append(Followed(tracker, tree.inner_pid(pid)))
                    tracker = None
            except Unsupported as error:
                log.info("no memory is sent before the freeze: %s", error)
                warnings.append(f"no memory was sent before the freeze, so the pause is longer: {error}")
                break
            except (*GONE, OSError, SnapshotError) as error:
                log.info("the memory of process %d is not sent before the freeze: %s", pid, error)
            finally:
                if tracker is not None:
                    tracker.close()
    except BaseException:
        for one in found:
            one.tracker.close()
        raise
    return found


class _Rounds:
    """The rounds of one move."""

    def __init__(self, node: Node, move_log: MoveLog, made: Precopy, limit: float) -> None:
        self._node, self._begin, self._made, self._limit = node, move_log.begin, made, limit
        self._began_s = host.boottime_s()
        self._pids = [one.pid for one in made.followed]

    async def run(self) -> None:
        self._waiting = await in_thread(Waiting, self._pids)
        self._pace = rounds.Pace(self._limit)
        self._working_s = host.boottime_s()
        total_bytes = sum(one.tracker.layout.size_bytes for one in self._made.followed)
        sent: list[int] = []
        async with (
            streams_to_target(self._node, self._begin) as streams,
            Sender(streams, self._node.config.chunk_bytes) as sender,
        ):
            scanned_s, lost = host.boottime_s(), 0.0
            while lost <= self._limit and rounds.go_on(sent, total_bytes, host.boottime_s() - self._began_s, LIMIT_S):
                before_s, scanned_s = scanned_s, host.boottime_s()
                before_bytes, self._working_s = sender.bytes_sent, scanned_s
                found_bytes = 0
                for one in [one for one in self._made.followed if not one.failed]:
                    found_bytes += await self._round(sender, one, len(sent) + 1)
                await sender.stored()
                if sent:  # in the first round all pages are found
                    lost = rounds.lost_by_faults(found_bytes, scanned_s - before_s, self._waiting.busy)
                sent.append(found_bytes)
                log.info(
                    "round %d: %d MiB in %.2f s, the job loses %.1f %% by page faults, work %.0f %% of the time",
                    *(len(sent), found_bytes >> 20, host.boottime_s() - scanned_s, lost * 100, self._pace.share * 100),
                )
                self._made.sent_bytes += sender.bytes_sent - before_bytes
                await reach(Point.PRECOPIED_ROUND)
            self._made.files = await sender.finish()
        for one in [one for one in self._made.followed if one.failed]:
            await in_thread(one.tracker.close)
        self._made.followed = [one for one in self._made.followed if not one.failed]

    async def _round(self, sender: Sender, one: Followed, number: int) -> int:
        """Sends what the process has written; how many bytes that were. If it has ended, it is followed no more."""
        one.rounds = number
        name = round_name(one.file, number)
        try:
            if reason := await in_thread(devices.writers_of, one.pid):
                raise Unsupported(reason)
            found_bytes = await in_thread(one.tracker.scan)
            await asyncio.sleep(_SETTLE_S)
            if reason := await in_thread(devices.writers_of, one.pid):
                raise Unsupported(reason)
        except (*GONE, OSError, SnapshotError, Unsupported) as error:
            self._give_up(one, error)
            return 0
        reading = Reading(one, name, strong=sender.strong)
        while not reading.over:
            await sender.put_frames([name], reading.some)
            if reading.failure is not None:
                self._give_up(one, reading.failure)
            if host.boottime_s() > self._working_s + _WORK_S:
                await self._rest(sender)
        return found_bytes

    def _give_up(self, one: Followed, error: Exception) -> None:
        log.info("the memory of process %d is no longer sent before the freeze: %s", one.pid, error)
        one.failed = str(error)

    async def _rest(self, sender: Sender) -> None:
        """Lets the job alone for as long as the limit demands."""
        await sender.stored()
        working = await in_thread(self._waiting.part)
        await asyncio.sleep(self._pace.rest_s(host.boottime_s() - self._working_s))
        self._pace.measured(working, await in_thread(self._waiting.part))
        self._working_s = host.boottime_s()


class Reading:
    """Makes the chunks of one round of one process: pages, and holes between them, so that they cover the file. Each call of
    the sender gets a few, and then a pause can be made."""

    SOME = 8

    def __init__(self, followed: Followed, name: str, *, strong: bool) -> None:
        self._followed, self._tracker = followed, followed.tracker
        self._name, self._strong = name, strong
        self._at = 0
        self._next: Chunk | None = None
        self._left = self.SOME
        self.over = False
        self.failure: Exception | None = None

    def some(self, sequence: int) -> Frame | None:
        """The next chunk; None after some of them. Blocking."""
        if self.over or not self._left:
            self._left = self.SOME
            return None
        self._left -= 1
        try:
            if self._next is None:
                self._next = self._tracker.next()
        except (OSError, SnapshotError) as error:
            self.failure, self.over = error, True
            return None
        chunk, end = self._next, self._tracker.layout.size_bytes
        hole_end = chunk.offset if chunk is not None else end
        if hole_end > self._at:
            frame = hole_frame(sequence, self._name, self._at, hole_end - self._at, strong=self._strong)
            self._at = hole_end
        elif chunk is not None:
            self._followed.sending(chunk)
            frame = Frame(
                *(Kind.DATA, sequence, self._name, chunk.offset, chunk.length),
                bitmap=chunk.bitmap,
                payload_bytes=len(chunk.payload),
                payload=chunk.payload,
                strong=self._strong,
            )
            frame.digest = frame.computed_digest()
            self._at, self._next = chunk.offset + chunk.length, None
        else:
            self.over = True
            return None
        return frame
