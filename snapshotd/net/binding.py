"""Binds a socket in repair mode to its local address, if possible so that it can get another one later.

A port that was named in bind is locked to a socket for ever (SOCK_BINDPORT_LOCK): the next re-point could not change its
local address, which the undo of a loopback connection has to. Hence an ephemeral port is requested by a bind to "any port"
with a port range of one, which does not lock it. Where that fails, the port is named: it is a listener's, for example, as
that of all accepted sockets.

The address is left to routing where that selects the wanted one: it then follows the route at each connect, even with a
locked port. A bind to an IPv6 address would make the socket IPv6-only.

A socket whose application named both cannot change them. Where routing decides, the following connect shows the result.
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


def check(sock: socket.socket, endpoints: Pair) -> None:
    """Raises Refused, with nothing changed, if a socket of this family cannot have these endpoints."""
    local, remote = endpoints
    versions = {local.version, remote.version}
    v6only = sock.family == socket.AF_INET6 and sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    if len(versions) != 1 or (sock.family == socket.AF_INET and 6 in versions) or (v6only and 4 in versions):
        raise Refused(f"a socket of its family cannot be re-pointed to {local} – {remote}", where=Where.UNKNOWN)


def bind(sock: socket.socket, local: Address, remote: Address) -> None:
    """To be called right after the disconnect. Raises OSError."""
    ip, port = repair.name_of(sock, local)
    if _source_towards(sock, remote) == local.ip:
        ip = "0.0.0.0" if sock.family == socket.AF_INET else "::"
    try:
        if not _as_only_one(sock, ip, port):
            sock.bind((ip, port))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        kept = Address(sock.getsockname()[0], port)  # EINVAL: it kept its locked port
        if not kept.wildcard and kept != local:
            raise OSError(
                errno.EADDRNOTAVAIL, f"its application has bound it to {kept}, which cannot be changed"
            ) from error


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
    """The local address that routing would choose for a connect of this socket; "" if there is no route."""
    with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        for option, size in ((socket.SO_BINDTODEVICE, 16), (socket.SO_MARK, 4)):
            if (value := sock.getsockopt(SOL, option, size)).strip(b"\0"):
                probe.setsockopt(SOL, option, value)
        try:
            probe.connect(repair.name_of(sock, remote))
        except OSError:
            return ""
        endpoints = repair.pair(probe)
        return endpoints[0].ip if endpoints else ""
