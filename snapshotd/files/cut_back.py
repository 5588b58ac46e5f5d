"""Cuts a file back to the size that it had at a snapshot, in the child that has the user's rights (worker.py).

Invariant: nothing is removed that was not copied before: the tail is complete in a file of its own, on disk, before the file
becomes shorter. One process writes the tail at a time, under a lock that ends with it, and the next attempt continues what a
killed one has left. The file is the one that the rank had open, by its inode and the time of its birth, and its user's own.
Links are not followed, except those of root on the way to its directory. Little but the standard library is imported, as in
worker.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

from snapshotd.files import paths

#: How long to wait for another rank of the job, which has the same file open, to cut it back.
WAIT_S = 20.0
_AGAIN_S = 0.1
_BLOCK_BYTES = 1 << 20


def order_cut(path: str, inode: int, born_ns: int, size: int, suffix: str, user_id: int) -> dict[str, object]:
    """`born_ns`: 0 if it is not known. `suffix`: of the name of the file that gets the tail. Raises OSError if it is not that
    file any more, or shorter. Returns the number of bytes that were removed."""
    parent, name = os.path.split(path)
    folder = paths.open_folder(parent)
    try:
        file = _opened(folder, name, inode, born_ns, user_id)
        try:
            return {"removed": _cut(folder, file, size, f"{name[:200]}.{suffix}", user_id)}
        finally:
            os.close(file)
    finally:
        os.close(folder)


def is_same(found: os.stat_result, born_now_ns: int, inode: int, born_ns: int) -> bool:
    """Whether a file is the one with this inode number, which another file may have got. Not by its device, which may have
    another number after a reboot and on other nodes. A time of birth of 0 is not known."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_ino == inode
        and (born_now_ns == born_ns or 0 in (born_now_ns, born_ns))
    )


def _opened(folder: int, name: str, inode: int, born_ns: int, user_id: int) -> int:
    try:
        handle = paths.openat2(
            folder, name, os.O_PATH | os.O_NOFOLLOW, paths.RESOLVE_BENEATH | paths.RESOLVE_NO_SYMLINKS
        )
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "was deleted or renamed since the snapshot") from None
    try:
        found = os.fstat(handle)
        if not is_same(found, paths.born_ns(handle), inode, born_ns):
            raise OSError(errno.ESTALE, "was replaced by another file since the snapshot")
        if user_id not in (0, found.st_uid):
            raise PermissionError(errno.EPERM, f"has grown since the snapshot, and belongs to user {found.st_uid}")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _cut(folder: int, file: int, size: int, side: str, user_id: int) -> int:
    ends = time.monotonic() + WAIT_S
    while (now := os.fstat(file).st_size) > size:
        if _keep_tail(folder, side, file, size, now, user_id):
            break
        if time.monotonic() > ends:
            raise FileExistsError(errno.EEXIST, f"cannot be cut back, because {side} exists")
        time.sleep(_AGAIN_S)
    if now < size:
        raise OSError(errno.ESTALE, f"has become shorter since the snapshot ({now} instead of {size} bytes)")
    if now > size:
        os.ftruncate(file, size)
        os.fsync(file)
    return now - size


def _keep_tail(folder: int, side: str, file: int, begin: int, end: int, user_id: int) -> bool:
    """Whether the file beside has the whole tail, on the disk. False: another rank of the job is at it, or it is something
    else. What an attempt that was killed has left of it is continued."""
    if (opened := _beside(folder, side, user_id)) is None:
        return False
    tail, is_new = opened
    try:
        try:
            fcntl.flock(tail, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: the one that has made the file completes it
            if not is_new and os.fstat(tail).st_size < end - begin:
                return False
        there = os.fstat(tail)
        named = paths.look_in(folder, side)
        if named is None or not os.path.samestat(named, there):  # the one that had the lock has failed, and removed it
            return False
        if there.st_size > end - begin or not _is_copied(tail, file, begin, there.st_size):
            return False
        os.lseek(tail, 0, os.SEEK_END)
        try:
            _copy(file, tail, begin + there.st_size, end)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    os.unlink(side, dir_fd=folder)
            raise
        return True
    finally:
        os.close(tail)


def _beside(folder: int, side: str, user_id: int) -> tuple[int, bool] | None:
    """The file that gets the tail, and whether it was made now. None: it is not a regular file of this user."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(side, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), True
    except FileExistsError:
        pass
    try:
        tail = os.open(side, flags, dir_fd=folder)
    except OSError:
        return None
    found = os.fstat(tail)
    # Another user who may write here could have made it, to read what is copied into it.
    if stat.S_ISREG(found.st_mode) and found.st_uid == user_id and found.st_nlink == 1:
        return tail, False
    os.close(tail)
    return None


def _copy(file: int, tail: int, begin: int, end: int) -> None:
    while begin < end:
        block = os.pread(file, min(_BLOCK_BYTES, end - begin), begin)
        if not block:
            raise OSError(errno.ESTALE, "became shorter while its tail was copied")
        begin += len(block)
        while block:
            block = block[os.write(tail, block) :]
    os.fsync(tail)


def _is_copied(tail: int, file: int, begin: int, count: int) -> bool:
    """Whether that many bytes of the tail are those of the file."""
    for at in range(0, count, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, count - at)
        block = os.pread(tail, length, at)
        if len(block) != length or block != os.pread(file, length, begin + at):
            return False
    return True
