"""Looks for signs that a host is alive although its daemon does not answer: its port, and ICMP echo.

Used before an operator's declaration that a node is dead is passed on. Invariant: the absence of signs proves nothing, and
is never reported as death: a firewall drops what is sent here. Everything here blocks, for at most a few seconds.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass

TIMEOUT_S = 2.0
_ECHO = {socket.AF_INET: (8, 0, socket.IPPROTO_ICMP), socket.AF_INET6: (128, 129, socket.IPPROTO_ICMPV6)}


@dataclass(frozen=True)
class Signs:
    """What was found: whether the host answered in any way, and how, in words."""

    alive: bool
    words: str


def look(endpoint: str) -> Signs:
    """The signs of life of the host of a daemon's endpoint, "host:port"."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        rows = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        return Signs(False, f"the name {host} cannot be resolved: {error}")
    family, _, _, _, address = rows[0]
    found = [_port(family, address), _ping(family, address[0])]
    return Signs(any(one.alive for one in found), "; ".join(one.words for one in found))


def _port(family: int, address: tuple[object, ...]) -> Signs:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return Signs(True, "its kernel refuses connections to the port: the daemon does not run, the host does")
        except OSError as error:
            return Signs(False, f"its port does not answer ({error.strerror or error})")
    return Signs(True, "its port accepts connections")


def _ping(family: int, host: object) -> Signs:
    request, reply, protocol = _ECHO[socket.AddressFamily(family)]
    try:
        probe = _icmp_socket(family, protocol)
    except OSError:
        return Signs(False, "ping needs a privilege that is missing here")
    number = os.getpid() & 0xFFFF
    packet = struct.pack("!BBHHH", request, 0, 0, number, 1) + b"snapshotd"
    if family == socket.AF_INET:
        packet = packet[:2] + struct.pack("!H", _checksum(packet)) + packet[4:]
    with probe:
        try:
            probe.connect((host, 0))
            probe.send(packet)
            deadline = time.monotonic() + TIMEOUT_S
            arriving = select.poll()  # not select(), which fails from descriptor 1024 on: a daemon may have thousands
            arriving.register(probe, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0 and arriving.poll(left * 1000):
                if _is_reply(probe.recv(1024), reply, raw=probe.type == socket.SOCK_RAW, family=family):
                    return Signs(True, "it answers ping")
        except OSError as error:
            return Signs(False, f"ping fails ({error.strerror or error})")
    return Signs(False, "it does not answer ping")


def _icmp_socket(family: int, protocol: int) -> socket.socket:
    """A raw one for root, otherwise the kind that the kernel offers to users in net.ipv4.ping_group_range."""
    try:
        return socket.socket(family, socket.SOCK_RAW, protocol)
    except PermissionError:
        return socket.socket(family, socket.SOCK_DGRAM, protocol)


def _is_reply(packet: bytes, reply: int, *, raw: bool, family: int) -> bool:
    if raw and family == socket.AF_INET:
        packet = packet[(packet[0] & 0xF) * 4 :]
    return packet[:1] == bytes([reply]) and packet[8:] == b"snapshotd"


def _checksum(data: bytes) -> int:
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
