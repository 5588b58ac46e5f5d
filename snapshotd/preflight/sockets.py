"""The protocol of every socket in the tree, and the names and peers of unix sockets.

The protocol comes from the socket itself (an extended attribute of /proc/PID/fd/N), because the kernel's tables omit
sockets that are not bound. Names and peers of unix sockets come from sock_diag. It is queried from a new thread, which
enters the process's network namespace and then ends. /proc/net/unix is not read: it does not escape newlines, so any user
could add rows to it by the name of a socket.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snapshotd.preflight.objects import Kind, Object
from snapshotd.proc import namespaces

_INET = ("TCP", "UDP", "RAW", "PING", "MPTCP", "SCTP", "DCCP", "SMC")
_CLONE_NEWNET = 0x40000000
_SHOW_NAME, _SHOW_FILE, _SHOW_PEER, _SHOW_WAITING = 0x1, 0x2, 0x4, 0x8


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


@dataclass(frozen=True, slots=True)
class UnixSockets:
    """The unix sockets of a network namespace, by inode."""

    peers: Mapping[int, int]  # inode of the peer; of the listener if the connection has not been accepted yet
    names: Mapping[int, str]  # of bound sockets; an abstract name begins with @


def unix_sockets_of(pid: int) -> UnixSockets:
    """The unix sockets of this process's network namespace. Raises OSError if the query fails."""
    answer: list[UnixSockets] = []
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


def _ask_unix_diag() -> UnixSockets:
    from pyroute2 import DiagSocket  # takes half a second and 13 MiB, only needed for ranks with unix sockets

    peers: dict[int, int] = {}
    waiting: dict[int, int] = {}
    names: dict[int, str] = {}
    with DiagSocket() as diag:
        diag.bind()
        shown = _SHOW_NAME | _SHOW_FILE | _SHOW_PEER | _SHOW_WAITING
        for row in diag.get_sock_stats(family=socket.AF_UNIX, show=shown):
            inode = int(row["udiag_ino"])
            peers[inode] = int(row.get("UNIX_DIAG_PEER") or 0)
            packed = bytes.fromhex((row.get("UNIX_DIAG_ICONS") or "").replace(":", ""))
            waiting |= {client: inode for (client,) in struct.iter_unpack("=I", packed)}
            if (name := row.get("UNIX_DIAG_NAME")) is not None:
                # The library drops the leading zero byte of an abstract name. Only a name in a file system has a file.
                text = os.fsdecode(name).replace("\0", "@")
                names[inode] = text if row.get("UNIX_DIAG_VFS") is not None else f"@{text}"
    return UnixSockets({inode: peer for inode, peer in (peers | waiting).items() if peer}, names)
