"""Opens paths that a user controls, without being led elsewhere by links that the user lays meanwhile.

Invariants: a path is resolved once, to a descriptor, and everything else is relative to that descriptor. Nothing is opened
for reading that was not seen to be a regular file, because opening a device or a FIFO has side effects. Only the standard
library is imported here: a child that starts during the pause of a move needs this module.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

#: struct open_how, linux/openat2.h
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
NO_LINKS = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS

_SYS_OPENAT2 = 437  # the same number on every architecture
_SYS_FACCESSAT2 = 439
_AT_FDCWD = -100
_AT_EACCESS = 0x200
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x100, 0x1000, 0x4000
_STATX_BTIME = 0x800
_RENAME_NOREPLACE = 1
_MAX_LINKS = 40  # as the kernel
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
#: Of struct statx: the mask of what is known, and the time of birth.
_KNOWN, _BORN, _BORN_AT = struct.Struct("=I"), struct.Struct("=qI"), 80

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def openat2(folder: int | None, path: str, flags: int, resolve: int) -> int:
    """openat2(2), without O_CREAT. `folder` None: relative to the working directory."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    handle: int = _libc.syscall(
        _SYS_OPENAT2,
        _AT_FDCWD if folder is None else folder,
        os.fsencode(path),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if handle < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            raise OSError(code, "this kernel lacks openat2 (it is in Linux 5.6 and later)", path)
        raise OSError(code, os.strerror(code), path)
    return handle


def may_access(path: str, mode: int) -> bool:
    """access(2) with the ids that open(2) uses: the C library's own asks for the real ones, or guesses."""
    return bool(_libc.syscall(_SYS_FACCESSAT2, _AT_FDCWD, os.fsencode(path), mode, _AT_EACCESS) == 0)


def open_folder(path: str) -> int:
    """An O_PATH descriptor of a directory. Follows only links that belong to root, which an administrator made."""
    try:
        return openat2(None, path, _FOLDER, NO_LINKS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return _walk(path)


def open_root(pid: int) -> int:
    """An O_PATH descriptor of a process's root directory. Raises ProcessLookupError or FileNotFoundError if it has ended."""
    return os.open(f"/proc/{pid}/root", _FOLDER)


def open_folder_in(root: int, path: str, flags: int = os.O_PATH) -> int:
    """A descriptor of a directory inside the directory `root`, through no link at all. `path` may begin with /."""
    return openat2(root, path.lstrip("/") or ".", flags | os.O_DIRECTORY, RESOLVE_IN_ROOT | NO_LINKS)


def look_inside(root: int, path: str) -> os.stat_result:
    """stat of a path inside the directory `root`, through no link at all. OSError with ELOOP if there is one."""
    handle = openat2(root, path.lstrip("/") or ".", os.O_PATH, RESOLVE_IN_ROOT | NO_LINKS)
    try:
        return os.fstat(handle)
    finally:
        os.close(handle)


def open_beneath(folder: int, path: str) -> int:
    """An O_PATH descriptor of a directory below `folder`, through no link at all."""
    return openat2(folder, path or ".", _FOLDER, RESOLVE_BENEATH | NO_LINKS)


def _walk(path: str) -> int:
    names = _names(path)
    here = os.open("/", _FOLDER)
    links = 0
    try:
        while names:
            found = os.open(names.pop(), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            try:
                if stat.S_ISLNK(os.fstat(found).st_mode):
                    links += 1
                    if links > _MAX_LINKS or not _made_by_root(here, found):
                        raise OSError(errno.ELOOP, "a link that root did not make is in the way", path)
                    leads_to = os.readlink("", dir_fd=found)
                    names += _names(leads_to)
                    if leads_to.startswith("/"):
                        top = os.open("/", _FOLDER)
                        os.dup2(top, here, inheritable=False)
                        os.close(top)
                else:
                    os.dup2(found, here, inheritable=False)
            finally:
                os.close(found)
        if not stat.S_ISDIR(os.fstat(here).st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    except BaseException:
        os.close(here)
        raise
    return here


def _names(path: str) -> list[str]:
    """The names in a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _made_by_root(folder: int, link: int) -> bool:
    """Whether a link belongs to root, and only root can have put it into this directory."""
    above = os.fstat(folder)
    closed = not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or above.st_mode & stat.S_ISVTX
    return os.fstat(link).st_uid == 0 and above.st_uid == 0 and bool(closed)


def look(path: str) -> os.stat_result | None:
    """lstat of a path whose directories are no users' links; None if there is nothing, or a link is in the way."""
    folder, name = os.path.split(path)
    try:
        handle = open_folder(folder)
    except OSError:
        return None
    try:
        return look_in(handle, name)
    except OSError:
        return None
    finally:
        os.close(handle)


def look_in(folder: int, name: str) -> os.stat_result | None:
    """lstat of one name in a directory; None if it is free."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def born_ns(file: int | str, *, follow: bool = False) -> int:
    """When a file was made: another one that has got its inode number was made later. 0: its file system does not say. As the
    kernel has it in memory, without asking a server: it never changes."""
    buffer = ctypes.create_string_buffer(256)
    flags = 0 if follow else _AT_SYMLINK_NOFOLLOW
    folder, path, flags = (_AT_FDCWD, file, flags) if isinstance(file, str) else (file, "", _AT_EMPTY_PATH)
    if _libc.statx(folder, os.fsencode(path), flags | _AT_STATX_DONT_SYNC, _STATX_BTIME, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    seconds, more_ns = _BORN.unpack_from(buffer, _BORN_AT)
    return int(seconds) * 10**9 + int(more_ns) if _KNOWN.unpack_from(buffer)[0] & _STATX_BTIME else 0


def reopen(handle: int) -> int:
    """Opens for reading what an O_PATH descriptor refers to, with the rights of this process. Only regular files: OSError
    with EINVAL otherwise."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def open_regular(path: str, *, folder: int | None = None, follow: bool = False) -> int:
    """Opens a regular file for reading; OSError with EINVAL if it is something else."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=folder)
    try:
        return reopen(handle)
    finally:
        os.close(handle)


def rename_to_free(folder: int, old: str, new: str) -> None:
    """Renames inside one directory; FileExistsError if the new name is taken, whatever it refers to."""
    if _libc.renameat2(folder, os.fsencode(old), folder, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):  # not every file system can do it
        raise OSError(code, os.strerror(code), new)
    os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    os.unlink(old, dir_fd=folder)
