"""Whether the target has the rank's files, and whether they are identical. Checked on the target, path by path.

Identical means: the same type and permissions (CRIU requires both), and either the same size and time or the same digest.
A file that the rank writes to only has to exist, because other processes may write to it as well. If it does not exist,
its directory must: the rank keeps running and may have renamed the file. A read-only file may have grown, if the part that
the rank could have seen is the same.
"""

from __future__ import annotations

import os
import stat as mode_of
from collections.abc import Callable, Sequence

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.files import paths
from snapshotd.preflight.digest import content_digest, is_sampled
from snapshotd.preflight.objects import is_carried
from snapshotd.preflight.verdict import listed, passed, refused, warned

_NEVER_CARRIED = mode_of.S_ISUID | mode_of.S_ISGID | mode_of.S_ISVTX
_KINDS = {
    mode_of.S_IFREG: "a file",
    mode_of.S_IFDIR: "a directory",
    mode_of.S_IFIFO: "a FIFO",
    mode_of.S_IFSOCK: "a socket",
    mode_of.S_IFLNK: "a link",
}


def files(name: str, facts: RankFacts) -> Check:
    wanted = [fact for fact in facts.files if not fact.carried]
    problems, sampled = [], []
    for fact in wanted:
        problem = difference(fact)
        if problem:
            problems.append(f"{fact.path}: {problem}")
        elif is_sampled(fact.size) and not _same_times(fact):
            sampled.append(fact.path)
    if problems:
        return refused(
            name,
            f"files that the rank uses differ on the target: {listed(problems)}",
            "install the same software and mount the same file systems on both nodes; add node-local directories to"
            " carry_paths",
        )
    if sampled:
        return warned(
            name,
            f"large files were compared at 256 places only, because their times differ: {listed(sampled)}",
            "copy them with their times (cp -p, rsync -t), so that they can be compared by time",
        )
    return passed(name, f"{len(wanted)} present and identical")


def difference(fact: FileFact) -> str:
    """How the file on this node differs from the one that the rank has; empty if it does not."""
    if not is_clean(fact.path):
        return "not an absolute path"
    try:
        here = os.stat(fact.path)
    except (FileNotFoundError, NotADirectoryError):
        return "" if _may_be_renamed(fact) else "does not exist"
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if mode_of.S_IFMT(here.st_mode) != mode_of.S_IFMT(fact.mode):
        return f"is {_KINDS.get(mode_of.S_IFMT(here.st_mode), 'of another type')}"
    if here.st_uid != fact.user_id:  # also before its content is read: it may be a link to another user's file
        return f"belongs to user {here.st_uid}, on the source to user {fact.user_id}"
    if here.st_mode != fact.mode:
        return f"has mode {mode_of.S_IMODE(here.st_mode):o}, on the source {mode_of.S_IMODE(fact.mode):o}"
    if not fact.mtime_ns or fact.writable or (here.st_size, here.st_mtime_ns) == (fact.size, fact.mtime_ns):
        return ""
    if here.st_size < fact.size or (fact.mapped and here.st_size != fact.size):
        return f"has {here.st_size} bytes, on the source {fact.size}"
    if not fact.digest:
        return "has another modification time, and its content was not compared"
    try:
        handle = paths.open_regular(fact.path, follow=True)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        if not os.path.samestat(here, os.fstat(handle)):
            return "was replaced while it was examined"
        same = content_digest(handle, fact.size) == fact.digest
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    finally:
        os.close(handle)
    return "" if same else "has other content"


def _may_be_renamed(fact: FileFact) -> bool:
    """Whether the rank may have renamed the file since it was seen on the source, as when a checkpoint is finished.

    Its directory must then be the same one: a shared file system gives it the same inode number on both nodes.
    """
    if not fact.folder_inode:
        return False
    try:
        return os.stat(os.path.dirname(fact.path)).st_ino == fact.folder_inode
    except OSError:
        return False


def _same_times(fact: FileFact) -> bool:
    try:
        return os.stat(fact.path).st_mtime_ns == fact.mtime_ns
    except OSError:
        return False


def carried_files(name: str, facts: RankFacts, carry_paths: Sequence[str], may_replace: Callable[[str], bool]) -> Check:
    """A carried file needs a free path: a file that is already there, and that no move left behind, may belong to a user."""
    wanted = [fact for fact in facts.files if fact.carried]
    problems = []
    for fact in wanted:
        problem = _obstacle(fact, carry_paths, may_replace)
        if problem:
            problems.append(f"{fact.path}: {problem}")
    if problems:
        return refused(
            name,
            f"files that are moved with the rank cannot be created on the target: {listed(problems)}",
            "remove what is in the way, or configure the same carry_paths on both nodes",
        )
    return passed(name, f"{len(wanted)} to be created, {facts.carried_bytes >> 20} MiB" if wanted else "none")


def _obstacle(fact: FileFact, carry_paths: Sequence[str], may_replace: Callable[[str], bool]) -> str:
    if not is_clean(fact.path) or not is_carried(fact.path, carry_paths):
        return f"is outside this node's carry_paths ({', '.join(carry_paths)})"
    parent, name = os.path.split(fact.path)
    try:
        folder = paths.open_folder(parent)
        try:
            here = os.stat(name, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return _cannot_make(os.path.dirname(fact.path))
    except NotADirectoryError:
        return "a directory above it is a file"
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if mode_of.S_ISDIR(fact.mode):
        if mode_of.S_ISDIR(here.st_mode) and here.st_uid not in (0, fact.user_id):
            return f"is a directory of user {here.st_uid}, on the source of user {fact.user_id}"
        return "" if mode_of.S_ISDIR(here.st_mode) else "is not a directory"
    if may_replace(fact.path) or _is_same(fact, here):
        return ""
    return f"{_KINDS.get(mode_of.S_IFMT(here.st_mode), 'something')} of that name already exists"


def _is_same(fact: FileFact, here: os.stat_result) -> bool:
    return (here.st_mode & ~_NEVER_CARRIED, here.st_size, here.st_mtime_ns, here.st_uid, here.st_gid) == (
        fact.mode & ~_NEVER_CARRIED,
        fact.size,
        fact.mtime_ns,
        fact.user_id,
        fact.group_id,
    ) and mode_of.S_ISREG(here.st_mode)


def directories(name: str, facts: RankFacts, carry_paths: Sequence[str]) -> Check:
    missing, made = [], 0
    for path in facts.directories:
        if not is_clean(path):
            missing.append(f"{path!r}: not an absolute path")
        elif not os.path.isdir(path):
            reason = _cannot_make(path) if is_carried(path, carry_paths) else "does not exist"
            made += not reason
            if reason:
                missing.append(f"{path}: {reason}")
    if missing:
        return refused(
            name,
            f"directories that the rank uses are missing on the target: {listed(missing)}",
            "mount the same file systems on both nodes",
        )
    return passed(name, f"{len(facts.directories)} directories" + (f", {made} of them to be created" if made else ""))


def _cannot_make(path: str) -> str:
    """Why a directory neither exists nor can be created; empty if it does or can."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{path} is not a directory"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is on a read-only file system"
    return ""


def is_clean(path: str) -> bool:
    """Whether the path is absolute and has no `..`: the kernel never prints other paths."""
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/") and len(path) < 4096
