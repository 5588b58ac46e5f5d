"""The child that works on a user's files with that user's rights. `snapshotd/files/as_user.py` starts it and asks it.

The first message names the user. From then on the child has the rights of that user and no more: the kernel decides what it
may read and write, and a user gains nothing by swapping a directory for a link. Each request is answered with one message;
both are small JSON objects, with descriptors beside them. Paths are resolved without links, names are single components in
a directory that is given as a descriptor.

Invariants: set-user-id, set-group-id and sticky bits are never set. A file gets its final name only when it is complete. What
was made is removed again if the daemon ends before it has said `keep`, which it does once its journal knows what was made.
Only the standard library is imported, because this process starts during the pause of a move.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable
from typing import Any, NoReturn

from snapshotd.files import paths

MESSAGE_BYTES = 128 << 10
MAX_FDS = 2
#: Permissions that are carried: neither set-user-id nor set-group-id nor sticky.
PERMISSIONS = 0o777

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_BLOCK_BYTES = 1 << 20
_COPY_BYTES = 1 << 30

Order = dict[str, Any]
Answer = dict[str, Any]
Undo = list[Callable[[], None]]


def main() -> NoReturn:
    line = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides what Ctrl-C at its terminal means
    undo: Undo = []
    while True:
        blob, fds, _, _ = socket.recv_fds(line, MESSAGE_BYTES, MAX_FDS)
        if not blob:
            _end(undo)
        order: Order = json.loads(blob)
        answer: Answer = {}
        given: list[int] = []
        try:
            answer = ORDERS[order["do"]](order, fds, given, undo)
        except OSError as error:
            answer = {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
        try:
            socket.send_fds(line, [json.dumps(answer).encode()], given)
        except OSError:  # the daemon has ended
            _end(undo)
        for fd in (*fds, *given):
            os.close(fd)


def _end(undo: Undo) -> NoReturn:
    for act in reversed(undo):
        with contextlib.suppress(OSError):
            act()
    os._exit(0)


def _become(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    user_id, group_id = int(order["user_id"]), int(order["group_id"])
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setgroups([int(group) for group in order["groups"]])
    os.setresgid(group_id, group_id, group_id)
    os.setresuid(user_id, user_id, user_id)
    libc = ctypes.CDLL(None, use_errno=True)
    # Its user may neither trace it nor read its descriptors: they can refer to more than that user may open.
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
    return {"ids": [*os.getresuid(), *os.getresgid()]}


def _folder(order: Order, _fds: list[int], given: list[int], _undo: Undo) -> Answer:
    """A directory below a carry path, which is an administrator's choice and is itself opened by its real path."""
    root = paths.openat2(None, order["root"], os.O_PATH | os.O_DIRECTORY, paths.NO_LINKS)
    try:
        given.append(paths.open_beneath(root, order["path"]))
    finally:
        os.close(root)
    return {"writable": os.access(f"/proc/self/fd/{given[0]}", os.W_OK | os.X_OK)}


