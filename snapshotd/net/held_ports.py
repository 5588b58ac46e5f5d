"""Keeps the ports bound at which a rank listened before it left this node, for as long as they are forwarded.

Otherwise another user could listen there later, and connections meant for that user would go to the rank. The sockets belong
to the daemon and end with it; it makes them again when it starts. A port that another process has got meanwhile is not
forwarded.

A held socket listens, because only then no other process can bind the port, whatever options it sets. No connection ever
reaches it: those that are not forwarded are refused by a packet rule (snapshotd/net/forward.py), as if no process listened.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterable

from snapshotd.net import sockets
from snapshotd.net.flows import Address

_held: dict[str, dict[Address, socket.socket]] = {}
_changing = threading.Lock()


def hold(rank_uid: str, addresses: Iterable[Address]) -> set[Address]:
    """Holds those of `addresses` that belong to this node, and releases others of this rank.

    Returns those that are in use: at the moment no socket can be bound to them. Blocking.
    """
    wanted = set(addresses)
    own = sockets.own_addresses() if wanted else frozenset[str]()
    in_use = set()
    with _changing:
        ours = _held.setdefault(rank_uid, {})
        for address in [address for address in ours if address not in wanted]:
            ours.pop(address).close()
        for address in wanted - ours.keys():
            if address.ip not in own and not address.loopback:
                continue
            try:
                ours[address] = _bound(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    in_use.add(address)
                elif error.errno != errno.EADDRNOTAVAIL:  # an address that this node has no longer
                    raise
        if not ours:
            del _held[rank_uid]
    return in_use


def release(rank_uid: str) -> None:
    """The rank comes back to this node, or has ended. Idempotent."""
    with _changing:
        for sock in _held.pop(rank_uid, {}).values():
            sock.close()


def inodes(rank_uid: str) -> set[int]:
    """The sockets that are held for a rank, as lists of this node's sockets name them."""
    with _changing:
        return {sockets.inode_of(sock) for sock in _held.get(rank_uid, {}).values()}


def others_listen(address: Address) -> bool:
    """Whether a process listens where a connection to `address` would reach it. Blocking."""
    return any(
        flow.local == address or (flow.local.wildcard and (flow.local.version == address.version or not flow.v6only))
        for flow in sockets.listeners({address.port})
    )


def _bound(address: Address) -> socket.socket:
    with contextlib.ExitStack() as undo:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # Not refused because of connections of the rank that have just ended (TIME_WAIT).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address.ip, address.port))
        sock.listen(1)
        undo.pop_all()
        return sock
