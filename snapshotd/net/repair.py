"""The kernel's repair mode: the internal state of a TCP socket can be read and set, and the socket sends nothing.

Every function acts on one borrowed socket, all of whose holders are stopped: in repair mode an application's own calls
fail or use the wrong queue. Packets still arrive in repair mode, so a filter has to drop them.

Repair mode is left silently (TCP_REPAIR_OFF_NO_WP): the probe that the kernel sends otherwise would be lost in the filter, or
reach a host that does not have the peer's socket yet and be answered with a reset.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import socket
import struct
from dataclasses import dataclass

from snapshotd.net.flows import Address, Pair

TCP, IP, SOL = socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.SOL_SOCKET

# include/uapi/linux/tcp.h
TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ, TCP_REPAIR_OPTIONS = 19, 20, 21, 22
TCP_TIMESTAMP, TCP_REPAIR_WINDOW, TCP_RTO_MIN_US, TCP_DELACK_MAX_US = 24, 29, 45, 46
REPAIR_ON, REPAIR_OFF_SILENTLY = 1, -1
RECV_QUEUE, SEND_QUEUE = 1, 2
ESTABLISHED, CLOSE, LISTEN = 1, 7, 10
# The options of a connection that its SYN packets agreed on: kinds of RFC 9293, and TCP_INFO's bits for them.
OPT_MSS, OPT_WINDOW_SCALE, OPT_SACK, OPT_TIMESTAMP = 2, 3, 4, 8
HAS_TIMESTAMP, HAS_SACK, HAS_WINDOW_SCALE = 1, 2, 4
# include/uapi/asm-generic/{sockios,socket}.h, linux/in.h
SIOCINQ, SIOCOUTQ, SIOCOUTQNSD = 0x541B, 0x5411, 0x894B
SO_PEEK_OFF, SO_BUF_LOCK = 42, 72
IP_OPTIONS, IP_LOCAL_PORT_RANGE = 4, 51

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Info:
    """The part of `struct tcp_info` that is needed to rebuild a connection."""

    state: int
    options: int
    send_scale: int
    receive_scale: int


def info(sock: socket.socket) -> Info:
    # struct tcp_info { u8 state, ca_state, retransmits, probes, backoff, options, snd_wscale:4, rcv_wscale:4; … }
    raw = sock.getsockopt(TCP, socket.TCP_INFO, 8)
    return Info(raw[0], raw[5], raw[6] & 0xF, raw[6] >> 4)


def in_repair(sock: socket.socket) -> bool:
    return sock.getsockopt(TCP, TCP_REPAIR) == REPAIR_ON


def enter(sock: socket.socket) -> None:
    """Also lets bind share any port (SK_FORCE_REUSE) until repair mode ends."""
    sock.setsockopt(TCP, TCP_REPAIR, REPAIR_ON)


def leave(sock: socket.socket, reuse_address: int) -> None:
    """Silently. Restores SO_REUSEADDR, which the kernel resets with repair mode."""
    sock.setsockopt(TCP, TCP_REPAIR, REPAIR_OFF_SILENTLY)
    if reuse_address:
        sock.setsockopt(SOL, socket.SO_REUSEADDR, 1)


def pair(sock: socket.socket) -> Pair | None:
    """(local, remote), None if the socket is not connected. Raises BadAddress for an address with a scope."""
    try:
        remote = sock.getpeername()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return None
        raise
    return _address(sock.getsockname()), _address(remote)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    scope = f"%{name[3]}" if len(name) == 4 and name[3] else ""
    return Address(name[0] + scope, name[1])


def name_of(sock: socket.socket, address: Address) -> tuple[str, int]:
    """The address in this socket's family: an IPv4 address is v4-mapped for an IPv6 socket."""
    mapped = sock.family == socket.AF_INET6 and address.version == 4
    return ("::ffff:" + address.ip if mapped else address.ip), address.port


# ---------------------------------------------------------------- the queues


