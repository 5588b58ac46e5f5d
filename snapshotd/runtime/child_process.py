"""Starts a child of the daemon that runs one of its modules, with a socket as its standard input.

The child gets nothing of the daemon's environment but what Python needs to start, is in a session of its own, and writes its
output into memory: it is quoted if the child fails. What the child may do is its own module's first concern
(snapshotd/sandbox/).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import Internal

_PACKAGES = Path(__file__).resolve().parents[2]
_OUTPUT_BYTES = 2000
#: A killed process is normally gone in a millisecond. One that hangs in the kernel is reaped later.
REAP_S = 5.0


@dataclass(slots=True)
class ChildProcess:
    """A child, the daemon's end of its socket, and its output. Every method but `kill` may block for REAP_S."""

    module: str
    process: subprocess.Popen[bytes]
    line: socket.socket
    _output: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_output(self) -> str:
        """The end of what it wrote; empty after `close`."""
        if self._output < 0:
            return ""
        size = os.fstat(self._output).st_size
        return os.pread(self._output, _OUTPUT_BYTES, max(0, size - _OUTPUT_BYTES)).decode(errors="replace").strip()

    def kill(self) -> None:
        """Kills it and waits."""
        self.process.kill()
        try:
            self.process.wait(REAP_S)
        except (
            subprocess.TimeoutExpired
        ):  # a request that a FUSE server has taken ends with its answer, or with the server
            threading.Thread(target=self.process.wait, name="reaper of a child", daemon=True).start()

    def end(self) -> None:
        """Closes its socket, with which a child ends; kills it if it does not."""
        self.line.close()
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.close()

    def close(self) -> None:
        """Releases what the daemon holds of it; the process must be gone, or be hopeless. Idempotent."""
        self.line.close()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def start(
    module: str, *, kind: int = socket.SOCK_SEQPACKET, site_packages: bool = False, library_dir: str = ""
) -> ChildProcess:
    """Starts `python -m module`. Raises Internal if it cannot be started. Blocks only until it is executed.
    `library_dir`: where it looks for libraries first."""
    line, theirs = socket.socketpair(socket.AF_UNIX, kind)
    output = os.memfd_create("child output", os.MFD_CLOEXEC)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", *([] if site_packages else ["-S"]), "-m", module],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env=environment(site_packages=site_packages, library_dir=library_dir),
            )
    except BaseException as error:
        line.close()
        os.close(output)
        if isinstance(error, OSError):
            raise Internal(f"{module} cannot be started: {error.strerror}") from error
        raise
    return ChildProcess(module, process, line, output)


class Spares:
    """Children that are started before a move's pause, because starting one takes a tenth of a second or more."""

    def __init__(
        self, module: str, *, most: int, kind: int = socket.SOCK_SEQPACKET, site_packages: bool = False
    ) -> None:
        self._most = most
        self._start = functools.partial(start, module, kind=kind, site_packages=site_packages)
        self._started: deque[ChildProcess] = deque()

    def add(self) -> None:
        """Starts one more, if there is room. Raises Internal if none can be started."""
        if len(self._started) < self._most:
            self._started.append(self._start())

    def fill(self, count: int = 1) -> None:
        """Starts children until there are `count`. Raises Internal if none can be started."""
        while len(self._started) < min(count, self._most):
            self._started.append(self._start())

    def take(self) -> ChildProcess:
        """A spare child, or a new one. Raises Internal if none can be started."""
        with contextlib.suppress(IndexError):
            while True:
                found = self._started.popleft()
                if found.process.poll() is None:
                    return found
                found.end()
        return self._start()

    def trim(self, count: int) -> None:
        """Ends children that were not needed, until there are `count`."""
        with contextlib.suppress(IndexError):
            while len(self._started) > count:
                self._started.popleft().end()

    def close(self) -> None:
        """Ends the children that were not needed."""
        self.trim(0)


def environment(*, site_packages: bool, library_dir: str = "") -> dict[str, str]:
    """What Python needs to find this package, and other packages if `site_packages`: they may lie where the daemon's own
    PYTHONPATH leads."""
    paths = [str(_PACKAGES)]
    if site_packages and (more := os.environ.get("PYTHONPATH")):
        paths.append(more)
    places = os.pathsep.join(filter(None, [library_dir, os.environ.get("LD_LIBRARY_PATH")]))
    libraries = {"LD_LIBRARY_PATH": places} if places else {}
    return {"PYTHONPATH": os.pathsep.join(paths), "PATH": "/usr/bin:/bin", **libraries}
