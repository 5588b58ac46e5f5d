"""Removes connections that no process has any more and that the kernel is still closing.

A rank that was killed leaves some, and those of its peers are silent by then, so the kernel would keep them for a minute and
more. Until then no copy of the rank can be restored on that node, because a connection exists only once.

Invariant: a connection that a process has is never touched.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Collection
from typing import Any

from snapshotd.net.flows import Address, Pair

log = logging.getLogger(__name__)

_NETLINK_SOCK_DIAG, _SOCK_DESTROY, _ERROR = 4, 21, 2
_REQUEST, _ACK = 0x1, 0x4
_EVERY_STATE = 0xFFF
#: struct nlmsghdr; struct inet_diag_req_v2: family, protocol, extensions, padding, states, then struct inet_diag_sockid:
#: ports and addresses in network order, device, cookie.
_HEADER, _QUESTION, _SOCKET = "=IHHII", "=BBBBI", "=IQ"


def remove(pairs: Collection[Pair]) -> int:
    """Ends those of these (local, remote) connections of this node that no process has; returns their number. Blocking."""
    wanted = set(pairs)
    if not wanted:
        return 0
    from pyroute2 import DiagSocket

    removed = 0
    with DiagSocket() as diag:
        diag.bind()
        for family in (socket.AF_INET, socket.AF_INET6):
            for row in diag.get_sock_stats(family=family, protocol=socket.IPPROTO_TCP, states=_EVERY_STATE):
                if row.get("idiag_family") == family and row["idiag_inode"] == 0 and _pair(row) in wanted:
                    removed += _destroy(row)
    return removed


def _pair(row: Any) -> Pair:
    return Address(row["idiag_src"], row["idiag_sport"]), Address(row["idiag_dst"], row["idiag_dport"])


def _destroy(row: Any) -> bool:
    family = socket.AddressFamily(row["idiag_family"])
    ends = struct.pack(">HH", row["idiag_sport"], row["idiag_dport"])
    for ip in (row["idiag_src"], row["idiag_dst"]):
        ends += socket.inet_pton(family, ip).ljust(16, b"\0")
    question = struct.pack(_QUESTION, family, socket.IPPROTO_TCP, 0, 0, 1 << row["idiag_state"])
    asked = question + ends + struct.pack(_SOCKET, row["idiag_if"], row["idiag_cookie"])
    size = struct.calcsize(_HEADER)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.send(struct.pack(_HEADER, size + len(asked), _SOCK_DESTROY, _REQUEST | _ACK, 1, 0) + asked)
        answer = netlink.recv(4096)
    _, kind, _, _, _ = struct.unpack_from(_HEADER, answer)
    number = -struct.unpack_from("=i", answer, size)[0] if kind == _ERROR else 0
    if number:  # it has gone by itself, or this kernel cannot do it (CONFIG_INET_DIAG_DESTROY)
        log.info("connection %s – %s was not removed: %s", *_pair(row), os.strerror(number))
    return number == 0
