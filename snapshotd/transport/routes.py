"""The routes from one node to another: one for each pair of network interfaces (`data_addresses` in snapshotd.toml).

Connections of a move are spread over the routes: the first goes by the first route, the second by the second. A connection
whose own route does not work goes by the next one, so a cable that is out makes a move slower and does not fail it.

Invariant: routes decide where packets go, never who is trusted. The peer must still prove in the handshake that it is the
target (handshake.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snapshotd.api.addresses import split_address
from snapshotd.api.errors import Internal
from snapshotd.transport import sockets

#: A node has at most so many addresses for data.
MAX_ROUTES = 16
#: Limit for connecting as long as another route is left: the rank is frozen meanwhile.
_NEXT_S = 2.0


class Route(NamedTuple):
    host: str
    port: int
    own: str = ""  # the address of this node to connect from; empty: the kernel chooses

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" from {self.own}" if self.own else "")


def routes_to(endpoint: str, port: int, endpoints: Sequence[str], own: Sequence[str]) -> list[Route]:
    """`endpoints`: what the target announces, one for each of its addresses for data. Without any, `port` at the host of its
    `endpoint`. `own`: those of this node. Internal if the announcement makes no sense.

    Where both nodes have equally many, the first is connected with the first, and so on: they list them in the same order.
    """
    if not endpoints:
        return [Route(split_address(endpoint)[0], port)]
    if len(endpoints) > MAX_ROUTES:
        raise Internal(f"it announces {len(endpoints)} addresses for data, at most {MAX_ROUTES} are allowed")
    try:
        found = [split_address(one) for one in endpoints]
        versions = [ipaddress.ip_address(host).version for host, _ in found]
    except ValueError as error:
        raise Internal(f"it announces an address for data that is none: {error}") from error
    pairs = len(own) == len(endpoints)
    return [
        Route(host, number, own[index] if pairs and ipaddress.ip_address(own[index]).version == version else "")
        for index, ((host, number), version) in enumerate(zip(found, versions, strict=True))
    ]


def in_turn(routes: Sequence[Route], first: int) -> Iterator[tuple[Route, float]]:
    """The routes to try for connection number `first`, each with its limit in seconds."""
    for index in range(len(routes)):
        yield (
            routes[(first + index) % len(routes)],
            min(sockets.CONNECT_S, _NEXT_S) if index < len(routes) - 1 else sockets.CONNECT_S,
        )
