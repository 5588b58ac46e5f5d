"""How many bytes the TCP connections of a rank have carried, for jobs that communicate without NCCL.

Nothing here changes a socket. A descriptor is borrowed for as long as the kernel takes to answer one question about it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable

from snapshotd.net.flows import Holder
from snapshotd.net.sockets import borrow
from snapshotd.proc.fd import read_links
from snapshotd.proc.tree import Process

#: More connections than a rank has to its peers; a user must not make the daemon count without end.
MOST_SOCKETS = 256
MOST_DESCRIPTORS = 4096
#: struct tcp_info { … u64 tcpi_bytes_acked at 120, u64 tcpi_bytes_received at 128; … }
_BYTES = struct.Struct("<120xQQ")


def carried_bytes(pids: Iterable[int]) -> int | None:
    """Of the connections that these processes have now. None: they have none."""
    seen: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            process = Process.of(pid)
            for looked_at, (descriptor, link, _) in enumerate(read_links(pid)):
                if looked_at >= MOST_DESCRIPTORS or len(seen) >= MOST_SOCKETS:
                    break
                inode = int(link[8:-1]) if link.startswith("socket:[") else 0
                if inode and inode not in seen:
                    found = _of(Holder(pid, process.start_ticks, descriptor), inode)
                    if found is not None:
                        seen[inode] = found
    return sum(seen.values()) if seen else None


def _of(holder: Holder, inode: int) -> int | None:
    """None: not a connection over TCP."""
    with contextlib.suppress(OSError), borrow(holder, inode) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
            return sum(_BYTES.unpack(raw)) if len(raw) == _BYTES.size else None
    return None
