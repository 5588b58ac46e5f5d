"""Gives a socket in repair mode its local address again, if possible so that it can get another one later.

A port that was named in bind stays with a socket for ever (SOCK_BINDPORT_LOCK): the next re-point could not change its local
address, and undo of a loopback connection has to. Hence, in this order:

    1. a port of the ephemeral range, as the only one of a range of one, by a bind to "any port": no lock
    2. the port at "any address", where routing chooses the wished address by itself: only the port is locked, and the address
       follows the route at each connect. The way for accepted sockets, whose port is their listener's
    3. the address and the port: both are locked

A socket that already is locked to another address cannot change it; the connect that follows shows it.
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
    try:
        if _as_only_one(sock, local):
            return
        if _source_towards(sock, remote) == local.ip:
            sock.bind(("0.0.0.0" if sock.family == socket.AF_INET else "::", local.port))
        else:
            sock.bind(repair.name_of(sock, local))
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: it kept the port, to which it is locked
            raise


def _as_only_one(sock: socket.socket, local: Address) -> bool:
    low, high = map(int, _RANGE.read_text().split())
    if not low <= local.port <= high:
        return False
    try:
        before = sock.getsockopt(IP, IP_LOCAL_PORT_RANGE)
        sock.setsockopt(IP, IP_LOCAL_PORT_RANGE, struct.pack("I", local.port << 16 | local.port))
    except OSError:  # a kernel before 6.3
        return False
    try:
        sock.bind((repair.name_of(sock, local)[0], 0))
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
