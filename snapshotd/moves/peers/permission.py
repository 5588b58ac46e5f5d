"""Decides whether a move may change the connections that it names on this node.

The list of a rank's connections comes from the node that has the rank. It is believed only so far as this node can check it:

- A connection leads from this node to the source of the move, and will lead to its target. Both addresses are proved by the
  certificates of those nodes (node_addresses.py). Its ports stay the same. Its address on this node stays the same too,
  except that a loopback address of the source becomes one that the target can reach.
- Every process that has the socket runs as the rank's user, or as one of `connection_users`. For ranks of root this node must
  allow ranks of root, or name root there.

What remains possible for a compromised source: it can redirect connections that lead to itself, and it names the rank's user.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Iterator, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.config import Config
from snapshotd.moves.peers.connections import new_pair, old_pair
from snapshotd.moves.peers.node_addresses import NodeAddresses
from snapshotd.net import sockets
from snapshotd.net.flows import Address, Flow
from snapshotd.proc import status
from snapshotd.proc.files import GONE

#: A node has few addresses. Each one that is asked about can cost a few seconds.
ADDRESSES_MAX = 32

ADDRESSES, USERS = "connection-addresses", "connection-users"
REMEDY = {
    ADDRESSES: "let the daemons of source and target listen at the addresses that their ranks use, or name these in their"
    " certificates (`migrator cluster add NODE IP --address IP`)",
    USERS: "close the connection, or name the user in connection_users of snapshotd.toml on that node",
}


class Permission:
    """One per daemon. Its methods block."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._proofs = NodeAddresses(config.credentials)
        self._own: frozenset[str] = frozenset()  # as last read
        self._always = frozenset(pwd.getpwnam(name).pw_uid for name in config.connection_users)

    def addresses(self, move: pb.MoveDescription, rewires: Sequence[pb.Rewire]) -> list[str]:
        """Why connections may not get these addresses; empty if they may. Raises BadAddress."""
        if problems := [problem for rewire in rewires for problem in self._wrong_shape(move, rewire)]:
            return problems
        wanted = {(old_pair(rewire)[0].ip, move.source_node, move.source_endpoint) for rewire in rewires}
        wanted |= {(new_pair(rewire)[0].ip, move.target_node, move.target_endpoint) for rewire in rewires}
        if len(wanted) > ADDRESSES_MAX:
            return [f"the rank has connections with {len(wanted)} addresses, more than {ADDRESSES_MAX}"]
        for ip, node, endpoint in sorted(wanted):
            if not self._belongs(ip, node, endpoint):  # takes seconds, so the others are not tried any more
                return [f"{ip} is not proved to be an address of {node}"]
        return []

    def _wrong_shape(self, move: pb.MoveDescription, rewire: pb.Rewire) -> Iterator[str]:
        (rank_old, far_old), (rank_new, far_new) = old_pair(rewire), new_pair(rewire)
        shown, here_is_source = f"{rank_old} – {far_old}", self._config.node == move.source_node
        if rank_new.port != rank_old.port or far_new.port != far_old.port:
            yield f"{shown}: its ports would change"
        if far_new != far_old:
            real = here_is_source and far_old.loopback and not far_new.loopback and self._is_own(far_new.ip)
            if not real:
                yield f"{shown}: its address on this node would become {far_new.ip}"
        if (rank_old.loopback and not here_is_source) or rank_new.loopback:
            yield f"{shown}: a loopback address is not that of another node"

    def _belongs(self, ip: str, node: str, endpoint: str) -> bool:
        if node == self._config.node:
            return Address(ip, 0).loopback or self._is_own(ip)
        return self._proofs.belongs(ip, node, endpoint)

    def _is_own(self, ip: str) -> bool:
        """Reads the addresses of this node again only for one that it did not have: that takes milliseconds of the pause."""
        if ip not in self._own:
            self._own = sockets.own_addresses()
        return ip in self._own

    def users(self, move: pb.MoveDescription, flows: Iterable[Flow]) -> list[str]:
        """The processes of other users that have one of these sockets."""
        allowed = set(move.user_ids) or ({move.user_id} if move.HasField("user_id") else set[int]())
        if not self._config.allow_root_ranks:
            allowed.discard(0)
        allowed |= self._always
        problems = {}
        for flow in flows:
            for holder in flow.holders:
                try:
                    strangers = set(status.read(holder.pid).user_ids) - allowed
                except GONE:
                    continue  # it has closed the socket, or the socket is found to have no holder later
                if strangers:
                    process = f"{flow} belongs to process {holder.pid} of user {_name(min(strangers))}"
                    problems[holder.pid] = f"{process}, not of the rank's user"
        return list(problems.values())


def _name(user_id: int) -> str:
    try:
        return f"{pwd.getpwuid(user_id).pw_name} ({user_id})"
    except KeyError:
        return str(user_id)
