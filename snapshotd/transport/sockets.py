"""TCP sockets as both data channels use them. Imported by the device channel's child processes, so nothing heavy here.

Invariant: a peer that stopped answering is noticed within about ten seconds, as in api/channel.py.
"""

from __future__ import annotations

import contextlib
import socket
from time import monotonic

#: Limit for connecting, and for authenticating afterwards.
CONNECT_S = 10.0
_BUFFER_BYTES = 4 << 20
_DRAIN_BYTES = 64 << 10
_UNANSWERED_MS = 10_000
_CS1 = 8 << 2  # a DSCP is the upper six bits
_BULK = 2  # TC_PRIO_BULK of <linux/pkt_sched.h>
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # <asm-generic/socket.h>; Python has no names for them


def tune(endpoint: socket.socket) -> None:
    """Buffers that hold a whole chunk, no Nagle delay, and a limit for unanswered data. Accepted sockets inherit all of it.

    Plain SO_RCVBUF is capped at net.core.rmem_max, often 200 KiB, and turns off the kernel's own tuning.
    """
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        with contextlib.suppress(PermissionError):  # not root: the kernel grows the buffers as needed
            endpoint.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, _UNANSWERED_MS),
    ):
        endpoint.setsockopt(socket.IPPROTO_TCP, option, value)


def go_last(endpoint: socket.socket) -> None:
    """What is sent here gives way to other traffic, as far as queues and switches look at it: DSCP CS1 ("scavenger"), and the
    lowest band of this node's queue (pfifo_fast, prio)."""
    if endpoint.family == socket.AF_INET6:
        endpoint.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _CS1)
    else:
        endpoint.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _CS1)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK)  # after IP_TOS, which sets it too


def fill(connection: socket.socket, view: memoryview, flags: int = 0) -> None:
    """Fills `view` with the next bytes. ConnectionResetError if the connection ends before.

    A TLS socket takes no flags, and returns one record of at most 16 KiB at a time.
    """
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:], len(view) - done, flags)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        done += count


def hang_up(connection: socket.socket) -> None:
    """Ends a connection that another thread is reading or writing; that thread gets an OSError or end of file.

    Not SSLSocket.shutdown, which removes the encryption from a socket that another thread is using.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def drain(connection: socket.socket, limit_s: float) -> None:
    """Discards what arrives until the peer closes the connection, for at most `limit_s`.

    A socket that is closed with unread bytes sends a reset, which overtakes the last message: the peer would learn that the
    connection broke, and not why. Reads plain bytes, also after a failed TLS handshake.
    """
    ends_s = monotonic() + limit_s
    with contextlib.suppress(OSError):  # includes TimeoutError
        while (left_s := ends_s - monotonic()) > 0:
            connection.settimeout(left_s)
            if not socket.socket.recv(connection, _DRAIN_BYTES):
                break
