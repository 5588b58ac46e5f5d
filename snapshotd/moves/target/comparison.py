"""Compares a restored copy with what its source described, before anything of the copy may run.

Criu opens the rank's files by their paths, as root. A path that was swapped for a link meanwhile, or that a hostile source
made up, would give the rank a file of root. So every descriptor and every mapping of every restored process must be the
file that the source saw, and one that the rank's user could open on this node. What differs is listed; the copy is then
discarded.
"""

from __future__ import annotations

import errno
import os
import re
import stat as mode_of
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from snapshotd.files import paths
from snapshotd.moves.tree_facts import File, MappedFile, ProcessFacts, TreeFacts
from snapshotd.preflight.digest import content_digest
from snapshotd.preflight.objects import Kind, is_carried, is_node_cache
from snapshotd.proc.maps import DELETED
from snapshotd.proc.privileges import Credentials
from snapshotd.runtime import user_rights

#: What criu appends to the name of an unlinked file if that name is in use, and to that of a directory.
_CRIU_NAME = re.compile(rf"(\.cr_link|\.cr\.[0-9a-f]+\.ghost){re.escape(DELETED)}")
#: Flags of open(2) that change what a descriptor can do. The others are hints, or differ between kernels.
_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_PATH
#: Bits of the mode that the target never gives to a file that moves with a rank.
_NEVER_CARRIED = mode_of.S_ISUID | mode_of.S_ISGID | mode_of.S_ISVTX
_TERMINAL_MAJORS = range(136, 144)
_CREDENTIALS = tuple(Credentials.__struct_fields__)


def differences(
    source: TreeFacts,
    copy: TreeFacts,
    *,
    other_names: Mapping[str, str],
    carry_paths: Sequence[str],
    changed: Container[str] = (),
) -> list[str]:
    """How the restored copy differs from its source, each difference in a sentence. Blocks.

    `other_names` maps the removed name of a file to the one under which it was moved. `changed`: files that have other
    content, as the user wants it."""
    found = _Comparison(source.files, copy.files, other_names, carry_paths, changed)
    wanted = {process.pid: process for process in source.processes}
    here = {process.pid: process for process in copy.processes}
    found.problems += [f"process {pid} was not restored" for pid in wanted if pid not in here]
    found.problems += [f"process {pid} was not described by the source" for pid in here if pid not in wanted]
    for pid in wanted.keys() & here.keys():
        found.compare(wanted[pid], here[pid])
    return found.problems


