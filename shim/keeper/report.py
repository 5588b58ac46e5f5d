"""The file in which a worker of torchrun tells its agent what it died of ($TORCHELASTIC_ERROR_FILE).

It lies in a temporary folder of the node that the agent is on. A worker that has moved writes it where it runs now: its
guest keeper makes the folder there, and hands the file over with the exit status; the home keeper puts it where the
agent looks. Invariant: whatever path a rank names, the guest keeper, which runs as root, touches it only as the rank's user.
A report that cannot be had is no error: the exit status says enough.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping

MOST_BYTES = 256 << 10
_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def path_in(environment: Mapping[str, str]) -> str:
    """Where this rank would report; empty where no report was asked for."""
    path = environment.get(_VARIABLE, "")
    return path if path.startswith("/") and "\0" not in path else ""


def make_room(path: str, user_id: int, group_id: int) -> None:
    """Makes the folder of the report, as the rank would."""
    if path:
        _as_user(user_id, group_id, lambda: _make_folder(path))


def collect(path: str, user_id: int, group_id: int) -> bytes:
    """The report; nothing where there is none."""
    return _as_user(user_id, group_id, lambda: _take(path)) if path else b""


def put(path: str, report: bytes) -> None:
    """Lays it down at home, whole or not at all."""
    with contextlib.suppress(OSError):
        side = f"{path}.{os.getpid()}"
        with open(side, "wb") as file:
            file.write(report)
        os.rename(side, path)


def _make_folder(path: str) -> bytes:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return b""


def _take(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
    try:
        return os.read(handle, MOST_BYTES) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    finally:
        os.close(handle)


def _as_user(user_id: int, group_id: int, act: Callable[[], bytes]) -> bytes:
    """Does it in a child that is the user, and gives what it answered."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(group_id)
            os.setuid(user_id)
            with open(write_end, "wb") as answer:
                answer.write(act())
        except OSError:
            pass
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answered:
        report = answered.read()
    os.waitpid(pid, 0)
    return report
