"""The child that works on a user's files with that user's rights. `snapshotd/files/as_user.py` starts it and asks it.

The first message names the user. From then on the child has the rights of that user and no more, and is in a sandbox
(`Profile.FILES`, or `Profile.LOOK` if it may write nowhere): the kernel decides what it may read and write, and a user gains
nothing by swapping a directory for a link. Each request is answered with one message; both are small JSON objects, with
descriptors beside them. Paths are resolved without links, names are single components in a directory that is given as a
descriptor.

Invariants: set-user-id, set-group-id and sticky bits are never set. A file gets its final name only when it is complete. What
was made is removed again if the daemon ends before it has said `keep`, which it does once its journal knows what was made.
A request that outlasts its time limit ends this process, even if no daemon is left to kill it: file systems can be silent.
Little but the standard library is imported, because this process starts during the pause of a move.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import stat
from collections.abc import Callable
from typing import Any, NoReturn

from snapshotd.files import closed, closed_place, cut_back, file_content, paths, put_back
from snapshotd.files.closed import PERMISSIONS
from snapshotd.sandbox.enter import enter
from snapshotd.sandbox.privileges import CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, Ids
from snapshotd.sandbox.profiles import Profile

MESSAGE_BYTES = 128 << 10
MAX_FDS = 4
#: A request is given up by the daemon first, with a reason; after this much more time it ends by itself.
GRACE_S = 10.0
#: Time limit for removing what was made.
UNDO_S = 60.0

#: For files that do not belong to the rank's user, and for ranks of root.
_AS_ROOT = (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER)
#: For looking at root's files: without it, access(2) would deny what ranks of root can do.
_LOOK_AS_ROOT = (CAP_DAC_OVERRIDE,)
_PR_SET_PDEATHSIG = 1

#: With whose id files are accessed. Not the effective id: `snapshotd/sandbox/privileges.py` says why.
_user_id = os.geteuid()

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
        # SIGALRM is fatal, in a file system's wait too
        signal.setitimer(signal.ITIMER_REAL, order["limit_s"] + GRACE_S)
        answer: Answer = {}
        given: list[int] = []
        try:
            answer = ORDERS[order["do"]](order, fds, given, undo)
        except OSError as error:
            answer = {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            socket.send_fds(line, [json.dumps(answer).encode()], given)
        except OSError:  # the daemon has ended
            _end(undo)
        for fd in (*fds, *given):
            os.close(fd)


def _end(undo: Undo) -> NoReturn:
    signal.setitimer(signal.ITIMER_REAL, UNDO_S)
    for act in reversed(undo):
        with contextlib.suppress(OSError):
            act()
    os._exit(0)


def _become(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    user_id, group_id, groups = order["ids"]
    os.umask(0o077)
    ids = Ids(int(user_id), int(group_id), tuple(int(group) for group in groups))
    profile, as_root = (Profile.FILES, _AS_ROOT) if order["write"] else (Profile.LOOK, _LOOK_AS_ROOT)
    if not order["write"]:  # one that writes has something to remove first
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    enter(profile, ids, write=order["write"], keep=as_root if ids.user_id == 0 else ())
    global _user_id
    _user_id = ids.user_id
    return {"ids": [_user_id, *os.getresgid()]}


def _folder(order: Order, _fds: list[int], given: list[int], _undo: Undo) -> Answer:
    """A directory below a carry path, which is an administrator's choice and is itself opened by its real path."""
    root = paths.openat2(None, order["root"], os.O_PATH | os.O_DIRECTORY, paths.NO_LINKS)
    try:
        given.append(paths.open_beneath(root, order["path"]))
    finally:
        os.close(root)
    return {}


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
        same = os.path.samestat(here, os.fstat(existing)) and file_content.same(existing, image)
    finally:
        os.close(existing)
    return {"state": "same", **_made(here)} if same else {"state": "taken", "by": "by a file with other content"}


def _must_own(order: Order) -> None:
    if order["foreign"]:
        raise PermissionError(errno.EPERM, order["foreign"])


