"""Warns if a launcher starts no rank: the job would run without protection, and nothing would say so.

A small process waits beside the launcher until the first rank reports, which is a datagram to an abstract socket, or until
the launcher ends. It is neither a child of the launcher nor in its session, so the launcher cannot notice it.

Invariant: nothing here keeps a job from starting, or changes how it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Mapping

#: Names the socket, without its leading zero byte. The worker does not get it.
VARIABLE = "MIGRATOR_RANKS"
#: A launcher that has started no rank for this long is reported while it runs.
SLOW_S = 300.0


def watch(name: str) -> dict[str, str]:
    """Starts the process that waits for a rank of the launcher `name`, which this process is about to become. Returns what
    the launcher's environment needs for that; empty if it could not be started."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        address = f"migrator-ranks-{os.urandom(16).hex()}"
        listener.bind(f"\0{address}")
        launcher = os.pidfd_open(os.getpid())
        child = os.fork()
    except OSError:
        return {}
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _wait(name, launcher, listener)
        finally:
            os._exit(0)
    os.close(launcher)
    listener.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return {VARIABLE: address}


def report(environment: Mapping[str, str]) -> None:
    """Called by the first process of each rank."""
    if address := environment.get(VARIABLE):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"rank", f"\0{address}")


def _wait(name: str, launcher: int, listener: socket.socket) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # a reader of the launcher's output must see its end when it ends
        os.dup2(nothing, descriptor)
    os.chdir("/")
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.register(listener, select.POLLIN)
    slow_at = time.monotonic() + SLOW_S
    while True:
        ready = poll.poll(max(0.0, slow_at - time.monotonic()) * 1000 if slow_at else None)
        if any(descriptor == listener.fileno() for descriptor, _ in ready):
            return
        if ready:
            _warn(
                f"{name} has ended, and none of the processes that it started here was a rank: none could have been moved"
            )
            return
        slow_at = 0.0
        _warn(f"{name} has started no rank yet; what it has started itself cannot be moved")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"migrator run: warning: {text}", file=sys.stderr, flush=True)
