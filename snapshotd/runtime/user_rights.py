"""Runs a function with the file-system rights of a user, in a thread of its own.

The kernel keeps credentials for each thread. With a file-system uid other than 0 it also takes away the capabilities that
override permissions, so a path is looked up and opened exactly as the user could. The thread ends afterwards: nothing else
ever runs in it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_SYS_FACCESSAT2 = 439  # the same number on every architecture
_AT_EACCESS = 0x200
_AT_EMPTY_PATH = 0x1000

_libc = ctypes.CDLL(None, use_errno=True)


def call(user_id: int, group_id: int, groups: Sequence[int], function: Callable[[], T]) -> T:
    """The result of `function`, called with the rights of this user. Its exceptions are passed on. Blocks."""
    if user_id == 0:
        return function()
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _become(user_id, group_id, groups)
            answers.append(function())
        except BaseException as error:  # noqa: BLE001  (handed to the caller's thread)
            failures.append(error)

    thread = threading.Thread(target=run, name=f"as-user-{user_id}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return answers[0]


def may_access(descriptor: int, mode: int) -> bool:
    """Whether the calling thread may open this file (an O_PATH descriptor will do) for os.R_OK, os.W_OK or both."""
    if _libc.syscall(_SYS_FACCESSAT2, descriptor, b"", mode, _AT_EACCESS | _AT_EMPTY_PATH) == 0:
        return True
    error = ctypes.get_errno()
    if error in _NO_RIGHT:
        return False
    raise OSError(error, os.strerror(error))


_NO_RIGHT = {1, 13, 30}  # EPERM, EACCES, EROFS


def _become(user_id: int, group_id: int, groups: Sequence[int]) -> None:
    """Changes this thread only: the C library's setgroups would change all threads."""
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(_SYS_SETGROUPS[platform.machine()], len(groups), listed) != 0:
        raise OSError(ctypes.get_errno(), "setgroups failed")
    _libc.setfsgid(group_id)
    _libc.setfsuid(user_id)
    if (
        _libc.setfsgid(-1) != group_id or _libc.setfsuid(-1) != user_id
    ):  # they return the previous value, never an error
        raise PermissionError(f"the rights of user {user_id} cannot be taken")