class _Comparison:
    def __init__(
        self,
        there: list[File],
        here: list[File],
        other_names: Mapping[str, str],
        carry_paths: Sequence[str],
        changed: Container[str],
    ) -> None:
        self.problems: list[str] = []
        self._changed = changed
        self._there, self._here = there, here
        self._other_names, self._carry_paths = other_names, carry_paths
        self._known: dict[tuple[int, int, bool], str] = {}
        self._resolved: dict[str, str] = {}

    def compare(self, wanted: ProcessFacts, here: ProcessFacts) -> None:
        problems = [
            *credential_differences(wanted.credentials, here.credentials),
            *_thread_differences(wanted, here),
            *self._paths(wanted, here),
            *self._descriptors(wanted, here),
            *self._mappings(wanted, here),
        ]
        self.problems += [f"process {wanted.pid}: {problem}" for problem in problems]

    def _paths(self, wanted: ProcessFacts, here: ProcessFacts) -> Iterable[str]:
        for what, there, now in (
            ("working directory", wanted.cwd, here.cwd),
            ("root directory", wanted.root, here.root),
            ("program", wanted.program, here.program),
        ):
            if not self._same_path(there, now):
                yield f"its {what} is {now}, on the source {there}"

    def _descriptors(self, wanted: ProcessFacts, here: ProcessFacts) -> Iterable[str]:
        there = {one.number: one for one in wanted.open_files}
        now = {one.number: one for one in here.open_files}
        for number in sorted(there.keys() ^ now.keys()):
            missing = number in there
            name = self._there[there[number].file].link if missing else self._here[now[number].file].link
            yield f"descriptor {number} ({name}) {'was not restored' if missing else 'is not open on the source'}"
        for number in sorted(there.keys() & now.keys()):
            one, other = there[number], now[number]
            file = self._there[one.file]
            writable = one.flags & os.O_ACCMODE != os.O_RDONLY
            if problem := self._difference(one.file, other.file, content=not writable):
                yield f"descriptor {number} ({file.link}) {problem}"
            elif file.kind in _NAMED and (one.flags ^ other.flags) & _FLAGS:
                yield f"descriptor {number} ({file.link}) has the flags {other.flags:o}, on the source {one.flags:o}"

    def _mappings(self, wanted: ProcessFacts, here: ProcessFacts) -> Iterable[str]:
        """The kernel may merge or split neighbours, so parts of mappings are compared."""
        there = sorted(wanted.mapped_files, key=lambda one: one.start)
        covered = dict.fromkeys(range(len(there)), 0)
        starts = [one.start for one in there]
        for now in here.mapped_files:
            name = self._here[now.file].link
            at, index = now.start, max(0, bisect_right(starts, now.start) - 1)
            while at < now.end:
                if index >= len(there) or not there[index].start <= at < there[index].end:
                    yield f"the mapping of {name} at {at:x} is not on the source"
                    break
                one = there[index]
                if problem := self._mapping_difference(one, now):
                    yield f"the mapping of {self._there[one.file].link} at {at:x} {problem}"
                    break
                until = min(now.end, one.end)
                covered[index] += until - at
                at, index = until, index + 1
            else:
                continue
            return
        for index, length in covered.items():
            if length != there[index].end - there[index].start:
                yield f"the mapping of {self._there[there[index].file].link} at {there[index].start:x} was not restored"

    def _mapping_difference(self, one: MappedFile, now: MappedFile) -> str:
        if problem := self._difference(
            one.file, now.file, content=not one.rights.endswith("s") or "w" not in one.rights
        ):
            return problem
        if one.rights != now.rights:
            return f"has the rights {now.rights}, on the source {one.rights}"
        if self._there[one.file].kind in _NAMED and one.offset - one.start != now.offset - now.start:
            return "shows another part of the file"
        return ""

    # ---- files

    def _difference(self, there: int, here: int, *, content: bool) -> str:
        key = there, here, content
        if key not in self._known:
            self._known[key] = self._compare_files(self._there[there], self._here[here], content=content)
        return self._known[key]

    def _compare_files(self, there: File, here: File, *, content: bool) -> str:
        named = self._name_of(there)
        kind = Kind.FILE.name if named != there.link and there.kind == Kind.NAMELESS.name else there.kind
        if kind != here.kind:
            return f"is {here.link}"
        if kind == Kind.DEVICE.name:
            return "" if _same_device(there, here) else f"is {here.link}, another device"
        if kind == Kind.ANON.name:
            return "" if _anonymous(there.link) == _anonymous(here.link) else f"is {here.link}"
        if kind not in _NAMED:
            return ""
        if not self._same_path(named, here.link):
            return f"is {here.link}"
        if kind in (Kind.PSEUDO.name, Kind.DIRECTORY.name):
            return ""
        if (there.user_id, there.group_id) != (here.user_id, here.group_id):
            return (
                f"belongs to user {here.user_id} and group {here.group_id}, on the source to {there.user_id} and"
                f" {there.group_id}"
            )
        ignored = _NEVER_CARRIED if is_carried(here.link, self._carry_paths) else 0
        if (there.mode ^ here.mode) & ~ignored:
            return f"has mode {here.mode:o}, on the source {there.mode:o}"
        has_content = content and there.link not in self._changed
        if kind == Kind.FILE.name and has_content and not self._same_content(there, here):
            return "has another size, time and content than on the source"
        return ""

    def _name_of(self, file: File) -> str:
        removed = file.link.removesuffix(DELETED)
        return self._other_names.get(removed, file.link) if file.link.endswith(DELETED) else file.link

    def _same_path(self, there: str, here: str) -> bool:
        if there == here:
            return True
        if there.endswith(DELETED):
            name = there.removesuffix(DELETED)
            return here.startswith(name) and _CRIU_NAME.fullmatch(here.removeprefix(name)) is not None
        if there not in self._resolved:
            self._resolved[there] = through_root_links(there)
        return self._resolved[there] == here

    def _same_content(self, there: File, here: File) -> bool:
        """By inode where the nodes share the file (others may write to it), by size where it was moved, else by time or
        digest."""
        if not mode_of.S_ISREG(there.mode):
            return True
        if here.inode == there.inode or (here.size, here.mtime_ns) == (there.size, there.mtime_ns):
            return True
        if is_carried(here.link, self._carry_paths):
            return here.size == there.size
        if is_node_cache(here.link) and here.size >= there.size:
            return True
        if not there.digest:
            return False
        try:
            handle = _open_restored(here)
        except OSError:
            return False
        try:
            return content_digest(handle, there.size).hex() == there.digest
        except OSError:
            return False
        finally:
            os.close(handle)


def _open_restored(file: File) -> int:
    """A descriptor for reading of a file that the copy has. Raises OSError. The user may put something else into its place
    meanwhile: a device must not be opened at all, because that alone may have an effect, as it has on a watchdog."""
    handle = paths.openat2(None, file.link, os.O_PATH | os.O_NOFOLLOW, paths.NO_LINKS)
    try:
        found = os.fstat(handle)
        if (found.st_ino, found.st_size) != (file.inode, file.size):
            raise OSError(errno.ESTALE, "it was replaced", file.link)
        return paths.reopen(handle)
    finally:
        os.close(handle)


_NAMED = frozenset(kind.name for kind in (Kind.FILE, Kind.FIFO, Kind.GHOST, Kind.NAMELESS, Kind.DIRECTORY, Kind.PSEUDO))


