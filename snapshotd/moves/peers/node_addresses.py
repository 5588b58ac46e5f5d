"""Proves that an address belongs to a node of the cluster: by the certificate that its daemon shows, not by what a node says.

An address is a node's if its daemon, with the certificate of that node, answers at that very address, or if that certificate
names it (`migrator cluster add NODE IP --address IP`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from snapshotd.api.addresses import split_address
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Denied
from snapshotd.transport.node_certificate import shown_by

log = logging.getLogger(__name__)

#: How long a proof is good. It is found before the pause of a move, and used in it.
VALID_S = 900.0


class NodeAddresses:
    """The proofs that this daemon has found. For any thread; blocking."""

    def __init__(self, credentials: Credentials, clock: Callable[[], float] = monotonic) -> None:
        self._credentials, self._clock = credentials, clock
        self._proved: dict[tuple[str, str], float] = {}

    def belongs(self, ip: str, node: str, endpoint: str) -> bool:
        """Whether `ip` is an address of `node`. `endpoint` says only where to ask for its certificate."""
        now_s = self._clock()
        if self._proved.get((node, ip), 0.0) > now_s:
            return True
        if not self._prove(ip, node, endpoint):
            return False
        self._proved = {known: until for known, until in self._proved.items() if until > now_s}
        self._proved[node, ip] = now_s + VALID_S
        return True

    def _prove(self, ip: str, node: str, endpoint: str) -> bool:
        try:
            host, port = split_address(endpoint)
        except ValueError as error:
            log.info("%s does not prove that %s is its address: %s", node, ip, error)
            return False
        for place in dict.fromkeys((ip, host)):
            try:
                found = shown_by(node, place, port, self._credentials)
            except (OSError, Denied, BadConfig) as error:
                log.info("%s at %s does not prove that %s is its address: %s", node, place, ip, error)
                continue
            if place == ip or ip in found.addresses:
                return True
        return False
