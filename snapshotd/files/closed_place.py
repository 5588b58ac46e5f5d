"""Makes files that a rank had made and closed on another node, and removes them. As `snapshotd/files/closed.py`, a part of
the worker for many files at once.

Invariants: only files of the worker's user are made, without set-user-id, set-group-id and sticky bits. No file is
overwritten, except one that an earlier move left there, unchanged since. A file gets its final name only when it is complete.
If the disk is full, or another user has one of the names, everything that the request made is removed again. Nothing is
removed but what was made, or what looks exactly as it did. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from typing import Any

from snapshotd.files import paths
from snapshotd.files.closed import (
    BELOW,
    BLOCK_BYTES,
    COPY_BYTES,
    PERMISSIONS,
    SIDE,
    Row,
    identity,
    opened,
    read,
    write,
)

#: Errors of the file system as a whole: no other file can be made either.
FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM)


class Foreign(FileExistsError):
    """Another user has this name. The rank would take that user's file for its own, so the move is refused."""


#: Root number, path below it, device, inode, modification time. The time, because a file system may give the inode of a file
#: that was removed to the next one.
Made = list[tuple[int, str, int, int, int]]


class Placing:
    """Makes the things of one request. `made` is complete at every moment: its owner removes them if this process fails."""

    def __init__(self, roots: list[int], packs: list[int], user_id: int, groups: list[int]) -> None:
        self._roots, self._packs, self._user_id, self._groups = roots, packs, user_id, groups
        self.made: Made = []
        self.taken: list[tuple[int, str, str]] = []  # root number, path, why it was not made
        self._folder: tuple[int, str, int] | None = None  # root number, path, descriptor
        self._own_folders: list[tuple[Row, tuple[int, int]]] = []  # new, or left by an earlier move; device, inode

    def place(self, rows: list[Row]) -> None:
        """Directories come before what they contain. Raises OSError if no file can be made any more."""
        try:
            for row in rows:
                try:
                    self._place(row)
                except OSError as error:
                    if error.errno in FATAL or isinstance(error, Foreign):
                        raise
                    self.taken.append((row.root, row.path, error.strerror or str(error)))
            for row, made in reversed(self._own_folders):
                with contextlib.suppress(OSError):
                    self._finish_folder(row, made)
        finally:
            self._forget_folder()

    def _place(self, row: Row) -> None:
        above, name = os.path.split(row.path)
        folder = self._in(row.root, above)
        here = paths.look_in(folder, name)
        if here is not None and here.st_uid not in (0, self._user_id):
            raise Foreign(errno.EEXIST, f"{row.path} belongs to user {here.st_uid}")
        if row.kind == "f":
            self._place_file(row, folder, name, here)
        elif row.kind == "d":
            if here is None:
                os.mkdir(name, 0o700, dir_fd=folder)
                self._own_folders.append((row, self._note(row, folder, name)))
            elif _is_left(here, row.left):
                self._take_over(row, folder, name, here)
            elif not stat.S_ISDIR(here.st_mode):
                raise FileExistsError(errno.EEXIST, "something else has this name")
        elif here is None:
            os.symlink(row.link, name, dir_fd=folder)
            self._note(row, folder, name)
        elif not stat.S_ISLNK(here.st_mode) or os.readlink(name, dir_fd=folder) != row.link:
            raise FileExistsError(errno.EEXIST, "something else has this name")

    def _place_file(self, row: Row, folder: int, name: str, here: os.stat_result | None) -> None:
        replaces = here is not None and _is_left(here, row.left)
        if here is not None:
            attributes = (here.st_mode & PERMISSIONS, here.st_gid, here.st_mtime_ns)
            exact = attributes == (row.mode, row.group, row.mtime_ns)
            if (exact or not replaces) and self._is_same(row, folder, name, here):
                return
            if not replaces:
                raise FileExistsError(errno.EEXIST, "a file with other content has this name")
        side = SIDE + secrets.token_hex(16)
        file = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            copy_range(self._packs[row.pack], row.offset, row.size, file)
            self._finish(file, row)
            made = os.fstat(file)
            if replaces:
                os.rename(side, name, src_dir_fd=folder, dst_dir_fd=folder)
            else:
                paths.rename_to_free(folder, side, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(side, dir_fd=folder)
            raise
        finally:
            os.close(file)
        self.made.append((row.root, row.path, made.st_dev, made.st_ino, made.st_mtime_ns))

    def _is_same(self, row: Row, folder: int, name: str, here: os.stat_result) -> bool:
        if not stat.S_ISREG(here.st_mode) or here.st_size != row.size or here.st_uid != self._user_id:
            return False
        if here.st_mtime_ns == row.mtime_ns:
            return True
        file = paths.open_regular(name, folder=folder)
        try:
            done = 0
            while done < row.size:
                block = os.pread(file, min(BLOCK_BYTES, row.size - done), done)
                if not block or block != os.pread(self._packs[row.pack], len(block), row.offset + done):
                    return False
                done += len(block)
            return True
        finally:
            os.close(file)

    def _take_over(self, row: Row, folder: int, name: str, here: os.stat_result) -> None:
        """A directory that an earlier move left: it gets the mode and times that it has on the source now."""
        self._own_folders.append((row, (here.st_dev, here.st_ino)))
        if here.st_mode & 0o700 != 0o700:
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                if os.path.samestat(os.fstat(handle), here):
                    os.fchmod(handle, 0o700)
            finally:
                os.close(handle)

    def _finish(self, handle: int, row: Row) -> None:
        if row.group in self._groups:
            os.fchown(handle, -1, row.group)
        os.fchmod(handle, row.mode & PERMISSIONS)
        os.utime(handle, ns=(row.atime_ns, row.mtime_ns))

    def _finish_folder(self, row: Row, made: tuple[int, int]) -> None:
        """Last, because making something in a directory changes its time, and needs rights that it may not have later."""
        handle = paths.openat2(self._roots[row.root], row.path, os.O_RDONLY | os.O_DIRECTORY, BELOW)
        try:
            found = os.fstat(handle)
            if (found.st_dev, found.st_ino) == made:
                self._finish(handle, row)
        finally:
            os.close(handle)

    def _note(self, row: Row, folder: int, name: str) -> tuple[int, int]:
        here = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if here.st_uid != self._user_id:
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile")
        self.made.append((row.root, row.path, here.st_dev, here.st_ino, here.st_mtime_ns))
        return here.st_dev, here.st_ino

    def _in(self, root: int, above: str) -> int:
        if self._folder is None or self._folder[:2] != (root, above):
            self._forget_folder()
            self._folder = (root, above, self._open(root, above))
        return self._folder[2]

    def _open(self, root: int, above: str) -> int:
        """A directory, which no other user owns, nor one of those around it: such a user could replace what is in it."""
        handle = paths.open_beneath(self._roots[root], "")
        for name in above.split("/") if above else ():
            try:
                inner = paths.open_beneath(handle, name)
            finally:
                os.close(handle)
            handle = inner
            owner = os.fstat(handle).st_uid
            if owner not in (0, self._user_id):
                os.close(handle)
                raise Foreign(errno.EEXIST, f"{name} in {above} belongs to user {owner}")
        return handle

    def _forget_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder[2])
            self._folder = None


