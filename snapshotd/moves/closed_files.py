"""Carries files below the carry paths that a rank made and has closed: caches of compilers, temporary files, leftovers.

Programs remember the paths of such files: `torch.compile` dies if its precompiled header is gone. So they move with the rank.

**Which files.** A file counts as the rank's if it belongs to the rank's user and its change time (ctime, which no program can
set) is later than the rank's start. With it goes what else that user has in the same top directory below the carry path,
because a cache from an earlier run is used together with what was added to it; this part is left out if the limit would be
exceeded. Alternatives, measured on a busy machine with two cores:

- *fanotify* tells the pid of a change. Of 41 changes by shells that live for milliseconds, 9 came from a pid that had ended
  when the event was read; of 20,000 files that one program made, 31 % on ext4 and 59 % on tmpfs, where the queue overflowed
  as well. A mark covers the whole file system, on which other programs caused 8 times as many events as the job. And what
  happens while the daemon restarts is lost for ever.
- *the shim* does not see static programs, raw system calls, or children that clear their environment.
- *a mount namespace for each rank* would change what users see of /tmp, and what CRIU dumps.

Looking at 20,000 files took 0.4 to 0.6 s on that machine, and costs nothing while no move is asked for.

**Other jobs of the same user.** Their files may be copied as well, which is harmless: no file on the target is overwritten.
Their shared memory (/dev/shm) is left out, if they have it open or mapped. But their files must never be removed on the
source, and a file that the rank made may be in use by another job. Therefore files are removed on the source only if a move
has made them there for this very rank, or the directory around them, they are unchanged, and that user has no process on the
node any more. All others stay, and may be replaced when the rank comes back, if they are unchanged. On its home node a rank's
files stay while the job runs: launcher and keeper are there, and launchers read files that ranks have written.

**When.** Most is sent while the rank runs (snapshotd/moves/source/closed_files.py). After the freeze everything is looked at
again, and only what has another identity than before is sent. Three kinds of change leave no trace in a file's times:
- a second one within one tick of the clock. Files that were changed shortly before the look are sent after the freeze.
- one through a mapping whose page was written before. So are files that the rank has mapped at the time of the look.
- on tmpfs, one through any mapping. Content that was sent from there is compared after the freeze.

Invariants: all work below the carry paths is done by a child with the rank's own rights. What a move made on its target is
journalled before the child may end; an undo removes it. All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Damaged, Internal, Refused, SnapshotError, Where
from snapshotd.files.as_user import User, UserFiles
from snapshotd.files.closed import MAX_ENTRIES, Row
from snapshotd.moves import closed_manifest
from snapshotd.moves.closed_ledger import ClosedLedger
from snapshotd.moves.closed_manifest import Manifest, Placed
from snapshotd.moves.closed_requests import MadeThere, Packed, Seen, ask, send
from snapshotd.proc import host, mountinfo, users
from snapshotd.proc.users import File

log = logging.getLogger(__name__)

#: A rank's own files may have been made before its keeper noted the time, and clocks are adjusted.
EARLY_S = 2.0
#: A file that was changed this shortly before it was looked at may have been changed again without a trace.
FRESH_S = 1.0
#: What a file costs beside its content, for time limits.
_ROW_BYTES = 64 << 10

Key = tuple[str, str]  # carry path, path below it


@dataclass
class Found:
    """What one look found."""

    roots: list[str]  # the carry paths, as configured
    rows: list[Row]
    complete: bool  # False: there is more than can be looked at
    older_left: int = 0  # older files that were left out, because there are too many or they are too large
    crowd: tuple[int, int] | None = None  # another user whose files made the look end, and how many these are

    def key(self, row: Row) -> Key:
        return self.roots[row.root], row.path

    @property
    def changed_bytes(self) -> int:
        return sum(row.size for row in self.rows if row.changed)

    @property
    def all_bytes(self) -> int:
        return sum(row.size for row in self.rows)

    def within(self, limit_bytes: int) -> Found:
        """Without older files, if they do not fit."""
        if self.all_bytes <= limit_bytes:
            return self
        kept = [row for row in self.rows if row.changed or row.kind == "d"]
        return replace(self, rows=kept, older_left=self.older_left + len(self.rows) - len(kept))

    def without(self, paths: Iterable[str]) -> Found:
        """Without files that move in another way, by their full paths."""
        other = set(paths)
        rows = [row for row in self.rows if row.kind == "d" or f"{self.roots[row.root]}/{row.path}" not in other]
        return replace(self, rows=rows)

    def bytes_by_root(self) -> dict[str, int]:
        found = dict.fromkeys(self.roots, 0)
        for row in self.rows:
            found[self.roots[row.root]] += row.size
        return {root: size for root, size in found.items() if size}


@dataclass(frozen=True)
class Scope:
    """What decides which files count as the rank's, beside their owner."""

    since_unix_s: float  # on this node's clock
    brought: Sequence[str] = ()  # paths that moves brought here with the rank: it has used them, however old they are
    held_elsewhere: Collection[File] = ()  # shared memory of other processes