def _examine(order: Order, fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    """Whether the name is free, has the file with this content, or has a file that may be replaced."""
    folder, image = fds
    here = paths.look_in(folder, order["name"])
    if here is None:
        return {"state": "free"}
    if order["left"] is not None and order["left"] == identity(here):
        return {"state": "left"}
    wanted = (stat.S_IFREG | order["mode"], order["user_id"], order["group_id"])
    if (stat.S_IFMT(here.st_mode) | here.st_mode & PERMISSIONS, here.st_uid, here.st_gid) != wanted:
        return {"state": "taken", "by": "by a file of another type, owner, group or mode"}
    existing = paths.open_regular(order["name"], folder=folder)
    try:
        same = os.path.samestat(here, os.fstat(existing)) and _same_content(existing, image)
    finally:
        os.close(existing)
    return {"state": "same", **_made(here)} if same else {"state": "taken", "by": "by a file with other content"}


def _make_file(order: Order, fds: list[int], _given: list[int], undo: Undo) -> Answer:
    folder, image = fds
    name, side = order["name"], order["side"]
    file = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    made = os.fstat(file)
    try:
        _copy(image, file)
        os.fchown(file, order["user_id"], order["group_id"])
        os.fchmod(file, order["mode"])
        os.utime(file, ns=(order["mtime_ns"], order["mtime_ns"]))
        if order["left"] is None:
            paths.rename_to_free(folder, side, name)
        else:
            here = paths.look_in(folder, name)
            if here is None or identity(here) != order["left"]:
                raise FileExistsError(errno.EEXIST, "it was changed meanwhile")
            os.rename(side, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove_if(folder, side, made)
        raise
    finally:
        os.close(file)
    return _settled(folder, name, made, undo)


def _make_folder(order: Order, fds: list[int], given: list[int], undo: Undo) -> Answer:
    """Makes a directory, unless there is one. Gives a descriptor of one that it made."""
    (folder,) = fds
    name = order["name"]
    here = paths.look_in(folder, name)
    if here is not None:
        if not stat.S_ISDIR(here.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")
        if here.st_uid not in order["owners"]:
            raise FileExistsError(errno.EEXIST, f"it belongs to user {here.st_uid}, who could exchange the files in it")
        return {"there": True, **_made(here)}
    os.mkdir(name, 0o700, dir_fd=folder)
    made = paths.openat2(
        folder, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, paths.RESOLVE_BENEATH | paths.NO_LINKS
    )
    try:
        found = os.fstat(made)
        if found.st_uid != os.geteuid() or os.listdir(made):
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile")
        os.fchown(made, order["user_id"], order["group_id"])
        os.fchmod(made, order["mode"])
        answer = _settled(folder, name, found, undo)
        given.append(paths.openat2(made, ".", os.O_PATH | os.O_DIRECTORY, paths.NO_LINKS))
        return answer
    finally:
        os.close(made)


def _make_fifo(order: Order, fds: list[int], _given: list[int], undo: Undo) -> Answer:
    (folder,) = fds
    name = order["name"]
    here = paths.look_in(folder, name)
    if here is not None:
        if not stat.S_ISFIFO(here.st_mode) or here.st_uid != order["user_id"]:
            raise FileExistsError(errno.EEXIST, "it is a file of another type or owner")
        return {"there": True, **_made(here)}
    side = order["side"]
    os.mkfifo(side, 0o600, dir_fd=folder)
    handle = os.open(side, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    made = os.fstat(handle)
    try:
        if not stat.S_ISFIFO(made.st_mode) or made.st_uid != os.geteuid() or made.st_nlink != 1:
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile")
        os.chown(f"/proc/self/fd/{handle}", order["user_id"], order["group_id"])
        os.chmod(f"/proc/self/fd/{handle}", order["mode"])
        paths.rename_to_free(folder, side, name)
    except BaseException:
        _remove_if(folder, side, made)
        raise
    finally:
        os.close(handle)
    return _settled(folder, name, made, undo)


def _keep(_order: Order, _fds: list[int], _given: list[int], undo: Undo) -> Answer:
    undo.clear()
    return {}


def _remove(order: Order, fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    """Removes a name if it is still that of the file that was made; `made` null: whatever has the name."""
    (folder,) = fds
    here = paths.look_in(folder, order["name"])
    if here is None:
        return {"state": "gone"}
    if order["made"] not in (None, [here.st_dev, here.st_ino]):
        return {"state": "other"}
    _remove_now(folder, order["name"], here)
    return {"state": "removed"}


def _reopen(_order: Order, fds: list[int], given: list[int], _undo: Undo) -> Answer:
    given.append(paths.reopen(fds[0]))
    return {}


ORDERS: dict[str, Callable[[Order, list[int], list[int], Undo], Answer]] = {
    "become": _become,
    "folder": _folder,
    "examine": _examine,
    "make_file": _make_file,
    "make_folder": _make_folder,
    "make_fifo": _make_fifo,
    "keep": _keep,
    "remove": _remove,
    "reopen": _reopen,
}


def identity(found: os.stat_result) -> list[int]:
    """What distinguishes a file from any other, and from itself after a change."""
    return [found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size]


def _made(found: os.stat_result) -> Answer:
    return {"made": [found.st_dev, found.st_ino], "mode": found.st_mode}


def _settled(folder: int, name: str, made: os.stat_result, undo: Undo) -> Answer:
    """The answer for something new. In its user's own directory that user may have replaced it already."""
    here = paths.look_in(folder, name)
    if here is None or not os.path.samestat(here, made):
        raise FileExistsError(errno.EEXIST, "it was replaced meanwhile")
    own = os.dup(folder)
    undo.append(lambda: _remove_if(own, name, made))
    return _made(here)


def _remove_if(folder: int, name: str, made: os.stat_result) -> None:
    here = paths.look_in(folder, name)
    if here is not None and os.path.samestat(here, made):
        _remove_now(folder, name, here)


def _remove_now(folder: int, name: str, here: os.stat_result) -> None:
    if stat.S_ISDIR(here.st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _copy(image: int, file: int) -> None:
    """Copies the content, its holes as holes."""
    size = os.fstat(image).st_size
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(image, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = os.lseek(image, begin, os.SEEK_HOLE)
        os.lseek(file, begin, os.SEEK_SET)
        while begin < end:
            count = os.sendfile(file, image, begin, min(_COPY_BYTES, end - begin))
            if not count:
                raise OSError(errno.EIO, "the image became shorter")
            begin += count
        offset = end
    os.ftruncate(file, size)


def _same_content(one: int, other: int) -> bool:
    size = os.fstat(one).st_size
    if size != os.fstat(other).st_size:
        return False
    offset = 0
    while offset < size:
        block = os.pread(one, _BLOCK_BYTES, offset)
        if not block or block != os.pread(other, len(block), offset):
            return False
        offset += len(block)
    return True


if __name__ == "__main__":
    main()
