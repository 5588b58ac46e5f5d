"""Resets a socket whose connection cannot be kept: the remote host runs no daemon that could re-point its socket.

CRIU can only restore such a socket as one that was shut down, which reads as a normal end of the stream: an application
would take half an answer for a whole one. So the socket gets the state after a reset: ECONNRESET once, then end of file.

The kernel sets that error when an established connection is disconnected. The connection used here leads nowhere; it is made
in repair mode on the loopback device. No packet but its reset is sent, and that never leaves the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

from snapshotd.net.flows import Holder
from snapshotd.net.sockets import borrow

_TCP_REPAIR, _ON, _OFF_SILENTLY = 19, 1, -1
_UNUSED_PORT = 1
_libc = ctypes.CDLL(None, use_errno=True)


def reset(holder: Holder) -> None:
    """Makes a TCP socket, restored closed and unconnected, report a reset. Its process must be stopped.

    Raises ProcessLookupError if the process or its descriptor is gone, OSError if it is not such a socket.
    """
    with borrow(holder) as sock:
        reuse = sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _ON)
        try:
            sock.connect(("::1" if sock.family == socket.AF_INET6 else "127.0.0.1", _UNUSED_PORT))
        finally:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF_SILENTLY)
        # int connect(int fd, const struct sockaddr *address, socklen_t size): AF_UNSPEC disconnects it
        if _libc.connect(sock.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the socket cannot be disconnected: {os.strerror(number)}")
        with contextlib.suppress(OSError):  # ENOTCONN, but it takes effect
            sock.shutdown(socket.SHUT_RDWR)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)  # leaving repair mode has reset it
