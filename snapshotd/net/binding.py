"""Gives a socket in repair mode its local address again, if possible so that it can get another one later.

A port that was named in bind stays with a socket for ever (SOCK_BINDPORT_LOCK): the next re-point could not change its local
address, and undo of a loopback connection has to. Hence a port of the ephemeral range is asked for as the only one of a range
of one, by a bind to "any port": no lock. Where that does not work it is named: it is the port of a listener, say, as of all
accepted sockets.

And the address is left to routing where that chooses the wished one by itself: then it follows the route at each connect,
even with a port that is locked; and a bind to an IPv6 address would have made the socket IPv6-only.

A socket whose application named both cannot change them; where routing decides, the connect that follows shows it.
"""

from __future__ import annotations

import errno
import socket
import struct
from pathlib import Path

from snapshotd.api.errors import Refused, Where
from snapshotd.net import repair
from snapshotd.net.flows import Address, Pair
from snapshotd.net.repair import IP, IP_LOCAL_PORT_RANGE, SOL

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check(sock: socket.socket, ends: Pair) -> None:
    """Raises Refused, with nothing touched, when the socket cannot have these ends because of what kind it is."""
    local, remote = ends
    versions = {local.version, remote.version}
    v6only = sock.family == socket.AF_INET6 and sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    if len(versions) != 1 or (sock.family == socket.AF_INET and 6 in versions) or (v6only and 4 in versions):
        raise Refused(f"a socket of its family cannot be re-pointed at {local} – {remote}", where=Where.UNKNOWN)


def bind(sock: socket.socket, local: Address, remote: Address) -> None:
    """Right after the disconnect. Raises OSError."""
    ip, port = repair.name_of(sock, local)
    if _source_towards(sock, remote) == local.ip:
        ip = "0.0.0.0" if sock.family == socket.AF_INET else "::"
    try:
        if not _as_only_one(sock, ip, port):
            sock.bind((ip, port))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        kept = Address(sock.getsockname()[0], port)  # EINVAL: it kept the port, to which it is locked
        if not kept.wildcard and kept != local:
            raise OSError(errno.EADDRNOTAVAIL, f"its application bound it to {kept}, for ever") from error


def _as_only_one(sock: socket.socket, ip: str, port: int) -> bool:
    low, high = map(int, _RANGE.read_text().split())
    if not low <= port <= high:
        return False
    try:
        before = sock.getsockopt(IP, IP_LOCAL_PORT_RANGE)
        sock.setsockopt(IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    except OSError:  # a kernel before 6.3
        return False
    try:
        sock.bind((ip, 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    finally:
        sock.setsockopt(IP, IP_LOCAL_PORT_RANGE, before)
    return True


def _source_towards(sock: socket.socket, remote: Address) -> str:
    """The local address that a connect of this socket would choose by itself; "" when there is no way."""
    with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        for option, size in ((socket.SO_BINDTODEVICE, 16), (socket.SO_MARK, 4)):
            if (value := sock.getsockopt(SOL, option, size)).strip(b"\0"):
                probe.setsockopt(SOL, option, value)
        try:
            probe.connect(repair.name_of(sock, remote))
        except OSError:
            return ""
        ends = repair.pair(probe)
        return ends[0].ip if ends else ""