def waiting(sock: socket.socket, request: int) -> int:
    """Number of queued bytes: SIOCINQ unread, SIOCOUTQ not acknowledged, SIOCOUTQNSD of those never sent."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, request, count)
    return count[0]


def sequence(sock: socket.socket, queue: int) -> int:
    """The sequence number after the last byte of the queue. Selects the queue; repair mode only."""
    sock.setsockopt(TCP, TCP_REPAIR_QUEUE, queue)
    return int(struct.unpack("I", sock.getsockopt(TCP, TCP_QUEUE_SEQ, 4))[0])


def written_bytes(sock: socket.socket) -> int:
    """Number of bytes put into the send queue since the last connect; also out of repair mode."""
    # struct tcp_info { … u64 tcpi_bytes_acked at 120; … }
    return int(struct.unpack_from("Q", sock.getsockopt(TCP, socket.TCP_INFO, 128), 120)[0]) + waiting(sock, SIOCOUTQ)


def set_sequence(sock: socket.socket, queue: int, number: int) -> None:
    """Before connect only."""
    sock.setsockopt(TCP, TCP_REPAIR_QUEUE, queue)
    sock.setsockopt(TCP, TCP_QUEUE_SEQ, struct.pack("I", number & 0xFFFFFFFF))


def peek(sock: socket.socket, queue: int, size: int) -> bytes:
    sock.setsockopt(TCP, TCP_REPAIR_QUEUE, queue)
    return sock.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT) if size else b""


def fill(sock: socket.socket, queue: int, data: bytes) -> None:
    """In repair mode bytes put into the send queue count as sent, and no packet is sent."""
    if data:
        sock.setsockopt(TCP, TCP_REPAIR_QUEUE, queue)
        push(sock, data)


def push(sock: socket.socket, data: bytes) -> None:
    """Writes all of it without waiting for space. Raises OSError if there is not enough."""
    rest = memoryview(data)
    while rest:
        rest = rest[sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]


# ---------------------------------------------------------------- the connection


def disconnect(sock: socket.socket) -> None:
    """Removes the 4-tuple, the queues and all negotiated options from the socket; in repair mode no packet is sent."""
    # int connect(int fd, const struct sockaddr *addr, socklen_t len), with AF_UNSPEC
    if _libc.connect(sock.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16) != 0:
        raise OSError(ctypes.get_errno(), "the socket cannot be disconnected")
    sock.getsockopt(
        SOL, socket.SO_ERROR
    )  # clears the ECONNABORTED that the kernel leaves, before the application sees it


def forget_mapped(sock: socket.socket) -> None:
    """Lets an IPv6 socket that used IPv4 use IPv6 again: the kernel switches back only when a v4-mapped connect fails."""
    with contextlib.suppress(OSError):
        sock.connect(("::ffff:255.255.255.255", 9))


def set_negotiated(sock: socket.socket, known: Info, mss: int) -> None:
    """Sets what the SYN packets negotiated. Right after connect: the kernel refuses once something has been sent."""
    options = [(OPT_MSS, mss)]
    if known.options & HAS_WINDOW_SCALE:
        options.append((OPT_WINDOW_SCALE, known.send_scale | known.receive_scale << 16))
    if known.options & HAS_SACK:
        options.append((OPT_SACK, 0))
    if known.options & HAS_TIMESTAMP:
        options.append((OPT_TIMESTAMP, 0))
    sock.setsockopt(TCP, TCP_REPAIR_OPTIONS, b"".join(struct.pack("II", *option) for option in options))


def use_full_mss(sock: socket.socket) -> None:
    """Makes the kernel compute the segment size again: a connect in repair mode leaves it at 536 bytes.

    Setting the IP options to their present value is the only call that does so. It has no effect on an IPv6 connection (see
    `Window.eager`). Harmless on a live socket, and useful for those that CRIU restored.
    """
    sock.setsockopt(IP, IP_OPTIONS, sock.getsockopt(IP, IP_OPTIONS, 44))


@dataclass(frozen=True)
class Window:
    """`struct tcp_repair_window`."""

    snd_wl1: int
    snd_wnd: int
    max_window: int
    rcv_wnd: int
    rcv_wup: int

    @classmethod
    def of(cls, sock: socket.socket) -> Window:
        return cls(*struct.unpack("5I", sock.getsockopt(TCP, TCP_REPAIR_WINDOW, 20)))

    def eager(self) -> Window:
        """One byte less than the peer offered, so that its next packet, which offers as much as before, is a change.

        At such a change the kernel computes the segment size again: the equivalent of `use_full_mss` for IPv6.
        """
        offered = max(self.snd_wnd - 1, 0)
        return Window(self.snd_wl1, offered, offered, self.rcv_wnd, self.rcv_wup)

    def put(self, sock: socket.socket) -> None:
        """After the queues are filled: the kernel checks it against them."""
        packed = struct.pack("5I", self.snd_wl1, self.snd_wnd, self.max_window, self.rcv_wnd, self.rcv_wup)
        sock.setsockopt(TCP, TCP_REPAIR_WINDOW, packed)
