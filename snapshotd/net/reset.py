"""Resets a socket whose connection could not follow: the far host runs no daemon, so nobody can re-point its end.

CRIU can only restore such a socket as one that was shut down, which reads as a clean end of the stream; an application
would take half an answer for a whole one. So the daemon makes it what a reset leaves: ECONNRESET once, then the end.

The kernel sets that error when an established connection is dissolved. The connection dissolved here is one to nowhere,
made in repair mode on the loopback device: no packet but its reset is sent, and that never leaves the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

from snapshotd.net.flows import Holder
from snapshotd.net.sockets import borrow

_TCP_REPAIR, _ON, _OFF_IN_SILENCE = 19, 1, -1
_NOBODY_PORT = 1
_libc = ctypes.CDLL(None, use_errno=True)


def reset(holder: Holder) -> None:
    """The TCP socket, closed and unconnected as the image restored it, now reports a reset. Its process must be stopped.

    Raises ProcessLookupError when the process or its descriptor is gone, OSError when it is no such socket.
    """
    with borrow(holder) as sock:
        reuse = sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _ON)
        try:
            sock.connect(("::1" if sock.family == socket.AF_INET6 else "127.0.0.1", _NOBODY_PORT))
        finally:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF_IN_SILENCE)
        # int connect(int fd, const struct sockaddr *address, socklen_t size): AF_UNSPEC dissolves the connection
        if _libc.connect(sock.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the connection does not dissolve: {os.strerror(number)}")
        with contextlib.suppress(OSError):  # ENOTCONN, and done all the same
            sock.shutdown(socket.SHUT_RDWR)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)  # the end of repair mode took it away
