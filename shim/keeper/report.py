"""Transfers a torchrun worker's error file ($TORCHELASTIC_ERROR_FILE) to the node of its agent.

The agent expects it in a temporary folder on its own node. A worker that has moved writes it on the node where it runs:
its guest keeper creates the folder there and sends the file with the exit status; the home keeper writes it where the
agent reads it. Invariant: the guest keeper accesses the path that the rank chose only with the user and groups of the
rank. A report that cannot be read is no error: the exit status suffices.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping

from shim.keeper.privileges import Identity

MOST_BYTES = 256 << 10
_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def path_in(environment: Mapping[str, str]) -> str:
    """Returns the path of this rank's report, empty if the launcher set none."""
    path = environment.get(_VARIABLE, "")
    is_text = not any("\ud800" <= sign <= "\udfff" for sign in path)  # the daemons accept UTF-8 only
    return path if path.startswith("/") and "\0" not in path and is_text and len(path) <= 4096 else ""


def make_room(path: str, identity: Identity) -> None:
    """Creates the folder of the report, as the rank's user."""
    if path:
        _as_user(identity, lambda: _make_folder(path))


def collect(path: str, identity: Identity) -> bytes:
    """Returns the report, empty if there is none."""
    return _as_user(identity, lambda: _take(path)) if path else b""


def put(path: str, report: bytes) -> None:
    """Writes the report on the home node, atomically."""
    with contextlib.suppress(OSError):
        side = f"{path}.{os.getpid()}"
        with open(side, "wb") as file:
            file.write(report)
        os.rename(side, path)


def _make_folder(path: str) -> bytes:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return b""


def _take(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block us
    try:
        return os.read(handle, MOST_BYTES) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    finally:
        os.close(handle)


def _as_user(identity: Identity, act: Callable[[], bytes]) -> bytes:
    """Runs `act` in a child process with the user's ids, and returns its result."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            identity.assume()
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