def _is_left(here: os.stat_result, left: list[int] | None) -> bool:
    """Whether it is what an earlier move left. Of files that the rank had open then, the change time is not known. Of a
    directory that this very move made for open files, device and inode are enough."""
    return left is not None and left in (seen := identity(here), seen[:4], seen[:2])


def copy_range(source: int, offset: int, size: int, file: int) -> None:
    """Copies a part of a file, its holes as holes."""
    end = offset + size
    at = offset
    while at < end:
        try:
            begin = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        stop = min(end, os.lseek(source, begin, os.SEEK_HOLE))
        if begin >= end:
            break
        os.lseek(file, begin - offset, os.SEEK_SET)
        while begin < stop:
            count = os.sendfile(file, source, begin, min(COPY_BYTES, stop - begin))
            if not count:
                raise OSError(errno.EIO, "the image became shorter")
            begin += count
        at = stop
    os.ftruncate(file, size)


# ---------------------------------------------------------------- removing


def remove_made(roots: list[int], made: Made) -> list[tuple[int, str]]:
    """Undo: removes what is still what was made, the newest first. Returns what stays."""
    for root, path, device, inode, _ in made:  # a directory may have got a mode in which nothing can be removed
        with contextlib.suppress(OSError):
            handle = paths.openat2(roots[root], path, os.O_RDONLY | os.O_DIRECTORY, BELOW)
            try:
                found = os.fstat(handle)
                if (found.st_dev, found.st_ino) == (device, inode) and found.st_mode & 0o700 != 0o700:
                    os.fchmod(handle, found.st_mode & PERMISSIONS | 0o700)
            finally:
                os.close(handle)
    stays = []
    for root, path, *file in reversed(made):

        def same(found: os.stat_result, file: list[int] = file) -> bool:
            is_folder = stat.S_ISDIR(
                found.st_mode
            )  # its time changes with what is in it, and only empty ones are removed
            return [found.st_dev, found.st_ino, file[2] if is_folder else found.st_mtime_ns] == file

        if not _remove(roots, root, path, same):
            stays.append((root, path))
    return stays


def remove_unchanged(roots: list[int], rows: list[tuple[int, str, list[int]]]) -> int:
    """Removes files that look exactly as they did, and directories that are then empty. Returns how many went."""
    count = 0
    for root, path, seen in reversed(rows):

        def same(found: os.stat_result, seen: list[int] = seen) -> bool:
            is_folder = stat.S_ISDIR(found.st_mode) and [found.st_dev, found.st_ino] == seen[:2]
            return is_folder or identity(found) == seen

        count += _remove(roots, root, path, same)
    return count


def _remove(roots: list[int], root: int, path: str, is_it: Callable[[os.stat_result], bool]) -> bool:
    """Whether it is gone. Empty directories alone are removed."""
    above, name = os.path.split(path)
    try:
        folder = paths.open_beneath(roots[root], above)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    try:
        here = paths.look_in(folder, name)
        if here is None:
            return True
        if not is_it(here):
            return False
        if stat.S_ISDIR(here.st_mode):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def order_place(fds: list[int], user_id: int, undo: list[Callable[[], None]]) -> dict[str, Any]:
    wanted, result, *packs = fds
    request = read(wanted)
    with opened(request["roots"]) as roots:
        placing = Placing(roots, packs, user_id, request["groups"])
        undo.append(lambda: _undo(request["roots"], placing.made))
        try:
            placing.place([Row(*row) for row in request["rows"]])
        except BaseException:
            remove_made(roots, placing.made)
            placing.made.clear()
            raise
    write(result, {"made": placing.made, "taken": placing.taken})
    return {}


def _undo(roots: list[str], made: Made) -> None:
    with opened(roots) as handles:
        remove_made(handles, made)


def order_undo(fds: list[int]) -> dict[str, Any]:
    request = read(fds[0])
    with opened(request["roots"]) as roots:
        stays = remove_made(roots, [tuple(one) for one in request["made"]])
    return {"stays": len(stays), "first": stays[0][1] if stays else ""}


def order_remove(fds: list[int]) -> dict[str, Any]:
    request = read(fds[0])
    with opened(request["roots"]) as roots:
        return {"removed": remove_unchanged(roots, request["rows"])}
