"""Are the rank's files here, and are they the same? Looked at on the target, path by path.

Identical means: same kind and permissions (CRIU insists on both), and same size and time or the same digest. A file
the rank writes to is only looked for: others may write to it as well. If it is not there, its directory is: the rank runs
on and may have renamed it. A read-only file may have grown, if what the rank could have seen of it is the same.
"""

from __future__ import annotations

import os
import stat as mode_of
from collections.abc import Callable, Sequence

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.preflight.digest import content_digest, is_sampled
from snapshotd.preflight.objects import is_carried
from snapshotd.preflight.verdict import listed, passed, refused, warned

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
            f"not the same here: {listed(problems)}",
            "install the same software and mount the same file systems on both nodes; add node-local directories to"
            " carry_paths",
        )
    if sampled:
        return warned(
            name,
            f"same size and equal at 256 places, other times, too large to compare whole: {listed(sampled)}",
            "copy them with their times (cp -p, rsync -t) to have them compared by time",
        )
    return passed(name, f"{len(wanted)} present and identical")


def difference(fact: FileFact) -> str:
    """What distinguishes the file here from the one the rank has, in words; empty where nothing does."""
    if not is_clean(fact.path):
        return "not an absolute path"
    try:
        here = os.stat(fact.path)
    except (FileNotFoundError, NotADirectoryError):
        return "" if _comes_and_goes(fact) else "not here"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if mode_of.S_IFMT(here.st_mode) != mode_of.S_IFMT(fact.mode):
        return f"is {_KINDS.get(mode_of.S_IFMT(here.st_mode), 'something else')} here"
    if here.st_mode != fact.mode:
        return f"has the mode {mode_of.S_IMODE(here.st_mode):o} here, {mode_of.S_IMODE(fact.mode):o} on the source"
    if not fact.mtime_ns or fact.writable or (here.st_size, here.st_mtime_ns) == (fact.size, fact.mtime_ns):
        return ""
    if here.st_size < fact.size or (fact.mapped and here.st_size != fact.size):
        return f"has {here.st_size} bytes here, {fact.size} on the source"
    if not fact.digest:
        return "changed at another time, and its content was not compared"
    try:
        same = content_digest(fact.path, fact.size) == fact.digest
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if same else "has other content here"


def _comes_and_goes(fact: FileFact) -> bool:
    """A checkpoint that is written under another name and renamed: the rank ran on since it was seen on the source. Its
    directory being the very same here (a shared file system numbers it alike) is what matters."""
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
    """A carried file needs a free path: what lies there already and is not ours may belong to somebody."""
    wanted = [fact for fact in facts.files if fact.carried]
    problems = []
    for fact in wanted:
        problem = _obstacle(fact, carry_paths, may_replace)
        if problem:
            problems.append(f"{fact.path}: {problem}")
    if problems:
        return refused(
            name,
            f"cannot be laid down here: {listed(problems)}",
            "remove what is in the way, or configure the same carry_paths on both nodes",
        )
    return passed(name, f"{len(wanted)} to be laid down, {facts.carried_bytes >> 20} MiB" if wanted else "none")


def _obstacle(fact: FileFact, carry_paths: Sequence[str], may_replace: Callable[[str], bool]) -> str:
    if not is_clean(fact.path) or not is_carried(fact.path, carry_paths):
        return f"lies outside this node's carry_paths ({', '.join(carry_paths)})"
    try:
        here = os.lstat(fact.path)
    except FileNotFoundError:
        return _cannot_make(os.path.dirname(fact.path))
    except NotADirectoryError:
        return "a directory above it is a file here"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if mode_of.S_ISDIR(fact.mode):
        return "" if mode_of.S_ISDIR(here.st_mode) else "is not a directory here"
    if may_replace(fact.path) or _is_same(fact, here):
        return ""
    return f"{_KINDS.get(mode_of.S_IFMT(here.st_mode), 'something')} of that name is here already"


def _is_same(fact: FileFact, here: os.stat_result) -> bool:
    return (here.st_mode, here.st_size, here.st_mtime_ns, here.st_uid, here.st_gid) == (
        fact.mode,
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
            reason = _cannot_make(path) if is_carried(path, carry_paths) else "not here"
            made += not reason
            if reason:
                missing.append(f"{path}: {reason}")
    if missing:
        return refused(name, f"directories: {listed(missing)}", "mount the same file systems on both nodes")
    return passed(name, f"{len(facts.directories)} there" + (f", {made} of them to be made" if made else ""))


def _cannot_make(path: str) -> str:
    """Why a directory can neither be used nor made here; empty where it can."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{path} is not a directory here"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is read-only here"
    return ""


def is_clean(path: str) -> bool:
    """Absolute and without anything that leads elsewhere: the kernel never prints other paths."""
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/") and len(path) < 4096
