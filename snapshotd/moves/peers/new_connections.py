"""Holds new connections to a rank's listeners during a move: drops their first packets until it is known where the rank is.

The kernel completes handshakes for a frozen listener, and such a connection would be lost with the copy. So from just before
the freeze a SYN to any address of the rank's listeners is dropped; TCP sends it again after a second. When the move is
undone, the source admits new connections again. When it succeeds, the source does so once every node that it can reach
forwards them to the target: the node that the rank left is notified last (snapshotd/moves/peers/forwarding.py).
Existing connections are not affected.

Invariant: while new connections are held, none waits at a listener of the rank: the freeze waits for that, or fails.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence

from snapshotd.api.errors import Refused, Where
from snapshotd.moves.journal import MoveLog
from snapshotd.net import filter as packets
from snapshotd.net import sockets
from snapshotd.net.flows import Address, Flow

DRAIN_S = 2.0
_LOOK_AGAIN_S = 0.01
#: Debian maps a host's own name to the second one.
LOOPBACKS = ("127.0.0.1", "127.0.1.1", "::1")


def hold(move: str, flows: Iterable[Flow]) -> bool:
    """Holds new connections to the rank's listeners from now on; False where it has none. Blocking, idempotent."""
    addresses = called(flow for flow in flows if flow.listens)
    if addresses:
        packets.hold_listeners(table(move), addresses)
    return bool(addresses)


def drain(pids: Sequence[int]) -> None:
    """Waits until the running rank has accepted all waiting connections. Raises Refused when it does not. Blocking."""
    deadline = time.monotonic() + DRAIN_S
    while True:
        listeners = [flow for flow in sockets.tree_flows(pids) if flow.listens]
        late = [flow for flow in listeners if flow.waiting] or sockets.arriving({flow.local.port for flow in listeners})
        if not late:
            return
        if time.monotonic() > deadline:
            raise Refused(
                f"connections: the rank does not accept those that wait at {late[0].local}",
                remedy="try again in a moment",
                where=Where.SOURCE_RUNNING,
            )
        time.sleep(_LOOK_AGAIN_S)


def admit(move_log: MoveLog) -> None:
    """Admits new connections again. Idempotent; costs nothing where none were held."""
    if move_log.known.new_connections_held:
        packets.drop_table(table(move_log.move))


def called(listeners: Iterable[Flow]) -> set[Address]:
    """The addresses of this node at which these listeners can be reached."""
    found = list(listeners)
    own = sorted({*sockets.own_addresses(), *LOOPBACKS}) if found else []
    return {
        address
        for flow in found
        for address in reached_at(flow.local, own, v6only=flow.v6only)
        if not address.link_local
    }


def reached_at(local: Address, own: Iterable[str], *, v6only: bool) -> list[Address]:
    """A socket bound to all addresses is reached at each of its family's, and one of IPv6 usually at IPv4's too. If it is not
    (`v6only`), another user may listen at that port over IPv4."""
    if not local.wildcard:
        return [local]
    found = [local.at(ip) for ip in own]
    return [item for item in found if item.version == local.version or (local.version == 6 and not v6only)]


def table(move: str) -> str:
    """The name of a separate filter: it lasts longer than that of the rank's connections."""
    return f"m-{hashlib.sha256(f'newcomers of {move}'.encode()).hexdigest()[:12]}"
