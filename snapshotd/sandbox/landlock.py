"""Landlock: restricts which files the calling thread can open, and which TCP ports it can use, whatever its user is.

Linux 5.13 and later, if it is enabled. Each version of the interface restricts more than the one before; what a kernel does
not know is left unrestricted. Descriptors that are open already are not concerned.

A process in a Landlock domain cannot look into processes outside it (ptrace, /proc/PID/mem), whatever its capabilities are.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

#: linux/landlock.h
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE, MAKE = 0b11 << 4, 0b1111111 << 6
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1

READING = READ_FILE | READ_DIR
#: What a writer may do below a directory: no device nodes.
_MAKE_DEVICE = 1 << 6 | 1 << 11
WRITING = WRITE_FILE | REMOVE | MAKE | REFER | TRUNCATE
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
#: Rights by the version of the interface that introduced them.
_SINCE = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Version of the interface; 0 if the kernel has no Landlock or it is not enabled."""
    found: int = _libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    return max(0, found)


def restrict(
    handled: int, read: Iterable[str], write: Iterable[str], *, tcp: bool = False, scoped: bool = True
) -> bool:
    """Whether this kernel has Landlock. Denies `handled`, except reading below `read`, and reading and writing below `write`.

    `tcp`: whether TCP ports may be bound and connected to. `scoped`: no signals to, and no abstract sockets of, processes
    outside. Paths that do not exist are left out. Applies to this thread and what it starts. no_new_privs must be set.
    """
    abi = version()
    if not abi:
        return False
    handled &= sum(rights for since, rights in _SINCE.items() if since <= abi)
    ports = 0 if tcp else BIND_TCP | CONNECT_TCP
    scopes = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if scoped else 0
    attributes = struct.pack("<QQQ", handled, ports, scopes)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _call(_SYS_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in write:
            _grant(ruleset, path, handled & (READING | WRITING) & ~_MAKE_DEVICE)
        for path in read:
            _grant(ruleset, path, handled & READING)
        _call(_SYS_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            rights &= _OF_FILES
        if rights:
            _call(_SYS_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("<Qi", rights, folder), 0)
    finally:
        os.close(folder)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