def credential_differences(wanted: Credentials, here: Credentials) -> list[str]:
    return [
        f"its {name.replace('_', ' ')} are {getattr(here, name)}, on the source {getattr(wanted, name)}"
        for name in _CREDENTIALS
        if getattr(wanted, name) != getattr(here, name)
    ]


def _thread_differences(wanted: ProcessFacts, here: ProcessFacts) -> Iterable[str]:
    for thread in sorted(wanted.thread_credentials.keys() | here.thread_credentials.keys()):
        there = wanted.thread_credentials.get(thread, wanted.credentials)
        now = here.thread_credentials.get(thread, here.credentials)
        yield from (f"thread {thread}: {problem}" for problem in credential_differences(there, now))


def _same_device(there: File, here: File) -> bool:
    """A terminal gets another number on each node; its own keeper made it."""
    terminals = [os.major(file.device) in _TERMINAL_MAJORS for file in (there, here)]
    return all(terminals) or there.device == here.device


def _anonymous(link: str) -> str:
    return "pidfd" if link.startswith("pidfd:[") or link == "anon_inode:[pidfd]" else link


def through_root_links(path: str) -> str:
    """Where a path leads if only links are followed that no user can have made: those of root, in directories of root.

    A node may have /data where another has a link of that name, which is the administrator's decision."""
    left = path.strip("/").split("/")
    at, links = "/", 0
    while left:
        folder = os.stat(at) if at != "" else None
        if folder is None or folder.st_uid != 0 or folder.st_mode & 0o022:
            break
        name = left[0]
        here = os.path.join(at, name)
        try:
            found = os.lstat(here)
        except OSError:
            break
        left = left[1:]
        if not mode_of.S_ISLNK(found.st_mode):
            if left and not mode_of.S_ISDIR(found.st_mode):
                return path
            at = here
            continue
        links += 1
        if found.st_uid != 0 or links > 40:
            return path
        text = os.readlink(here)
        if ".." in text.split("/"):
            return path
        left = [part for part in text.split("/") if part not in ("", ".")] + left
        at = "/" if text.startswith("/") else at
    return os.path.join(at, *left)


# ---------------------------------------------------------------- rights


def beyond_rights(copy: TreeFacts) -> list[str]:
    """What a restored process has open or mapped although its user may not open it on this node. Blocks.

    A file that the user owns counts as allowed: its owner can change its mode. Unlinked files came with the image."""
    found = []
    for process in copy.processes:
        who = process.credentials
        if 0 in who.all_user_ids:
            continue
        wanted: dict[int, int] = {}
        for one in process.open_files:
            if not one.flags & os.O_PATH:
                wanted[one.file] = wanted.get(one.file, 0) | _RIGHTS[one.flags & os.O_ACCMODE]
        for mapped in process.mapped_files:
            writes = "w" in mapped.rights and mapped.rights.endswith("s")
            wanted[mapped.file] = wanted.get(mapped.file, 0) | (os.R_OK | os.W_OK if writes else os.X_OK)
        checked = [(copy.files[index], mode) for index, mode in wanted.items() if copy.files[index].kind in _CHECKED]
        look = _looker([(file, mode) for file, mode in checked if file.user_id != who.user_ids[3]])
        problems = user_rights.call(who.user_ids[3], who.group_ids[3], who.groups, look)
        found += [f"process {process.pid}: {problem}" for problem in problems]
    return found


_RIGHTS = {os.O_RDONLY: os.R_OK, os.O_WRONLY: os.W_OK, os.O_RDWR: os.R_OK | os.W_OK, 3: 0}
_CHECKED = frozenset(kind.name for kind in (Kind.FILE, Kind.FIFO, Kind.DIRECTORY))


def _looker(files: Sequence[tuple[File, int]]) -> Callable[[], list[str]]:
    def look() -> list[str]:
        found = []
        for file, mode in files:
            try:
                handle = os.open(file.link, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                found.append(f"its user cannot reach {file.link} ({error.strerror})")
                continue
            try:
                if not _is_this(os.fstat(handle), file):
                    found.append(f"{file.link} is no longer the file that was restored")
                elif not _may(handle, mode):
                    writes = " for writing" if mode & os.W_OK else ""
                    found.append(f"its user may not open {file.link}{writes}")
            finally:
                os.close(handle)
        return found

    return look


def _is_this(stat: os.stat_result, file: File) -> bool:
    """overlayfs may give one file two inode numbers. No user can give a file to another, so the owner counts then."""
    same = (stat.st_mode, stat.st_uid, stat.st_gid) == (file.mode, file.user_id, file.group_id)
    return same and (stat.st_ino == file.inode or (stat.st_size, stat.st_mtime_ns) == (file.size, file.mtime_ns))


def _may(handle: int, mode: int) -> bool:
    """X_OK stands for a mapping: a program can be executed, and so mapped, without the right to read it."""
    if mode == os.X_OK:
        return user_rights.may_access(handle, os.R_OK) or user_rights.may_access(handle, os.X_OK)
    return user_rights.may_access(handle, mode & ~os.X_OK)