def _make_file(order: Order, fds: list[int], _given: list[int], undo: Undo) -> Answer:
    _must_own(order)
    folder, image = fds
    name, side = order["name"], order["side"]
    file = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    made = os.fstat(file)
    try:
        file_content.copy(image, file)
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
    _must_own(order)
    os.mkdir(name, 0o700, dir_fd=folder)
    made = paths.openat2(
        folder, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, paths.RESOLVE_BENEATH | paths.NO_LINKS
    )
    try:
        found = os.fstat(made)
        if found.st_uid != _user_id or os.listdir(made):
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
    _must_own(order)
    side = order["side"]
    os.mkfifo(side, 0o600, dir_fd=folder)
    handle = os.open(side, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    made = os.fstat(handle)
    try:
        if not stat.S_ISFIFO(made.st_mode) or made.st_uid != _user_id or made.st_nlink != 1:
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile")
        # The filter denies changes by a path, and an O_PATH descriptor cannot be changed. This opening does not block.
        fifo = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchown(fifo, order["user_id"], order["group_id"])
            os.fchmod(fifo, order["mode"])
        finally:
            os.close(fifo)
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


def _look(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    """stat of each path, and whether this user may read, write and execute it; or the number of the error."""
    found: list[list[int] | int] = []
    for path in order["paths"]:
        try:
            here = os.stat(path)
            may = [int(paths.may_access(path, right)) for right in (os.R_OK, os.W_OK, os.X_OK)]
        except OSError as error:
            found.append(error.errno or errno.EIO)
        else:
            found.append(_numbers(here) + may)
    return {"found": found}


def _look_carried(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    """stat of a path, through no link that root did not make; null if it does not exist."""
    parent, name = os.path.split(order["path"])
    try:
        folder = paths.open_folder(parent)
    except FileNotFoundError:
        return {"found": None}
    try:
        here = paths.look_in(folder, name)
    finally:
        os.close(folder)
    return {"found": None if here is None else _numbers(here)}


def _look_makeable(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    path = order["path"]
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return {"problem": f"{path} is not a directory"}
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return {"problem": f"{path} is on a read-only file system"}
    return {"problem": ""}


def _look_read(order: Order, _fds: list[int], given: list[int], _undo: Undo) -> Answer:
    """Some bytes at each offset of a file, one after the other in a memory file: its reader cannot hang."""
    file = paths.open_regular(order["path"], follow=True)
    content = os.memfd_create("content", os.MFD_CLOEXEC)
    given.append(content)
    try:
        here = os.fstat(file)
        if [here.st_dev, here.st_ino] != order["file"]:
            raise OSError(errno.ESTALE, "was replaced while it was examined")
        for offset in order["offsets"]:
            os.write(content, os.pread(file, order["bytes"], offset))
    finally:
        os.close(file)
    return {}


def _cut_back(order: Order, _fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    return cut_back.order_cut(order["path"], order["inode"], order["born_ns"], order["size"], order["suffix"], _user_id)


def _put_back(order: Order, fds: list[int], _given: list[int], _undo: Undo) -> Answer:
    wanted = put_back.Wanted(*order["wanted"])
    names = (order["suffix"], order["token"])
    return put_back.order_put_back(order["path"], order["above"], fds[0], wanted, *names, order["put_back"])


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
    "look": _look,
    "look_carried": _look_carried,
    "look_makeable": _look_makeable,
    "look_read": _look_read,
    "cut_back": _cut_back,
    "put_back": _put_back,
    "closed_scan": lambda _order, fds, _given, _undo: closed.order_scan(fds, _user_id),
    "closed_pack": lambda _order, fds, _given, _undo: closed.order_pack(fds),
    "closed_same": lambda _order, fds, _given, _undo: closed.order_same(fds),
    "closed_place": lambda _order, fds, _given, undo: closed_place.order_place(fds, _user_id, undo),
    "closed_undo": lambda _order, fds, _given, _undo: closed_place.order_undo(fds),
    "closed_remove": lambda _order, fds, _given, _undo: closed_place.order_remove(fds),
}


def identity(found: os.stat_result) -> list[int]:
    """What distinguishes a file from any other, and from itself after a change."""
    return [found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size]


def _numbers(found: os.stat_result) -> list[int]:
    """As snapshotd/files/user_look.py reads them."""
    ids = [found.st_mode, found.st_uid, found.st_gid]
    return [*ids, found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino]


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


if __name__ == "__main__":
    main()
