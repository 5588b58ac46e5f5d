"""Whether the target has the rank's files, and whether they are identical. Checked on the target, path by path.

Identical means: the same type and permissions (CRIU requires both), and either the same size and time or the same digest.
A file that the rank writes to only has to exist, because other processes may write to it as well. If it does not exist,
its directory must: the rank keeps running and may have renamed the file. A read-only file may have grown, if the part that
the rank could have seen is the same. Caches that the daemons of each node write (sssd, nscd) only have to be as long.
"""

from __future__ import annotations

import os
import stat as mode_of
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.files.as_user import ROOT, User, file_user
from snapshotd.files.user_look import Seen, UserLook
from snapshotd.preflight.digest import digest_of, is_sampled
from snapshotd.preflight.objects import is_carried, is_node_cache
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.credentials import Identity

#: Whether the file at a path, as it looks now, was left behind by an earlier move.
MayReplace = Callable[[str, Seen], bool]


class Changes(Enum):
    """Which of the files that a rank had open for writing may have changed, because a rollback deals with them."""

    NONE = auto()
    SHARED = auto()  # those in a directory that both nodes share
    HERE = auto()  # all of them: the rank had them on this node


_NEVER_CARRIED = mode_of.S_ISUID | mode_of.S_ISGID | mode_of.S_ISVTX
_KINDS = {
    mode_of.S_IFREG: "a file",
    mode_of.S_IFDIR: "a directory",
    mode_of.S_IFIFO: "a FIFO",
    mode_of.S_IFSOCK: "a socket",
    mode_of.S_IFLNK: "a link",
}


def user_of(facts: RankFacts) -> User:
    """The user with whose rights criu will open the rank's files. Facts without one are refused by Prepare."""
    return file_user(Identity.of_proto(facts.identity), facts.rank.user_id) if facts.HasField("identity") else ROOT


def files(name: str, facts: RankFacts, look: UserLook | None = None, changes: Changes = Changes.NONE) -> Check:
    """`look`: with whose eyes; by default those of the rank's user."""
    if look is None:
        with UserLook(user_of(facts)) as own:
            return files(name, facts, own, changes)
    wanted = [fact for fact in facts.files if not fact.carried]
    problems, sampled, barred = [], [], []
    look.prefetch(fact.path for fact in wanted if is_clean(fact.path))
    for fact in wanted:
        if _may_change(fact, changes, look):
            continue
        problem = difference(fact, look)
        if problem:
            problems.append(f"{fact.path}: {problem}")
        elif lacking := _lacks_right(fact, look):
            barred.append(f"{fact.path}: {lacking}")
        elif is_sampled(fact.size) and not _same_times(fact, look):
            sampled.append(fact.path)
    if barred and not problems:
        return refused(
            name,
            f"the rank's user may not open files of the rank on the target: {listed(barred)}",
            "give that user the right on both nodes, or have the job open the files itself, after it has become that user",
        )
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


def difference(fact: FileFact, look: UserLook) -> str:
    """How the file on this node differs from the one that the rank has; empty if it does not."""
    if not is_clean(fact.path):
        return "not an absolute path"
    try:
        here = look.stat(fact.path)
    except (FileNotFoundError, NotADirectoryError):
        return "" if _may_be_renamed(fact, look) else "does not exist"
    except PermissionError:
        return "the rank's user may not enter a directory above it"
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if mode_of.S_IFMT(here.mode) != mode_of.S_IFMT(fact.mode):
        return f"is {_KINDS.get(mode_of.S_IFMT(here.mode), 'of another type')}"
    if here.user_id != fact.user_id:  # also before its content is read: it may be a link to another user's file
        return f"belongs to user {here.user_id}, on the source to user {fact.user_id}"
    if here.mode != fact.mode:
        return f"has mode {mode_of.S_IMODE(here.mode):o}, on the source {mode_of.S_IMODE(fact.mode):o}"
    if not fact.mtime_ns or fact.writable or (here.size, here.mtime_ns) == (fact.size, fact.mtime_ns):
        return ""
    if here.size >= fact.size and is_node_cache(fact.path):
        return ""
    if here.size < fact.size or (fact.mapped and here.size != fact.size):
        return f"has {here.size} bytes, on the source {fact.size}"
    if not fact.digest:
        return "has another modification time, and its content was not compared"
    if not here.may_read and here.may_execute:
        return "has another modification time, and the rank's user may not read its content"
    try:
        return "" if _same_content(fact, here, look) else "has other content"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _same_content(fact: FileFact, here: Seen, look: UserLook) -> bool:
    """By digest. Raises OSError if the file here cannot be read."""
    key = (here.device, here.inode, here.mtime_ns, fact.size)
    return bool(fact.digest) and digest_of(key, fact.size, partial(look.read, fact.path, here)) == fact.digest


def _lacks_right(fact: FileFact, look: UserLook) -> str:
    """Which right to open the file as the rank has it its user lacks here; empty: none. Criu opens it with that user's
    rights. A program need only be executable."""
    try:
        here = look.stat(fact.path)
    except OSError:
        return ""  # it was renamed
    if not (mode_of.S_ISREG(here.mode) or mode_of.S_ISFIFO(here.mode)):
        return ""
    if fact.writable:
        return "" if here.may_write else "not for writing"
    return "" if here.may_read or (fact.mapped and here.may_execute) else "not for reading"


