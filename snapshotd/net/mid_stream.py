"""Makes one end of a TCP connection that never had a beginning: no SYN was sent, as for a connection after its re-point.

A firewall that tracks connections may drop segments of a connection whose beginning it has not seen. Two nodes find that out
by making both ends of such a connection, which never was one of a job, and sending something (snapshotd/diagnosis/paths.py).
The path is then the very one that a re-pointed connection takes, with full segments and the don't-fragment bit.

Each end needs only the addresses and the same first numbers. The end that is made first must not send: the other node would
answer with RST.
"""

from __future__ import annotations

import socket

from snapshotd.net import repair
from snapshotd.net.flows import Address

#: The first sequence number of each direction: from the end that sends first, and back.
FORTH, BACK = 1_000_000_000, 2_000_000_000
_WINDOW_BYTES = 65535
#: What SYN packets would have agreed on. Without it each kernel applies its own scale to the windows that it offers.
_AGREED = repair.Info(repair.ESTABLISHED, repair.HAS_WINDOW_SCALE | repair.HAS_SACK, send_scale=7, receive_scale=7)
_MSS = {4: 65495, 6: 65475}  # the kernel limits it to what the route's MTU allows


def reserve(ip: str) -> socket.socket:
    """A socket with a free port at this address of the node. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        sock.bind((ip, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def connect(sock: socket.socket, remote: Address, *, sends_first: bool) -> None:
    """Makes a reserved socket an established connection with `remote`. No packet is sent. Raises OSError."""
    sending, receiving = (FORTH, BACK) if sends_first else (BACK, FORTH)
    repair.enter(sock)
    repair.set_sequence(sock, repair.RECV_QUEUE, receiving)
    repair.set_sequence(sock, repair.SEND_QUEUE, sending)
    sock.connect((remote.ip, remote.port))
    repair.set_negotiated(sock, _AGREED, _MSS[remote.version])
    if remote.version == 4:
        repair.use_full_mss(sock)
    window = repair.Window(receiving, _WINDOW_BYTES, _WINDOW_BYTES, _WINDOW_BYTES, receiving)
    (window if remote.version == 4 else window.eager()).put(sock)
    repair.leave(sock, 0)


def drop(sock: socket.socket) -> None:
    """Closes it without a packet."""
    try:
        repair.enter(sock)
    finally:
        sock.close()
