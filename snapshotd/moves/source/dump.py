"""Dumps a rank and streams it: criu writes the image, which goes straight to the target; nothing large is stored here.

The large images (pages, ghost files) are FIFOs that criu splices into and the sender reads. The pipe gives back-pressure, so
the source never has a second copy of the rank's memory. Small images and carried files follow when criu is done. Pages that
the target gets in another way are left out (snapshotd/criu/below.py): those that forked processes share, and large memory,
which is sent beside criu (large_memory.py).

Invariant: when `run` returns or raises, the tree is stopped, its cgroup is frozen, and criu has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, CriuFailed, Damaged, RankGone, Unreachable, Where
from snapshotd.criu import below, links, session
from snapshotd.files.as_user import User, user_of_rank
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.closed_files import Ahead
from snapshotd.moves.description import FILE, ImageDescription
from snapshotd.moves.device import stripe_files
from snapshotd.moves.device.offload import Offload
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.kept_files import Small
from snapshotd.moves.node import Node
from snapshotd.moves.precopied import Precopied
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files, image_fifos, large_memory, left_out, open_files
from snapshotd.moves.source.channel import Opening, opened_beside
from snapshotd.moves.source.describe import describe
from snapshotd.moves.source.large_memory import ReadBeside
from snapshotd.moves.source.sink import sink_of
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.proc import cgroup, host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_own_thread, in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.logs import move_context
from snapshotd.runtime.spans import span
from snapshotd.transport.image.sender import Sender
from snapshotd.transport.image.stream import Stream

log = logging.getLogger(__name__)

DUMP_S = 3600.0
#: Files that criu writes for diagnosis, or reads; a restore does not need them.
_NOT_SENT = {"dump.log", "stats-dump", below.HIDDEN}


class Dump:
    """The dump of one frozen rank, and its transfer to the target."""

    def __init__(
        self,
        node: Node,
        move_log: MoveLog,
        entry: RankEntry,
        facts: pb.RankFacts,
        offload: Offload | None = None,
        ahead: Ahead | None = None,
        precopied: Precopied | None = None,
        twins: TwinMemory | None = None,
    ) -> None:
        self.node, self.log, self.entry, self.facts, self.offload = node, move_log, entry, facts, offload
        self.ahead, self.precopied, self.twins = ahead, precopied or Precopied(), twins
        self.sink = sink_of(node, move_log, facts)
        self.images = images_folder(node, move_log.move)
        self.began_s = host.boottime_s()
        self.dump_seconds = 0.0
        self.expected = 0
        self.sender: Sender | None = None
        self.done = False
        self.carried: list[str] = []
        self.user: User | None = None
        self.linked: list[links.Linked] = []  # files that criu will make links to
        self.layers: Sequence[below.Layer] = []  # pages that criu leaves out
        self.beside: Sequence[ReadBeside] = []
        self.sent_before: Sequence[pb.ImageFile] = []
        self.kept: list[Small] = []

    def progress(self, *, last: bool = False) -> pb.Progress:
        sender = self.sender
        beside_bytes = self.offload.sent_bytes if self.offload else 0
        beside_bytes += sum(size for _, size in self.late) if last else 0
        return pb.Progress(
            bytes_sent=(sender.bytes_sent if sender else 0) + beside_bytes,
            bytes_zero=sender.bytes_zero if sender else 0,
            chunks_resent=sender.chunks_resent if sender else 0,
            bytes_expected=self.expected,
            done=self.done,
            dump_seconds=self.dump_seconds,
            stream_seconds=host.boottime_s() - self.began_s,
            parts=self._parts() if last else (),
        )

    @property
    def late(self) -> list[tuple[str, int]]:
        """The files that get into the image while the rank goes on, and their bytes."""
        return self.twins.files() if self.twins is not None else []

    def _parts(self) -> list[pb.Part]:
        dumped = pb.Part(
            name="criu-dump", seconds=self.dump_seconds, bytes=self.sender.bytes_sent if self.sender else 0
        )
        into_image = self.offload.into_image if self.offload is not None else None
        return [dumped, *(into_image.parts.all if into_image is not None else ())]

    async def run(self) -> None:
        """Dumps, streams, has the target verify every byte, and marks the move STREAMED."""
        begin = self.log.begin
        with move_context(move=begin.move, rank=begin.rank, phase="stream"):
            try:
                await self._run()
            except BaseException:
                await self.sweep(self.node, self.log)
                with contextlib.suppress(OSError):  # criu unfroze it while it worked; SIGSTOP held it meanwhile
                    await in_thread(self.entry.group.freeze, 10)
                raise
            await self.sweep(self.node, self.log)
            assert self.sender is not None
            sent_bytes = self.sender.bytes_sent + sum(size for _, size in self.late)
            mark = functools.partial(self.log.mark, Mark.STREAMED, sent_bytes=sent_bytes, late=self.late)
            await in_thread(mark, carried=self.carried, rank_user=self.user)
            self.done = True
            metrics.phase("stream", host.boottime_s() - self.began_s, self.sender.bytes_sent)
            log.info("streamed %d bytes to %s", self.sender.bytes_sent, begin.target_node)
            await reach(Point.STREAM)

    async def _run(self) -> None:
        begin = self.log.begin
        pids = self.entry.group.pids()
        if not self.entry.process.alive():
            raise RankGone(f"rank {begin.rank} ended before the dump", where=Where.UNKNOWN)
        await reach(Point.BEFORE_DUMP)
        beside_bytes = 0 if begin.kind == "snapshot" else self.log.record.offloaded_bytes
        self.expected = self.entry.memory_bytes() + beside_bytes
        async with opened_beside(self.sink.streams()) as opening:  # while the rank is looked at, and while criu starts
            files = await self._dump_and_send(pids, opening)
        if self.offload is not None and self.offload.into_image is not None:
            await self.offload.into_image.copied()
        if self.twins is not None:
            await in_thread(self.twins.reserve)
        if damaged := await self.sink.seal(files):
            raise Damaged(f"these images arrived damaged: {', '.join(damaged)}", where=Where.SOURCE_FROZEN)

    async def _dump_and_send(self, pids: list[int], opening: Opening) -> list[pb.ImageFile]:
        """Returns what the target has to find."""
        device, follow, by_channel = await self._device()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._find_pages(pids))
                carried, description = await self._look(pids, device, by_device_channel=by_channel)
            user = self.user = await in_thread(user_of_rank, self.entry.pid, self.entry.user_id)
            self.linked = [
                (os.path.dirname(name), *carried.held[name].inode) for name in sorted(set(carried.other_names.values()))
            ]
            if self.linked:  # a criu that is killed leaves its links, and this daemon may be killed with it
                await in_thread(self.log.mark, Mark.FROZEN, linked=self.linked)
            with contextlib.ExitStack() as opened:
                fifos = await in_thread(image_fifos.make, self.images, pids, opened)
                with span("stream") as streaming:
                    written = asyncio.Event()
                    async with asyncio.TaskGroup() as group:
                        # It can begin before the channel is open: what it writes waits in the FIFOs.
                        group.create_task(self._criu_in_turn(written, fifos))
                        streams = await opening
                        files = await self._send(streams, written, fifos, carried, user, follow, description)
                    streaming.bytes = self.sender.bytes_sent if self.sender else 0
                    return files
        except ExceptionGroup as failures:
            raise _cause(failures) from failures

    async def _look(
        self, pids: list[int], device: list[OffloadedMemory], *, by_device_channel: bool
    ) -> tuple[preflight.Carried, ImageDescription]:
        """What the rank has besides memory. Raises Changed if it can no longer move."""
        with span("recheck"):
            new_files = await in_thread(self._recheck, pids)
        with span("list carried files"):
            carried = await in_thread(preflight.list_carried, pids, self.node.config.carry_paths)
        self.carried = [fact.path for fact in carried.facts if stat.S_ISREG(fact.mode)]
        with span("describe"):
            description = await in_thread(
                describe,
                *(self.log.record, self.entry, self.facts, pids, carried, new_files, device),
                by_device_channel=by_device_channel,
            )
        if self.log.begin.kind == "snapshot" and description.tree is not None:
            order = (self.log.move, pids, description.tree, self.node.config.carry_paths)
            self.kept = await in_thread(self.node.kept_files.keep, *order)
            await reach(Point.FILES_KEPT)
        return carried, msgspec.structs.replace(description, kept=self.log.move if self.log.begin.kind else "")

    async def _find_pages(self, pids: list[int]) -> None:
        """Finds the pages that criu leaves out."""
        beside = self.node.config.send_beside_criu and not self.log.begin.coordinator
        with span("find shared pages"):
            found = await in_thread(left_out.find, pids, self.precopied, self.twins, beside=beside)
        self.layers, self.beside, self.sent_before = found.layers, found.beside, found.files
        sent_here = sum(one.size_bytes for one in self.beside)
        self.expected = max(0, self.expected - below.size_bytes(self.layers) + sent_here)

    async def _send(
        self,
        streams: Sequence[Stream],
        written: asyncio.Event,
        fifos: dict[str, int],
        carried: preflight.Carried,
        user: User,
        follow: dict[str, Path],
        description: ImageDescription,
    ) -> list[pb.ImageFile]:
        """Sends everything that criu writes, and what else is needed; returns what the target has to find."""
        async with Sender(streams, self.node.config.chunk_bytes) as self.sender:
            async with asyncio.TaskGroup() as group:
                for name, fd in fifos.items():
                    group.create_task(self.sender.put_fd(name, fd, eof=written))
                group.create_task(large_memory.send(self.sender, self.beside))
                rest = group.create_task(self._send_closed(self.sender, carried, user))
            await written.wait()
            await in_thread(below.complete, self.images, self.layers)
            with span("send small images"):
                async with asyncio.TaskGroup() as group:
                    for name in sorted(path.name for path in self.images.iterdir() if path.is_file()):
                        if name not in _NOT_SENT:
                            group.create_task(self.sender.put_file(name, self.images / name))
            for index, fact in enumerate(carried.facts):
                if stat.S_ISREG(fact.mode):
                    held = carried.held[fact.path]
                    await open_files.send_carried(self.sender, f"carry-{index}", fact.path, held, user)
            for small in self.kept:
                await open_files.send_kept(self.sender, small, user)
            for name, path in follow.items():
                await self.sender.put_file(name, path)
            described = msgspec.structs.replace(description, below=below.described(self.layers))
            async with aiofiles.open(self.images / FILE, "wb") as file:
                await file.write(described.encode())
            await self.sender.put_file(FILE, self.images / FILE)
            with span("finish"):
                return [*await self.sender.finish(), *rest.result(), *self.sent_before]

    async def _send_closed(self, sender: Sender, carried: preflight.Carried, user: User) -> list[pb.ImageFile]:
        with span("send changed closed files"):
            return await closed_files.send_rest(
                self.node, self.log, self.entry, sender, self.ahead, carried.facts, user
            )

    async def _criu_in_turn(self, written: asyncio.Event, fifos: Mapping[str, int]) -> None:
        if not self.linked:
            return await self._criu(written, fifos)
        async with self.node.linking:
            try:
                await self._criu(written, fifos)
            finally:
                await in_thread(links.sweep, self.linked)

    async def _criu(self, written: asyncio.Event, fifos: Mapping[str, int]) -> None:
        """Runs criu in the rank's namespaces, in its own cgroup."""
        began = host.boottime_s()
        group = criu_group(self.log.move).create()
        ours, theirs = session.swrk_pair()
        try:
            with (
                span("start criu"),
                theirs,
                session.verified_namespaces(self.entry.pid, self._guest_keeper_pid()) as entered,
            ):
                hidden = await in_thread(below.hide, self.images, self.layers)
                process = await session.spawn_in(self.node.config.criu, entered, group.path, theirs, hidden)
        except BaseException:
            ours.close()
            raise

        async def on_notify(script: str, _pid: int) -> None:
            if script == "query-ext-files":  # the tree is seized
                await reach(Point.DUMPING)

        dumped = False
        try:
            request = session.dump_request(
                self.images,
                tree.inner_pid(self.entry.pid),
                Path(self.entry.cgroup),
                external_ttys(self.log.record.stdio or {}),
            )
            with span("criu-dump"):
                await session.ask(
                    ours,
                    request,
                    log_path=self.images / "dump.log",
                    timeout_s=DUMP_S,
                    where=Where.SOURCE_FROZEN,
                    on_notify=on_notify,
                )
            dumped = True
        finally:
            ours.close()
            with span("end criu"):
                if dumped:  # it only waits for another request
                    await in_thread(group.kill, 10)
                else:
                    await in_own_thread(image_fifos.end_criu, group, self.images, fifos.values())
                await process.wait()
                group.remove()
        if not self.entry.group.frozen():
            raise CriuFailed("criu left the rank unfrozen", where=Where.SOURCE_FROZEN)
        self.dump_seconds = host.boottime_s() - began
        written.set()

    def _guest_keeper_pid(self) -> int:
        """0 if the rank was started on this node."""
        return self.entry.keeper_pid if self.entry.role == "guest" and self.entry.keeper_alive() else 0

    async def _device(self) -> tuple[list[OffloadedMemory], dict[str, Path], bool]:
        """The offloaded device memory as the target finds it; those of its files that follow the images, by their names
        there; and whether the others come through the device-memory channel. A channel that failed is closed first: nothing
        may arrive both ways. The files of a snapshot are moved into the image's folder later."""
        device = self.log.record.offloaded
        if self.offload is None or self.offload.has_channel:
            return device, {}, True
        if self.log.begin.kind == "snapshot":
            return device, {}, False
        if self.offload.holds:
            why = "; ".join(self.offload.warnings) or "its connections broke"
            raise Unreachable(
                f"the device-memory channel failed, and held device memory cannot follow the image: {why}",
                remedy="the rank continues on its source; a plain retry is safe",
                where=Where.SOURCE_FROZEN,
            )
        await self.offload.close()
        folder, there = (
            stripe_files.folder_of(self.node.config.image_dir, self.log.move),
            stripe_files.following(device),
        )
        files = [folder / name for one in device for name in one.stripes]
        return there, dict(zip((name for one in there for name in one.stripes), files, strict=True)), not files

    def _recheck(self, pids: list[int]) -> list[pb.FileFact]:
        """What the rank has mapped since preflight. Raises Changed if it can no longer move. Before its files are used."""
        found = preflight.recheck(
            pids,
            self.facts,
            carry_paths=self.node.config.carry_paths,
            keeper_pid=self.entry.keeper_pid,
            keeper_is_guest=self.entry.role == "guest",
        )
        for check in preflight.refusals(found.checks):
            if check.name == "rank-alive":
                raise RankGone(f"rank {self.log.begin.rank} ended: {check.reason}", where=Where.ENDED)
            raise Changed(f"{check.name}: {check.reason}", remedy=check.remedy, where=Where.SOURCE_FROZEN)
        return found.new_files

    @staticmethod
    async def sweep(node: Node, move_log: MoveLog) -> None:
        """Removes what a dump, also one that crashed, leaves here: criu, its cgroup, its links, the images."""
        group = criu_group(move_log.move)
        with span("sweep"):
            await in_own_thread(image_fifos.end_criu, group, images_folder(node, move_log.move))
            group.remove()
            await in_thread(links.sweep, move_log.record.linked)
            await in_thread(shutil.rmtree, images_folder(node, move_log.move), ignore_errors=True)


def images_folder(node: Node, move: str) -> Path:
    return node.config.image_dir / "out" / move


def criu_group(move: str) -> Cgroup:
    return Cgroup(cgroup.for_guests() / f"criu-{move}")


def external_ttys(stdio: dict[str, Any]) -> list[str]:
    """The pseudo-terminals whose master the keeper has: criu must not look for it in the tree."""
    keys = [channel.get("key", "") for channel in stdio.get("channels", [])]
    return sorted({key for key in keys if key.startswith("tty[")})


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to report: criu's own error is more precise than that of the stream which it broke."""
    flat = [_cause(error) if isinstance(error, ExceptionGroup) else error for error in failures.exceptions]
    return next((error for error in flat if isinstance(error, CriuFailed)), flat[0])