@dataclass
class Ahead:
    """What was sent while the rank ran."""

    pack: pb.ImageFile | None = None
    content: dict[Key, tuple[list[int], int]] = field(default_factory=dict)  # path -> its identity, offset in the pack
    digests: dict[Key, str] = field(default_factory=dict)  # of content whose identity is not enough
    scope: Scope | None = None  # None: not looked for


@dataclass
class ClosedFiles:
    """The closed files of ranks on this node."""

    state_dir: Path
    roots: Mapping[str, str]  # carry path, as configured -> its real path
    left_open: Callable[[], Mapping[str, list[int]]] = (
        dict  # files that ranks had open when they left: device, inode, …
    )
    _ledger: ClosedLedger = field(init=False)

    def __post_init__(self) -> None:
        self._ledger = ClosedLedger(self.state_dir / "closed-left.json")

    # ------------------------------------------------------------ source

    def find(
        self,
        user: User,
        scope: Scope,
        in_use: Iterable[str] = (),
        exclude: Sequence[Path] = (),
        where: Where = Where.SOURCE_RUNNING,
    ) -> Found:
        """What counts as the rank's. `in_use` are paths that it has open or mapped, `exclude` directories of this daemon."""
        shown = list(self.roots)
        used: list[list[str]] = [[] for _ in shown]
        for path in (*in_use, *scope.brought):
            for number, root in enumerate(shown):
                if path.startswith(f"{root}/"):
                    used[number].append(path.removeprefix(f"{root}/"))
        request = {
            "roots": [self.roots[root] for root in shown],
            "since_ns": int(max(0.0, scope.since_unix_s - EARLY_S) * 1e9),
            "in_use": used,
            "exclude": [str(path) for path in exclude],
            "mounts": [_mounts_below(self.roots[root]) for root in shown],
            "held_elsewhere": list(scope.held_elsewhere),
        }
        with UserFiles(user, where) as files:
            seen = ask(files, "closed_scan", request, Seen)
        if any(not 0 <= row.root < len(shown) or len(row.seen) != 5 for row in seen.rows):
            raise Internal("the file worker sent a malformed answer", where=where)
        return Found(shown, seen.rows, seen.complete, seen.older_left, seen.crowd)

    def held_elsewhere(self, user: User, inside: Collection[int]) -> set[File]:
        """Files below carry paths in memory (/dev/shm) that other processes of the user have open or mapped: other ranks'
        shared memory, which may be large. Elsewhere such a file may be part of a cache that the rank uses too."""
        devices = {place.stat().st_dev for _, place in self._in_memory()}
        return users.held_files(user.user_id, devices, inside) if devices else set()

    def _in_memory(self) -> list[tuple[str, Path]]:
        """The carry paths on tmpfs, and their real paths."""
        places = [(root, Path(real)) for root, real in self.roots.items()]
        return [(root, place) for root, place in places if place.is_dir() and host.is_ram_backed(place)]

    def pack(self, found: Found, rows: Sequence[Row], user: User, pipe: int) -> tuple[set[Key], dict[Key, str]]:
        """Writes the content of these files into a pipe, in this order. Returns those that could not be read, for which as
        many worthless bytes were written, and digests of those on tmpfs. Raises BrokenPipeError if the pipe is not read any
        more."""
        in_memory = {root for root, _ in self._in_memory()}
        request = {
            "roots": [self.roots[root] for root in found.roots],
            "files": [(row.root, row.path, row.seen) for row in rows],
            "with_digest": [root in in_memory for root in found.roots],
        }
        with UserFiles(user, Where.SOURCE_FROZEN) as files:
            packed = ask(files, "closed_pack", request, Packed, [pipe], _size_bytes(rows))
        keys = dict(enumerate(map(found.key, rows)))
        return {keys[number] for number in packed.bad}, {keys[number]: digest for number, digest in packed.digests}

    def unchanged(self, found: Found, rows: Sequence[Row], user: User, digests: Mapping[Key, str]) -> set[Key]:
        """Those of these files whose content has the digest that it had."""
        wanted = [row for row in rows if found.key(row) in digests]
        if not wanted:
            return set()
        request = {
            "roots": [self.roots[root] for root in found.roots],
            "files": [(row.root, row.path, row.seen, digests[found.key(row)]) for row in wanted],
        }
        with UserFiles(user, Where.SOURCE_FROZEN) as files:
            same = ask(files, "closed_same", request, list[int], size_bytes=_size_bytes(wanted))
        return {found.key(wanted[number]) for number in same}

    def leave(
        self,
        rows: Sequence[tuple[str, str, list[int]]],
        user: User,
        own: Callable[[Key, list[int]], bool],
        opened: Iterable[str] = (),
    ) -> None:
        """The rank has left: removes those files for which `own` says that they are the rank's alone, and remembers all as
        ones that may be replaced when it comes back. Rows are carry path, path and identity when the rank was frozen;
        `opened` are paths that it had open, which are remembered elsewhere."""
        mine = [row for row in rows if own((row[0], row[1]), row[2])]
        if mine:
            shown = list(self.roots)
            request = {
                "roots": [self.roots[root] for root in shown],
                "rows": [(shown.index(root), path, seen) for root, path, seen in mine if root in self.roots],
            }
            try:
                with UserFiles(user, write=sorted(self.roots.values())) as files:
                    answer, _ = send(files, "closed_remove", request, size_bytes=len(mine) * _ROW_BYTES)
                log.info("removed %s of %d files that the rank had closed here", answer.get("removed"), len(mine))
            except (OSError, SnapshotError) as error:
                log.warning("files that the rank had closed stay here: %s", error)
        self._ledger.remember(((f"{root}/{path}", seen) for root, path, seen in rows), opened, user.user_id)

    def left(self, path: str) -> list[int] | None:
        """How a file looked that a rank had closed when it left: device, inode, time, size."""
        seen = self._ledger.get(path)
        return [seen[0], seen[1], seen[3], seen[2]] if seen is not None else None

    # ------------------------------------------------------------ target

    def place(
        self,
        folder: Path,
        user: User,
        journal: Callable[[Placed], None],
        made: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Makes what the image in `folder` has, and journals it. Raises Refused if the disk is full or another user has one
        of the names, Damaged if the image contradicts itself; nothing is left then. What cannot be made for another reason is
        logged: the rank has it closed. `made` is what this move made for open files: directories among it get their times
        now."""
        if not (folder / closed_manifest.FILE).exists():
            return
        manifest = closed_manifest.read_manifest(folder / closed_manifest.FILE)
        known = [root for root in manifest.roots if root in self.roots]
        rows, strange = self._checked(manifest, known, folder, {path: [*file] for path, *file in made})
        with contextlib.ExitStack() as stack:
            packs = [_open(folder / name, stack) for name in manifest.packs]
            request = {
                "roots": [self.roots[root] for root in known],
                "rows": rows,
                "groups": sorted(user.all_groups),
            }
            try:
                with UserFiles(user, write=sorted(self.roots.values())) as files:
                    answer = ask(files, "closed_place", request, MadeThere, packs, _size_bytes(rows))
                    journal(Placed(known, answer.made, _tops(known, rows)))
                    files.ask("keep")
            except OSError as error:
                raise Refused(
                    f"closed-files: files that the rank has closed cannot be made here: {error.strerror}",
                    remedy="free the space or the name on the target, or choose another node",
                    where=Where.SOURCE_FROZEN,
                ) from error
        for name in manifest.packs:
            (folder / name).unlink()  # its memory is needed for the restore
        taken = [f"{path}: {reason}" for _, path, reason in answer.taken] + strange
        if taken:
            log.warning("%d closed files of the rank were not made here: %s", len(taken), "; ".join(taken[:5]))
        log.info("made %d closed files of the rank", len(answer.made))

    def _checked(
        self, manifest: Manifest, known: list[str], folder: Path, made: Mapping[str, list[int]]
    ) -> tuple[list[Row], list[str]]:
        """The rows that this node has a place for, with what earlier moves left there. They come from another node."""
        left_open = self.left_open()
        try:
            sizes = [(folder / name).stat().st_size for name in manifest.packs]
        except FileNotFoundError as error:
            raise Damaged(f"the content of closed files is missing: {error}", where=Where.SOURCE_FROZEN) from error
        rows, strange = [], []
        if len(manifest.rows) > MAX_ENTRIES:
            raise Damaged("the list of closed files is too long", where=Where.SOURCE_FROZEN)
        for row in manifest.rows:
            closed_manifest.must_be_valid(row)
            root = manifest.roots[row.root] if row.root < len(manifest.roots) else ""
            if row.kind == "f" and not (
                0 <= row.pack < len(sizes) and row.offset >= 0 and row.offset + row.size <= sizes[row.pack]
            ):
                raise Damaged(
                    f"the content of the closed file {row.path!r} is not in the image", where=Where.SOURCE_FROZEN
                )
            if root not in known:
                strange.append(f"{root}/{row.path}: not below this node's carry_paths")
                continue
            left = made.get(f"{root}/{row.path}") if row.kind == "d" else None
            left = left or self._ledger.get(f"{root}/{row.path}")
            if left is None and (opened := left_open.get(f"{root}/{row.path}")) is not None:
                device, inode, mtime_ns, size = opened[:4]
                left = [device, inode, size, mtime_ns]
            rows.append(row._replace(root=known.index(root), left=left))
        if sum(row.size for row in rows) > sum(sizes):
            raise Damaged("several closed files have the same content in the image", where=Where.SOURCE_FROZEN)
        return rows, strange

    def take_away(self, placed: Placed, user: User) -> None:
        """Undo of `place`: removes what is still what was made."""
        roots = [self.roots[root] for root in placed.roots if root in self.roots]
        if not placed.made or len(roots) != len(placed.roots):
            return
        request = {"roots": roots, "made": placed.made}
        try:
            with UserFiles(user, write=sorted(self.roots.values())) as files:
                answer, _ = send(files, "closed_undo", request, size_bytes=len(placed.made) * _ROW_BYTES)
            if answer.get("stays"):
                log.warning("%s closed files of the move stay here, the first is %s", answer["stays"], answer["first"])
        except (OSError, SnapshotError) as error:
            log.warning("%d closed files of the move stay here: %s", len(placed.made), error)


def _mounts_below(root: str) -> list[str]:
    """What is mounted below a carry path, by the paths below it."""
    points = [str(mount.point) for mount in mountinfo.read()]
    return [point.removeprefix(f"{root}/") for point in points if point.startswith(f"{root}/")]


def _size_bytes(rows: Sequence[Row]) -> int:
    """For time limits."""
    return sum(row.size for row in rows) + len(rows) * _ROW_BYTES


def _tops(roots: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """The paths that are below no other one."""
    paths = {(row.root, row.path) for row in rows}
    return sorted(f"{roots[root]}/{path}" for root, path in paths if (root, os.path.dirname(path)) not in paths)


def _open(path: Path, stack: contextlib.ExitStack) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, handle)
    return handle
