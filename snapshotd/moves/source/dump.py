"""Dumps a rank and streams it: criu writes the image, which goes straight to the target; nothing large is stored here.

The large images (pages, ghost files) are FIFOs that criu splices into and the sender reads. The pipe gives back-pressure, so
the source never has a second copy of the rank's memory. Small images and carried files follow when criu is done.

Invariant: when `run` returns or raises, the tree is stopped, its cgroup is frozen, and criu has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, CriuFailed, Damaged, RankGone, Refused, Where
from snapshotd.criu import links, session
from snapshotd.files.as_user import User, user_of_rank
from snapshotd.files.held import Held, open_held
from snapshotd.keepers import relay_keys
from snapshotd.keepers.ranks import RankEntry
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.moves import affinity, image_seal, tree_facts
from snapshotd.moves.closed_files import Ahead
from snapshotd.moves.description import FILE, ImageDescription
from snapshotd.moves.device import stripe_files
from snapshotd.moves.device.offload import Offload
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record import OffloadedMemory
from snapshotd.moves.rules import Mark
from snapshotd.moves.source import closed_files
from snapshotd.moves.source.channel import streams_to_target
from snapshotd.proc import cgroup, cgroup_limits, deleted, gpu_cpus, host, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.credentials import Identity
from snapshotd.runtime import metrics
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.logs import move_context
from snapshotd.transport.image.fifo import make_fifo
from snapshotd.transport.image.sender import Sender

log = logging.getLogger(__name__)

DUMP_S = 3600.0
#: FIFOs beyond the foreseeable ones. criu makes a plain file where one is missing, which works but takes memory.
SPARE_FIFOS = 8
#: Files that criu writes for diagnosis; a restore does not need them.
_NOT_SENT = {"dump.log", "stats-dump"}


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
    ) -> None:
        self.node, self.log, self.entry, self.facts, self.offload = node, move_log, entry, facts, offload
        self.ahead = ahead
        self.images = images_folder(node, move_log.move)
        self.began_s = host.boottime_s()
        self.dump_seconds = 0.0
        self.expected = 0
        self.sender: Sender | None = None
        self.done = False
        self.carried: list[str] = []
        self.user: User | None = None
        self.linked: list[links.Linked] = []  # files that criu will make links to

    def progress(self) -> pb.Progress:
        sender = self.sender
        return pb.Progress(
            bytes_sent=(sender.bytes_sent if sender else 0) + (self.offload.sent_bytes if self.offload else 0),
            bytes_zero=sender.bytes_zero if sender else 0,
            chunks_resent=sender.chunks_resent if sender else 0,
            bytes_expected=self.expected,
            done=self.done,
            dump_seconds=self.dump_seconds,
            stream_seconds=host.boottime_s() - self.began_s,
        )

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
            sent_bytes = self.sender.bytes_sent
            await in_thread(
                self.log.mark, Mark.STREAMED, sent_bytes=sent_bytes, carried=self.carried, rank_user=self.user
            )
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
        self.expected = self.entry.memory_bytes() + self.log.record.offloaded_bytes
        device, follow = await self._device()
        new_files = await in_thread(self._recheck, pids)
        carried = await in_thread(preflight.list_carried, pids, self.node.config.carry_paths)
        self.carried = [fact.path for fact in carried.facts if stat.S_ISREG(fact.mode)]
        description = await in_thread(self._describe, pids, carried, new_files, device, by_device_channel=not follow)
        user = self.user = await in_thread(user_of_rank, self.entry.pid, self.entry.user_id)
        self.linked = [
            (os.path.dirname(name), *carried.held[name].inode) for name in sorted(set(carried.other_names.values()))
        ]
        if self.linked:  # a criu that is killed leaves its links, and this daemon may be killed with it
            await in_thread(self.log.mark, Mark.FROZEN, linked=self.linked)
        with contextlib.ExitStack() as opened:
            fifos = await in_thread(self._make_fifos, pids, opened)
            try:
                files = await self._send(fifos, carried, user, follow, description)
            except ExceptionGroup as failures:
                raise _cause(failures) from failures
        signature = await in_thread(image_seal.sign, self.node.credentials, image_seal.statement(begin, files))
        request = pb.SealRequest(move=begin.move, files=files, signature=signature)
        async with self.node.client(begin.target_node, begin.target_endpoint) as client:
            sealed = await client.target.Seal(request, timeout_s=60)
        if sealed.damaged:
            raise Damaged(f"these images arrived damaged: {', '.join(sealed.damaged)}", where=Where.SOURCE_FROZEN)

    async def _send(
        self,
        fifos: dict[str, int],
        carried: preflight.Carried,
        user: User,
        follow: dict[str, Path],
        description: ImageDescription,
    ) -> list[pb.ImageFile]:
        """Dumps, and sends everything; returns what the target has to find."""
        async with (
            streams_to_target(self.node, self.log.begin) as streams,
            Sender(streams, self.node.config.chunk_bytes) as self.sender,
        ):
            written = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for name, fd in fifos.items():
                    group.create_task(self.sender.put_fd(name, fd, eof=written))
                group.create_task(self._criu_in_turn(written))
                rest = group.create_task(
                    closed_files.send_rest(
                        self.node, self.log, self.entry, self.sender, self.ahead, carried.facts, user
                    )
                )
            for name in sorted(path.name for path in self.images.iterdir() if path.is_file()):
                if name not in _NOT_SENT:
                    await self.sender.put_file(name, self.images / name)
            for index, fact in enumerate(carried.facts):
                if stat.S_ISREG(fact.mode):
                    await self._send_carried(f"carry-{index}", fact.path, carried.held[fact.path], user)
            for name, path in follow.items():
                await self.sender.put_file(name, path)
            async with aiofiles.open(self.images / FILE, "wb") as file:
                await file.write(description.encode())
            await self.sender.put_file(FILE, self.images / FILE)
            return [*await self.sender.finish(), *rest.result()]

    async def _send_carried(self, name: str, path: str, held: Held, user: User) -> None:
        """Sends a file as the rank itself has it open or mapped: its path may lead to another user's file by now."""
        assert self.sender is not None
        try:
            fd = await in_thread(open_held, held, user)
        except OSError as error:
            raise Refused(
                f"carried-files: {path} cannot be read with the rights of user {user.user_id}: {error}",
                remedy="have the job close the file, or open it for reading too, and retry",
                where=Where.SOURCE_FROZEN,
            ) from error
        try:
            await self.sender.put_open_file(name, fd)
        finally:
            os.close(fd)

    async def _criu_in_turn(self, written: asyncio.Event) -> None:
        if not self.linked:
            return await self._criu(written)
        async with self.node.linking:
            try:
                await self._criu(written)
            finally:
                await in_thread(links.sweep, self.linked)

    async def _criu(self, written: asyncio.Event) -> None:
        """Runs criu in the rank's namespaces, in its own cgroup."""
        began = host.boottime_s()
        group = criu_group(self.log.move).create()
        ours, theirs = session.swrk_pair()
        try:
            with theirs, session.verified_namespaces(self.entry.pid, self._guest_keeper_pid()) as entered:
                process = await session.spawn_in(self.node.config.criu, entered, group.path, theirs)
        except BaseException:
            ours.close()
            raise

        async def on_notify(script: str, _pid: int) -> None:
            if script == "query-ext-files":  # the tree is seized
                await reach(Point.DUMPING)

        try:
            request = session.dump_request(
                self.images,
                tree.inner_pid(self.entry.pid),
                Path(self.entry.cgroup),
                external_ttys(self.log.record.stdio or {}),
            )
            await session.ask(
                ours,
                request,
                log_path=self.images / "dump.log",
                timeout_s=DUMP_S,
                where=Where.SOURCE_FROZEN,
                on_notify=on_notify,
            )
        finally:
            ours.close()
            await in_thread(group.kill, 10)
            await process.wait()
            group.remove()
        if not self.entry.group.frozen():
            raise CriuFailed("criu left the rank unfrozen", where=Where.SOURCE_FROZEN)
        self.dump_seconds = host.boottime_s() - began
        written.set()

    def _guest_keeper_pid(self) -> int:
        """0 if the rank was started on this node."""
        return self.entry.keeper_pid if self.entry.role == "guest" and self.entry.keeper_alive() else 0

    def _make_fifos(self, pids: list[int], opened: contextlib.ExitStack) -> dict[str, int]:
        """Makes a FIFO for every possibly large image. criu numbers pages by process, then shared memory; ghosts by file.

        `opened` closes their descriptors, also those that were opened before a failure."""
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir(mode=0o700, parents=True)
        unnamed = deleted.count_files(pids)
        names = [f"pages-{number}.img" for number in range(1, len(pids) + unnamed + SPARE_FIFOS)]
        names += [f"ghost-file-{number:x}.img" for number in range(1, unnamed + SPARE_FIFOS)]
        fifos: dict[str, int] = {}
        for name in names:
            fifos[name] = make_fifo(self.images, name)
            opened.callback(os.close, fifos[name])
        return fifos

    async def _device(self) -> tuple[list[OffloadedMemory], dict[str, Path]]:
        """The offloaded device memory as the target finds it, and those of its files that follow the images, by their names
        there. A channel that failed is closed first: nothing may arrive both ways."""
        device = self.log.record.offloaded
        if self.offload is None or self.offload.has_channel:
            return device, {}
        await self.offload.close()
        folder, there = (
            stripe_files.folder_of(self.node.config.image_dir, self.log.move),
            stripe_files.following(device),
        )
        files = [folder / name for one in device for name in one.stripes]
        return there, dict(zip((name for one in there for name in one.stripes), files, strict=True))

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

    def _describe(
        self,
        pids: list[int],
        carried: preflight.Carried,
        new_files: list[pb.FileFact],
        device: list[OffloadedMemory],
        *,
        by_device_channel: bool,
    ) -> ImageDescription:
        known, entry = self.log.record, self.entry
        identity = Identity.of(entry.pid)  # `recheck` has refused programs that have none
        if identity.to_proto() != self.facts.identity:
            raise Changed(
                f"credentials: the rank ran as {Identity.of_proto(self.facts.identity)} when it was checked,"
                f" and now as {identity}",
                remedy="retry: preflight will then see the present user and groups",
                where=Where.SOURCE_FROZEN,
            )
        return ImageDescription(
            root=tree.inner_pid(entry.pid),
            command=entry.command,
            started_unix_s=entry.started_unix_s,
            moves=entry.moves,
            user_id=entry.user_id,
            identity=identity,
            limits=cgroup_limits.read(entry.group.path, cgroup.mount_point()),
            stopped_before=known.stopped_before or [],
            affinity=affinity.read(pids),
            cpus=sorted(os.sched_getaffinity(0)),
            gpus=(gpus := [use.uuid for use in self.facts.gpu.uses]),
            gpu_cpus=sorted(gpu_cpus.near(gpus)),
            carried=carried.facts,
            other_names=carried.other_names,
            stdio=_stdio_of(known.stdio),
            relay_key=entry.relay_key,
            relay_keys=relay_keys.to_hand_over(entry),
            home_node=entry.home_node,
            home_endpoint=entry.home_endpoint,
            rewires=known.rewires,
            nodes=known.nodes,
            former=[(old, new) for old, new in entry.former],
            socket_options=known.socket_options,
            new_files=new_files,
            tree=tree_facts.gather(pids, [*self.facts.files, *new_files]),
            cuda_pids=[tree.inner_pid(process.pid) for process in known.cuda],
            checkpoint_bytes=max(0, known.device_bytes - known.offloaded_bytes),
            nccl_instances=[(tree.inner_pid(one.pid), one.instance) for one in known.nccl_processes],
            offloaded=device,
            by_device_channel=by_device_channel,
        )

    @staticmethod
    async def sweep(node: Node, move_log: MoveLog) -> None:
        """Removes what a dump, also one that crashed, leaves here: criu, its cgroup, its links, the images."""
        group = criu_group(move_log.move)
        await in_thread(group.kill, 10)
        group.remove()
        await in_thread(links.sweep, move_log.record.linked)
        await in_thread(shutil.rmtree, images_folder(node, move_log.move), ignore_errors=True)


def images_folder(node: Node, move: str) -> Path:
    return node.config.image_dir / "out" / move


def criu_group(move: str) -> Cgroup:
    return Cgroup(cgroup.for_guests() / f"criu-{move}")


def _stdio_of(journalled: dict[str, Any] | None) -> StdioState:
    try:
        return msgspec.convert(journalled, StdioState)
    except msgspec.ValidationError as error:
        raise Damaged(f"the journalled stdio state is invalid: {error}", where=Where.SOURCE_FROZEN) from error


def external_ttys(stdio: dict[str, Any]) -> list[str]:
    """The pseudo-terminals whose master the keeper has: criu must not look for it in the tree."""
    keys = [channel.get("key", "") for channel in stdio.get("channels", [])]
    return sorted({key for key in keys if key.startswith("tty[")})


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """The failure to report: criu's own error is more precise than that of the stream which it broke."""
    flat = [_cause(error) if isinstance(error, ExceptionGroup) else error for error in failures.exceptions]
    return next((error for error in flat if isinstance(error, CriuFailed)), flat[0])
