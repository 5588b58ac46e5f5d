"""Puts a file back at its name, with the content that it had at a snapshot, in the child that has the user's rights
(worker.py).

Invariant: nothing that lies at the name is changed or removed: it gets another name beside it. The file gets its name only
when it is complete and on the disk; until then it has none, so that nothing is left of it if this process is killed, except
where the file system cannot do that (NFS). Set-user-id, set-group-id and sticky bits are not set. The order can be repeated
after a crash at any place, and by several ranks that have the same file. Links are not followed, except those of root on the
way to the directory. Little but the standard library is imported, as in worker.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snapshotd.files import file_content, paths
from snapshotd.files.closed import PERMISSIONS

#: How often something else may appear at the name meanwhile.
_TRIES = 10
_LOCK_TRIES, _LOCK_EVERY_S = 100, 0.05
#: Files that are kept beside one name, for one rollback.
_MOST_BESIDE = 100
#: Of a name; the rest is for what is added to it.
NAME_CHARACTERS = 200


class Wanted(NamedTuple):
    """The file as it was at the snapshot."""

    size: int
    mode: int
    user_id: int
    group_id: int
    mtime_ns: int


def order_put_back(
    path: str,
    above: str,
    content: int,
    wanted: Wanted,
    suffix: str,
    token: str,
    put_back: Sequence[int] | None = None,
) -> dict[str, object]:
    """`content`: open for reading; its first bytes are those of the file. `above`: the directory above it that exists; those
    below that one are made. `suffix`: of the name that another file at this name gets. `token`: of this rank. `put_back`:
    identity of the file that another rank of the job has put back here. Returns the name beside it of what was there before
    (empty: nothing), whether the file was there already, and its identity."""
    wanted = wanted._replace(mode=wanted.mode & PERMISSIONS)
    parent, name = os.path.split(path)
    side = f"{name[:NAME_CHARACTERS]}.{suffix}"
    folder = _folder(parent, above)
    try:
        with _locked(folder):
            for _ in range(_TRIES):
                here = paths.look_in(folder, name)
                is_there = here is not None and _is_as_wanted(folder, name, here, content, wanted)
                if here is not None and not is_there and identity(here) == put_back:
                    raise FileExistsError(errno.EEXIST, "was put back by another rank of the job, with other content")
                if is_there or _put(folder, name, here, content, wanted, side, token):
                    there = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    beside = _last_beside(folder, side)
                    return {"beside": beside, "was_there": is_there, "file": identity(there)}
            raise FileExistsError(errno.EEXIST, "is replaced again and again")
    finally:
        os.close(folder)


def identity(found: os.stat_result) -> list[int]:
    """With the time of its last change, because another file may get its inode number."""
    return [found.st_dev, found.st_ino, found.st_ctime_ns]


def _folder(parent: str, above: str) -> int:
    """The directory of the file. Those that are missing are made, for the user alone."""
    below = os.path.relpath(parent, above)
    folder = paths.open_folder(above)
    for one in () if below == "." else below.split("/"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(one, 0o700, dir_fd=folder)
        try:
            inner = paths.openat2(folder, one, os.O_PATH | os.O_DIRECTORY, paths.RESOLVE_BENEATH | paths.NO_LINKS)
        finally:
            os.close(folder)
        folder = inner
    return folder


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Other ranks of the job on this node wait. Not every file system can lock a directory, nor every user read one, and
    anybody may hold the lock of a shared one for ever; then `_put` notices another rank."""
    lock = -1
    with contextlib.suppress(OSError):
        lock = os.open(f"/proc/self/fd/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_EVERY_S)
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _is_as_wanted(folder: int, name: str, here: os.stat_result, content: int, wanted: Wanted) -> bool:
    looks = (stat.S_IFMT(here.st_mode) | stat.S_IMODE(here.st_mode), here.st_uid, here.st_gid, here.st_size)
    if looks != (stat.S_IFREG | wanted.mode, wanted.user_id, wanted.group_id, wanted.size):
        return False
    file = paths.open_regular(name, folder=folder)
    try:
        return os.path.samestat(here, os.fstat(file)) and file_content.same(file, content, wanted.size)
    finally:
        os.close(file)


def _put(
    folder: int, name: str, here: os.stat_result | None, content: int, wanted: Wanted, side: str, token: str
) -> bool:
    """False: something else has got the name meanwhile."""
    if os.fstat(content).st_size < wanted.size:
        raise OSError(
            errno.ESTALE,
            f"became shorter before that: {os.fstat(content).st_size} of its {wanted.size} bytes are left",
        )
    hidden = f".{side}.{token}"
    file, has_name = _fresh(folder, hidden)
    try:
        _fill(file, content, wanted)
        if here is not None and not _set_aside(folder, name, here, side):
            return False
        try:
            if has_name:
                paths.rename_to_free(folder, hidden, name)
                has_name = False
            else:
                os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            return False
    finally:
        os.close(file)
        if has_name:
            with contextlib.suppress(OSError):
                os.unlink(hidden, dir_fd=folder)
    _sync(folder)
    return True


def _fresh(folder: int, hidden: str) -> tuple[int, bool]:
    """A new file for writing, and whether it has a name, which is `hidden`."""
    with contextlib.suppress(FileNotFoundError):  # of an attempt of this rank that was interrupted
        os.unlink(hidden, dir_fd=folder)
    try:
        return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(hidden, flags, 0o600, dir_fd=folder), True


def _fill(file: int, content: int, wanted: Wanted) -> None:
    file_content.copy(content, file, wanted.size)
    made = os.fstat(file)
    if (made.st_uid, made.st_gid) != (wanted.user_id, wanted.group_id):
        os.fchown(file, wanted.user_id, wanted.group_id)
    os.fchmod(file, wanted.mode)
    os.utime(file, ns=(wanted.mtime_ns, wanted.mtime_ns))
    os.fsync(file)


def _set_aside(folder: int, name: str, here: os.stat_result, side: str) -> bool:
    """Gives what is at the name a free one. False: it was something else by then, and has its name again."""
    for beside in _names_beside(side):
        try:
            paths.rename_to_free(folder, name, beside)
        except FileExistsError:
            continue
        except FileNotFoundError:
            return True
        moved = paths.look_in(folder, beside)
        if moved is not None and not os.path.samestat(moved, here):  # another rank has put the file back meanwhile
            with contextlib.suppress(OSError):
                paths.rename_to_free(folder, beside, name)
            return False
        return True
    raise FileExistsError(errno.EEXIST, f"cannot be put back, because {side} and many more exist")


def _names_beside(side: str) -> Iterator[str]:
    yield side
    for number in range(2, _MOST_BESIDE):
        yield f"{side}.{number}"


def _last_beside(folder: int, side: str) -> str:
    last = ""
    for beside in _names_beside(side):
        if paths.look_in(folder, beside) is None:
            break
        last = beside
    return last


def _sync(folder: int) -> None:
    with contextlib.suppress(OSError):  # a directory that the user may not read
        handle = os.open(f"/proc/self/fd/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
