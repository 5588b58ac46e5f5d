"""The protocol of every socket in the tree, and the peers of unix sockets.

The protocol comes from the socket itself (an extended attribute of /proc/PID/fd/N), because the kernel's tables omit
sockets that are not bound. Only sock_diag knows the peers of unix sockets. It is queried from a new thread, which enters
the process's network namespace and then ends.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Sequence

from snapshotd.preflight.objects import Kind, Object
from snapshotd.proc import namespaces

_INET = ("TCP", "UDP", "RAW", "PING", "MPTCP", "SCTP", "DCCP", "SMC")
_CLONE_NEWNET = 0x40000000
_SHOW_PEER, _SHOW_WAITING = 0x4, 0x8


def inode_of(thing: Object) -> int:
    return int(thing.link.removeprefix("socket:[").rstrip("]"))


def protocol_of(thing: Object) -> str:
    """The kernel's name for the protocol: TCP, UDPv6, UNIX-STREAM, NETLINK, AF_VSOCK…"""
    return os.getxattr(thing.handle, "system.sockprotoname").rstrip(b"\0").decode(errors="replace")


def by_family(objects: Sequence[Object]) -> dict[str, list[tuple[Object, str]]]:
    """The sockets among the objects as inet, unix, netlink and other, each with its protocol."""
    families: dict[str, list[tuple[Object, str]]] = {"inet": [], "unix": [], "netlink": [], "other": []}
    for thing in objects:
        if thing.kind is not Kind.SOCKET:
            continue
        try:
            protocol = protocol_of(thing)
        except OSError:  # closed in the meantime; the descriptor may refer to another file by now
            continue
        if protocol.startswith("UNIX"):
            family = "unix"
        elif protocol.startswith(_INET):
            family = "inet"
        else:
            family = "netlink" if protocol == "NETLINK" else "other"
        families[family].append((thing, protocol))
    return families


def unix_peers(pid: int) -> dict[int, int]:
    """inode -> inode of the peer, in this process's network namespace. Raises OSError if the query fails."""
    answer: list[dict[int, int]] = []
    failure: list[Exception] = []

    def ask() -> None:
        try:
            _enter_network(pid)
            answer.append(_ask_unix_diag())
        except Exception as error:  # noqa: BLE001  (handed to the caller's thread)
            failure.append(error)

    # setns changes one thread only. This thread then ends, so no other work can run in the wrong namespace.
    thread = threading.Thread(target=ask, name="unix-diag")
    thread.start()
    thread.join()
    if failure:
        raise OSError(f"sock_diag: {failure[0]}") from failure[0]
    return answer[0]


def _enter_network(pid: int) -> None:
    if namespaces.read(pid, "net") == namespaces.read("thread-self", "net"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(handle)


def _ask_unix_diag() -> dict[int, int]:
    """inode -> inode of the peer, for every connected unix socket in this network namespace.

    The peer of a connection that has not been accepted yet is the listener, which lists pending connections.
    """
    from pyroute2 import DiagSocket  # takes half a second and 13 MiB, only needed for ranks with unix sockets

    peers: dict[int, int] = {}
    waiting: dict[int, int] = {}
    with DiagSocket() as diag:
        diag.bind()
        for row in diag.get_sock_stats(family=socket.AF_UNIX, show=_SHOW_PEER | _SHOW_WAITING):
            inode = int(row["udiag_ino"])
            peers[inode] = int(row.get("UNIX_DIAG_PEER") or 0)
            packed = bytes.fromhex((row.get("UNIX_DIAG_ICONS") or "").replace(":", ""))
            waiting |= {client: inode for (client,) in struct.iter_unpack("=I", packed)}
    return {inode: peer for inode, peer in (peers | waiting).items() if peer}
