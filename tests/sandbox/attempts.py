"""A child that enters a sandbox and then tries things: `attempts.py PLAN`, a JSON object; prints the result of each as JSON.

The result is the number of the error, or 0. Arguments are chosen so that the call fails harmlessly where nothing denies it,
with another error than EPERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox import landlock, privileges, syscalls
from snapshotd.sandbox.enter import enter, library_paths
from snapshotd.sandbox.privileges import Ids
from snapshotd.sandbox.profiles import Profile

MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int) -> int:
    """The error of a system call by its name; 0 if it succeeds."""
    number = syscalls.number(name, MACHINE)
    assert number is not None
    result = _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(value) for value in arguments))
    return ctypes.get_errno() if result < 0 else 0


def raw(number: int) -> int:
    result = _libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    return ctypes.get_errno() if result < 0 else 0


def errno_of(act: Callable[[], Any]) -> int:
    try:
        act()
    except OSError as error:
        return error.errno or -1
    except RuntimeError:
        return -2
    return 0


def thread() -> None:
    one = threading.Thread(target=lambda: None)
    one.start()
    one.join()


def write_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("text")


def overwrite(path: str) -> None:
    """Through a descriptor that is open for reading and writing, as that of /proc/PID/mem is."""
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, b"changed", 0)


def fchmod(path: str, mode: int) -> None:
    """Through a descriptor that is open for reading: the kernel demands no more."""
    file = os.open(path, os.O_RDONLY)
    os.fchmod(file, mode)


def settle(path: str) -> None:
    """What is done with a file that was just made."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchown(file, 1500, 1500)
    os.fchmod(file, 0o640)
    os.utime(file, ns=(1_000_000_000, 2_000_000_000))


def make_by_openat2(path: str, how: str) -> None:
    """A set-user-id program, and its content."""
    wanted = struct.pack("<QQQ", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o4755, 0)
    os.umask(0)
    file = _libc.syscall(ctypes.c_long(437), -100, os.fsencode(path), wanted, ctypes.c_size_t(len(wanted)))
    if file < 0:
        raise OSError(ctypes.get_errno(), "openat2")
    if how == "write":
        os.write(file, b"#!/bin/sh")
    elif how == "truncate":
        os.ftruncate(file, 4096)
    else:
        os.posix_fallocate(file, 0, 4096)


def connect(family: int, address: Any) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(5)
        one.connect(address)


def attempt(step: list[Any]) -> int:
    match step:
        case ["call", name, *arguments]:
            return call(name, *arguments)
        case ["raw", number]:
            return raw(number)
        case ["read", path]:
            return errno_of(lambda: open(path, "rb").read(16))
        case ["write", path]:
            return errno_of(lambda: write_file(path))
        case ["overwrite", path]:
            return errno_of(lambda: overwrite(path))
        case ["chmod", path, mode]:
            return errno_of(lambda: os.chmod(path, mode))
        case ["fchmod", path, mode]:
            return errno_of(lambda: fchmod(path, mode))
        case ["chown", path, user_id]:
            return errno_of(lambda: os.chown(path, user_id, user_id))
        case ["setxattr", path]:
            return errno_of(lambda: os.setxattr(path, "user.mark", b"1"))
        case ["utime", path]:
            return errno_of(lambda: os.utime(path, (1, 1)))
        case ["create", path, mode]:
            return errno_of(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        case ["mknod", path, mode]:
            return errno_of(lambda: os.mknod(path, mode))
        case ["mkdir", path, mode]:
            return errno_of(lambda: os.mkdir(path, mode))
        case ["openat2", path, how]:
            return errno_of(lambda: make_by_openat2(path, how))
        case ["settle", path]:
            return errno_of(lambda: settle(path))
        case ["socket", family]:
            return errno_of(
                lambda: socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM).close()
            )
        case ["connect", family, address]:
            return errno_of(lambda: connect(family, tuple(address) if isinstance(address, list) else address))
        case ["exec"]:
            return errno_of(lambda: os.execv("/bin/true", ["true"]))
        case ["fork"]:
            return errno_of(lambda: os.fork() or os._exit(0))
        case ["thread"]:
            return errno_of(thread)
        case ["kill", pid]:
            return errno_of(lambda: os.kill(pid, 0))
        case ["setuid", user_id]:
            return errno_of(lambda: os.setresuid(user_id, user_id, user_id))
        case ["memory", pid, mode]:
            return errno_of(lambda: os.close(os.open(f"/proc/{pid}/mem", mode)))
        case ["stat"]:
            return errno_of(lambda: os.fstat(0))
        case _:
            raise ValueError(step)


def main() -> None:
    plan = json.loads(sys.argv[1])
    if "dies with" in plan:
        _libc.prctl(1, plan["dies with"], 0, 0, 0)
    if "landlock" in plan:
        known = plan["landlock"]
        landlock.version = lambda: known
    match plan["enter"]:
        case None:
            pass
        case "filter only":  # with all capabilities: what fails then is denied by the filter, not by their absence
            privileges.no_new_privileges()
            rules = Profile[plan["rules"]].value
            assert seccomp.install(seccomp.compiled(rules.denied, rules.allowed, MACHINE))
        case name:
            ids = Ids(*plan["ids"]) if plan.get("ids") else None
            read = plan.get("read", library_paths())
            enter(Profile[name], ids, read=read, write=plan.get("write", ()), keep=plan.get("keep", ()))
    status = ""
    with contextlib.suppress(PermissionError):
        status = Path("/proc/self/status").read_text()
    ends_with_parent = ctypes.c_int()
    _libc.prctl(2, ctypes.byref(ends_with_parent), 0, 0, 0)
    results = [attempt(step) for step in plan["steps"]] + [ends_with_parent.value] * ("dies with" in plan)
    os.write(1, json.dumps({"results": results, "status": status}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
