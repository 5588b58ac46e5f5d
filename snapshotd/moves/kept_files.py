"""Keeps the data of files that a rank had open for writing at a snapshot, so that a rollback can bring them back.

A small file is copied into the image. Of every file a descriptor is kept by a process that outlives this daemon
(snapshotd/holder/process.py): the data lives as long as that, although the program deletes the file or replaces it, and no
other file gets its inode number, by which the rollback recognises it. There are no hard links, because a link needs a place
in a user's directories, outlives a crash there, and gives a file that its program deletes while it is open another name, with
which the rank could not move any more.

The daemon has no duplicates of these descriptors, unlike of those of device memory: there can be thousands, for as long as
there are snapshots, and what is lost with that process is a file that a rollback cannot bring back, never a rank.

Invariant: what cannot be kept is left out. It never makes a snapshot fail: the rollback says which file it misses.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError
from snapshotd.files.held import Held
from snapshotd.holder.client import Holder
from snapshotd.holder.process import BATCH
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.tree_facts import File, TreeFacts
from snapshotd.preflight.objects import is_carried
from snapshotd.proc import fuse, maps, mountinfo
from snapshotd.proc.fd import read_descriptors
from snapshotd.proc.files import GONE

log = logging.getLogger(__name__)

#: Files up to this size are copied into the image, as long as all of them have no more than ROOM_BYTES.
SMALL_BYTES, ROOM_BYTES = 1 << 20, 8 << 20
#: A file of these that is deleted while something has it open stays in its directory, under another name, and the program
#: could not remove the directory.
_RENAMES_DELETED = ("nfs", "fuse")
_MOST = 4096
_MOST_ROLLBACKS = 64


class Small(NamedTuple):
    """A file that is copied into the image."""

    name: str  # there
    held: Held
    size: int  # at the snapshot


def name_in_image(index: int) -> str:
    """`index`: of the file in TreeFacts."""
    return f"kept-{index}"


class _Rollback:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.files: dict[str, list[int]] = {}


class PutBack:
    """The files that ranks of this node have settled in the last rollbacks. A rank that had the same file, with other content
    or another size at its snapshot, must neither take it away from the rank that has it open by now nor change it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rollbacks: dict[str, _Rollback] = {}  # the last one that was used is the last one here

    @contextmanager
    def turn(self, rollback: str) -> Iterator[dict[str, list[int]]]:
        """Identity of each, by path; the caller adds its own. One rank of a rollback at a time: it may take long, and other
        jobs do not wait for it."""
        with self._lock:
            one = self._rollbacks.pop(rollback, None) or _Rollback()
            self._rollbacks[rollback] = one
            while len(self._rollbacks) > _MOST_ROLLBACKS:
                self._rollbacks.pop(next(iter(self._rollbacks)))
        with one.turn:
            yield one.files

    def recall(self, rollback: str, held: Mapping[str, list[int]]) -> None:
        """`held`: what the journal says about ranks that are restored already. It counts if this daemon has been restarted
        since: else it knows that, and what ranks that are being restored have done."""
        with self._lock:
            if rollback not in self._rollbacks:
                self._rollbacks[rollback] = one = _Rollback()
                one.files.update(held)