def _may_be_renamed(fact: FileFact, look: UserLook) -> bool:
    """Whether the rank may have renamed the file since it was seen on the source, as when a checkpoint is finished.

    Its directory must then be the same one: a shared file system gives it the same inode number on both nodes.
    """
    if not fact.folder_inode:
        return False
    try:
        return look.stat(os.path.dirname(fact.path)).inode == fact.folder_inode
    except OSError:
        return False


def _may_change(fact: FileFact, changes: Changes, look: UserLook) -> bool:
    if not fact.writable or changes is Changes.NONE or not is_clean(fact.path):
        return False
    return changes is Changes.HERE or (not fact.carried and _may_be_renamed(fact, look))


def _same_times(fact: FileFact, look: UserLook) -> bool:
    try:
        return look.stat(fact.path).mtime_ns == fact.mtime_ns
    except OSError:
        return False


def carried_files(
    name: str,
    facts: RankFacts,
    carry_paths: Sequence[str],
    may_replace: MayReplace,
    look: UserLook,
    changes: Changes = Changes.NONE,
) -> Check:
    """A carried file needs a free path: a file that is already there, and that no move left behind, may belong to a user."""
    wanted = [fact for fact in facts.files if fact.carried]
    problems, foreign = [], []
    user = user_of(facts)
    for fact in wanted:
        if _may_change(fact, changes, look):
            continue
        problem = _obstacle(fact, carry_paths, may_replace, look)
        if not problem and (owner := user.could_not_own(fact.user_id, fact.group_id)) and not _is_there(fact, look):
            foreign.append(f"{fact.path}: {owner}")
        if problem:
            problems.append(f"{fact.path}: {problem}")
    if problems:
        return refused(
            name,
            f"files that are moved with the rank cannot be created on the target: {listed(problems)}",
            "remove what is in the way, or configure the same carry_paths on both nodes",
        )
    if foreign:
        return refused(
            name,
            f"the rank's user could not own files that are moved with the rank: {listed(foreign)}",
            "have the job make copies of its own, give them to the job's user and one of its groups (chown), or copy them to"
            " the target with their times (cp -p)",
        )
    return passed(name, f"{len(wanted)} to be created, {facts.carried_bytes >> 20} MiB" if wanted else "none")


def _obstacle(fact: FileFact, carry_paths: Sequence[str], may_replace: MayReplace, look: UserLook) -> str:
    if not is_clean(fact.path) or not is_carried(fact.path, carry_paths):
        return f"is outside this node's carry_paths ({', '.join(carry_paths)})"
    try:
        here = look.stat_without_links(fact.path)
        if here is None:
            return look.unmakeable(os.path.dirname(fact.path))
    except NotADirectoryError:
        return "a directory above it is a file"
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if mode_of.S_ISDIR(fact.mode):
        if mode_of.S_ISDIR(here.mode) and here.user_id not in (0, fact.user_id):
            return f"is a directory of user {here.user_id}, on the source of user {fact.user_id}"
        return "" if mode_of.S_ISDIR(here.mode) else "is not a directory"
    if may_replace(fact.path, here) or _is_same(fact, here, look):
        return ""
    return f"{_KINDS.get(mode_of.S_IFMT(here.mode), 'something')} of that name already exists"


def _is_there(fact: FileFact, look: UserLook) -> bool:
    """Whether nothing has to be made."""
    try:
        here = look.stat_without_links(fact.path)
    except OSError:
        return False
    return here is not None and (mode_of.S_ISDIR(fact.mode) or _is_same(fact, here, look))


def _is_same(fact: FileFact, here: Seen, look: UserLook) -> bool:
    """By time, or by content: copies of one file have different times. When the file is placed, every byte is compared."""
    if not mode_of.S_ISREG(here.mode) or (here.mode & ~_NEVER_CARRIED, here.size, here.user_id, here.group_id) != (
        fact.mode & ~_NEVER_CARRIED,
        fact.size,
        fact.user_id,
        fact.group_id,
    ):
        return False
    if here.mtime_ns == fact.mtime_ns:
        return True
    try:
        return _same_content(fact, here, look)
    except OSError:
        return False


def directories(name: str, facts: RankFacts, carry_paths: Sequence[str], look: UserLook) -> Check:
    missing, made = [], 0
    look.prefetch(path for path in facts.directories if is_clean(path))
    for path in facts.directories:
        if not is_clean(path):
            missing.append(f"{path!r}: not an absolute path")
        elif not look.is_folder(path):
            reason = look.unmakeable(path) if is_carried(path, carry_paths) else _why_missing(path, look)
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


def _why_missing(path: str, look: UserLook) -> str:
    try:
        look.stat(path)
    except PermissionError:
        return "the rank's user may not enter a directory above it"
    except OSError:
        pass
    return "does not exist"


def is_clean(path: str) -> bool:
    """Whether the path is absolute and has no `..`: the kernel never prints other paths."""
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/") and len(path) < 4096
