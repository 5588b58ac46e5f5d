"""Time-outs of connections during a move: none may expire, and retransmission must be prompt afterwards.

A filtered connection retransmits in vain. TCP_USER_TIMEOUT or keepalive could end it: both are off for the pause. A rebuilt
connection (re-pointed here, or restored by CRIU) has no round-trip time: it retransmits only after 3 s, unless the kernel
knows the round trip between the two addresses from a connection that was closed in the last hour (tcp_metrics).
`learn_round_trip` makes and closes one, before anything is frozen.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapshotd.net.flows import Address, Holder
from snapshotd.net.repair import SOL, TCP
from snapshotd.net.sockets import borrow_from

TCP_USER_TIMEOUT = 18
_LONGEST_S = 120.0  # TCP_RTO_MAX


@dataclass(frozen=True)
class Timers:
    """What `hold_timers` switched off; for the journal."""

    user_timeout_ms: int
    keepalive: bool


def hold_timers(holders: Sequence[Holder], inode: int) -> Timers | None:
    """The connection survives any silence from now on. Its processes may run. None if the socket is gone."""
    sock = borrow_from(holders, inode)
    if sock is None:
        return None
    with sock:
        timers = Timers(sock.getsockopt(TCP, TCP_USER_TIMEOUT), bool(sock.getsockopt(SOL, socket.SO_KEEPALIVE)))
        sock.setsockopt(TCP, TCP_USER_TIMEOUT, 0)
        sock.setsockopt(SOL, socket.SO_KEEPALIVE, 0)
        return timers


def restore_timers(holders: Sequence[Holder], inode: int, timers: Timers) -> None:
    """Idempotent. Keeps what the application has set in the meantime."""
    sock = borrow_from(holders, inode)
    if sock is None:
        return
    with sock:
        if timers.user_timeout_ms and not sock.getsockopt(TCP, TCP_USER_TIMEOUT):
            sock.setsockopt(TCP, TCP_USER_TIMEOUT, timers.user_timeout_ms)
        if timers.keepalive and not sock.getsockopt(SOL, socket.SO_KEEPALIVE):
            sock.setsockopt(SOL, socket.SO_KEEPALIVE, 1)


def learn_round_trip(local_ip: str, listener: Address, timeout_s: float = 1.0) -> bool:
    """Makes this node's kernel learn the round trip from `local_ip` to the host of `listener`, for example a daemon's
    endpoint.

    Makes one connection and closes it normally without a byte. Each of the two nodes does it. Best effort: False if it fails.
    """
    try:
        with socket.create_connection((listener.ip, listener.port), timeout_s, (local_ip, 0)) as sock:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # until the peer has closed too: the kernel learns at the end
                pass
    except OSError:
        return False
    return True


def read_timers(holders: Sequence[Holder], inode: int) -> Timers | None:
    """What `hold_timers` would switch off; recorded in the journal before. None if there is nothing to switch off."""
    sock = borrow_from(holders, inode)
    if sock is None:
        return None
    with sock:
        timers = Timers(sock.getsockopt(TCP, TCP_USER_TIMEOUT), bool(sock.getsockopt(SOL, socket.SO_KEEPALIVE)))
    return timers if timers != Timers(0, False) else None


def await_answers(sockets: Iterable[tuple[Sequence[Holder], int, Timers]], timeout_s: float) -> None:
    """Waits until what these connections sent while filtered is acknowledged: the kernel counts TCP_USER_TIMEOUT from
    the first lost packet, so it is restored only afterwards. A connection that is gone, or takes longer, is skipped.

    One with a TCP_USER_TIMEOUT gets `timeout_s` from its next attempt on, which is the later the longer it was filtered."""
    began = time.monotonic()
    for holders, inode, value in sockets:
        sock = borrow_from(holders, inode)
        if sock is None:
            continue
        with sock:
            deadline = began + timeout_s + (attempts_again_in_s(sock) if value.user_timeout_ms else 0)
            while attempts_again_in_s(sock) and time.monotonic() < deadline:
                time.sleep(0.01)


def attempts_again_in_s(sock: socket.socket) -> float:
    """The longest time until the kernel sends again what was not acknowledged; 0 if everything was.

    A packet that another node dropped is retransmitted. One that this node's filter dropped was never sent: the connection is
    probed instead."""
    info = sock.getsockopt(TCP, socket.TCP_INFO, 12)
    retransmits, probes, backoff, rto_s = info[2], info[3], info[4], int.from_bytes(info[8:], sys.byteorder) / 1e6
    if retransmits:
        return rto_s  # has been doubled with each retransmission
    return min(_LONGEST_S, rto_s * 2**backoff) if probes else 0.0


def meet(local_ip: str, endpoint: str) -> bool:
    """`learn_round_trip` with a daemon's endpoint host:port, where host may be a name."""
    name, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    version = Address(local_ip, 0).version
    addresses = [Address(str(row[4][0]), int(port)) for row in found]
    return any(learn_round_trip(local_ip, address) for address in addresses if address.version == version)