class KeptFiles:
    """The descriptors that this node keeps, by the move that has made the image. Everything here blocks."""

    def __init__(self, path: Path) -> None:
        self._holder = Holder(path, "files of snapshots")
        self.put_back = PutBack()

    def ready(self, move: str, facts: pb.RankFacts) -> None:
        """While the rank still runs: starts the process that keeps them, which takes a tenth of a second."""
        if any(fact.writable for fact in facts.files):
            with _logged():
                self._holder.start(move)

    def keep(self, move: str, pids: Sequence[int], described: TreeFacts, carry_paths: Sequence[str]) -> list[Small]:
        """Keeps the files of a frozen rank; returns those that are to be copied into its image: files below `carry_paths` are
        there anyway. Never raises."""
        small: list[Small] = []
        room_bytes = ROOM_BYTES
        with _logged():
            found = _handles(pids, described)
            for index, held in found:
                size, link = described.files[index].size, described.files[index].link
                if size <= min(SMALL_BYTES, room_bytes) and not is_carried(link, carry_paths):
                    room_bytes -= size
                    small.append(Small(name_in_image(index), held, size))
            self._hand_over(move, found, described)
            self._holder.leave(move)
        return small

    def _hand_over(self, move: str, found: Sequence[tuple[int, Held]], described: TreeFacts) -> None:
        kinds = {mount.device: mount.kind for mount in mountinfo.read()}
        wanted = [one for one in found[:_MOST] if not kinds.get(one[1].inode[0], "").startswith(_RENAMES_DELETED)]
        for at in range(0, len(wanted), BATCH):  # the rank waits
            blocks: list[HeldBlock] = []
            handles: list[int] = []
            with ExitStack() as opened:
                for index, held in wanted[at : at + BATCH]:
                    handle = os.open(held.handle, os.O_PATH | os.O_CLOEXEC)
                    opened.callback(os.close, handle)
                    seen = os.fstat(handle)
                    if (seen.st_dev, seen.st_ino) == held.inode:
                        blocks.append(HeldBlock(index, described.files[index].size, seen.st_ino))
                        handles.append(handle)
                if handles:
                    self._holder.keep(move, blocks, handles)

    def descriptors(self, move: str) -> dict[int, int]:
        """O_PATH descriptors of what is kept, by index in TreeFacts; they are the caller's. Raises SnapshotError."""
        found: dict[int, int] = {}
        for blocks, fds in self._holder.held(move):
            for block, fd in zip(blocks, fds, strict=True):
                if block.address not in found:
                    found[block.address] = os.dup(fd)
        return found

    def drop(self, move: str) -> None:
        """The snapshot is not needed any more. Idempotent. Never raises: what is left is dropped when the daemon starts."""
        with _logged():
            self._holder.leave(move)
            self._holder.drop([move])

    def sweep(self, needed: Callable[[str], bool]) -> None:
        """At start: drops what is kept for moves that do not need it."""
        with _logged():
            for move in self._holder.kept():
                if not needed(move):
                    self._holder.drop([move])

    def close(self) -> None:
        """Ends the connection; what is kept, is kept."""
        self._holder.close()


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except (OSError, SnapshotError) as error:
        log.warning("files that the rank has open for writing are not kept for a rollback: %s", error)


def written(described: TreeFacts) -> Iterator[tuple[int, File]]:
    """The regular files, with a name, that processes of the rank had open for writing, or mapped so; and their indices."""
    opened = {
        one.file
        for process in described.processes
        for one in process.open_files
        if one.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    }
    for index in sorted(opened | mapped(described)):
        file = described.files[index]
        if file.is_named_file:
            yield index, file


def mapped(described: TreeFacts) -> set[int]:
    """The files of which processes had shared writable mappings."""
    return {
        one.file
        for process in described.processes
        for one in process.mapped_files
        if one.rights[1:2] == "w" and one.rights[3:4] == "s"
    }


def _handles(pids: Sequence[int], described: TreeFacts) -> list[tuple[int, Held]]:
    """How to open those files, each once, through a readable descriptor if there is one."""
    wanted = {(file.inode, file.link): index for index, file in written(described)}
    found: dict[int, Held] = {}
    for pid in pids if wanted else ():
        try:
            users_devices = fuse.devices_of_users(pid)
            for one in read_descriptors(pid, ("/",), users_devices):
                index = wanted.get((one.stat.st_ino, one.link)) if one.stat is not None else None
                if index is None or one.stat is None or one.stat.st_dev in users_devices:
                    continue
                if index not in found or (one.readable and not found[index].readable):
                    seen = (one.stat.st_dev, one.stat.st_ino)
                    found[index] = Held(f"/proc/{pid}/fd/{one.number}", seen, one.readable)
            for mapping in maps.read(pid, ("/",)):
                index = wanted.get((mapping.inode, mapping.path))
                if index is not None and index not in found:
                    handle = maps.map_file(pid, mapping)
                    stat = os.stat(handle)
                    if stat.st_dev not in users_devices:
                        found[index] = Held(handle, (stat.st_dev, stat.st_ino), readable=mapping.readable)
        except GONE:
            continue
    return sorted(found.items())
