"""Checks what another node says about a rank that has moved, before connections are forwarded to it.

A node's certificate proves only which node calls. So its word that a rank used to listen at an address, and is on that node
now, is believed only if the node that the address belongs to confirms it from its own journal: the rank left it in a move
with outcome COMMIT, listened there when it left, and the moves since then lead to the caller. This node's own journal is
asked for its own addresses, and for loopback addresses. Whether an address belongs to the node that confirms it is proved by
TLS: the node answers at that very address, or its certificate names it.

A node that took part in the move as a peer also believes the operator who announced the move to it, for the addresses that
its own connections to the rank had.

What remains possible for a compromised node: to misdirect new connections to former addresses of ranks that it has, or had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.addresses import split_address
from snapshotd.api.errors import Denied, SnapshotError, Unreachable, Usage
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.peers.new_connections import LOOPBACKS, reached_at
from snapshotd.moves.record_parts import parse_pair
from snapshotd.net import sockets
from snapshotd.net.flows import Address, BadAddress
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

ASK_S = 5.0
#: A rank that has moved more often since it left a node is not found again from there.
CHAIN_MAX = 16
ADDRESSES_MAX = 1024
_REMEDY = (
    "if the move was genuine, check that the daemon of the node that the rank left answers; the request is repeated"
)


#: (rank uid, node that has it) -> addresses that were confirmed before. They are on disk: the journal forgets old moves.
Known = Callable[[str, str], Collection[Address]]


def _leaves(move_log: MoveLog) -> bool:
    """Whether the rank left, or came. After a snapshot it went on; it leaves if it is rolled back from that image."""
    begin = move_log.begin
    return begin.kind != "copy" and (begin.kind != "snapshot" or bool(move_log.known.resumed_node))


class Departures:
    """Both sides: checks addresses for this node, and confirms this node's own to others."""

    def __init__(self, node: Node, known: Known) -> None:
        self.node = node
        self._known = known

    async def check(
        self, rank_uid: str, addresses: Iterable[Address], holder: str, nodes: Iterable[pb.NodeAddresses]
    ) -> set[Address]:
        """Returns those of `addresses` from which connections may be forwarded to the rank, which is on `holder`.

        Leaves out those whose node does not answer. Raises Denied if a node, or this one, knows that it is not true.
        """
        left = set(addresses) - set(self._known(rank_uid, holder))
        if len(left) > ADDRESSES_MAX:
            raise Denied(f"{holder} asks for {len(left)} addresses of rank {rank_uid} to be forwarded")
        confirmed = set(addresses) - left
        own = await in_thread(sockets.own_addresses)
        if ours := {address for address in left if address.loopback or address.ip in own}:
            await self._confirm_own(rank_uid, ours, holder, 0)
            confirmed |= ours
        announced = left - ours & self._announced_to_peer(rank_uid, holder)
        confirmed |= announced
        by_ip: dict[str, set[Address]] = {}
        for address in left - ours - announced:
            by_ip.setdefault(address.ip, set()).add(address)
        listed = list(nodes)
        answers = await asyncio.gather(*(self._ask(rank_uid, some, holder, listed) for some in by_ip.values()))
        return confirmed.union(*answers)

    async def confirm(self, request: pb.DepartureRequest) -> pb.DepartureReply:
        """Confirms to another node that a rank has left this one. Raises Denied, or Unreachable if it cannot be known now."""
        uid = check_rank_uid(request.rank_uid)
        try:
            addresses = {Address(item.ip, item.port) for item in request.addresses}
        except BadAddress as error:
            raise Usage(f"an address makes no sense: {error}") from error
        if any(address.loopback for address in addresses):
            raise Denied(f"loopback addresses of node {self.node.config.node} are its own matter")
        if not addresses <= set(self._known(uid, request.holder)) or not addresses:
            await self._confirm_own(uid, addresses, request.holder, request.asked_before)
        return pb.DepartureReply()

    # ------------------------------------------------------------------ this node's own addresses

    async def _confirm_own(self, uid: str, addresses: Collection[Address], holder: str, asked_before: int) -> None:
        moves = [log for log in self.node.journal.all() if log.begin.rank_uid == uid and log.committed and _leaves(log)]
        departures = [log for log in moves if log.begin.role == "source"]
        if not departures:
            raise Denied(f"no rank {uid} has left node {self.node.config.node}", remedy=_REMEDY)
        if [log for log in moves if log.begin.role in {"source", "target"}][-1].begin.role == "target":
            raise Denied(f"rank {uid} has come back to node {self.node.config.node}: it is not on {holder}")
        if strange := sorted(await in_thread(_unknown_to, departures, addresses)):
            raise Denied(
                f"rank {uid} did not listen at {', '.join(map(str, strange[:5]))} when it left node"
                f" {self.node.config.node}, so connections there are not forwarded to {holder}",
                remedy=_REMEDY,
            )
        await self._leads_to(uid, departures[-1], holder, asked_before)

    async def _leads_to(self, uid: str, last: MoveLog, holder: str, asked_before: int) -> None:
        """Raises Denied unless the rank, which left this node in the move `last`, is on `holder` now."""
        home = self.node.ranks.get(uid, "home")
        if holder == last.begin.target_node or (home is not None and home.away_node == holder):
            return
        if asked_before >= CHAIN_MAX:
            raise Denied(f"rank {uid} has moved too often for node {self.node.config.node} to know where it is")
        request = pb.DepartureRequest(rank_uid=uid, holder=holder, asked_before=asked_before + 1)
        next_node, next_endpoint = last.begin.target_node, last.begin.target_endpoint
        if last.begin.coordinator:  # it was suspended here, and is where its image was sent
            record = await in_thread(last.whole)
            next_node, next_endpoint = record.resumed_node, record.resumed_endpoint
            if holder == next_node:
                return
            if not next_node:
                raise Denied(f"rank {uid} is suspended on node {self.node.config.node}: it is not on {holder}")
        async with self.node.client(next_node, next_endpoint) as client:
            await client.peer.ConfirmDeparture(request, timeout_s=ASK_S)

    def _announced_to_peer(self, uid: str, holder: str) -> set[Address]:
        """Where this node's own connections to the rank went before an operator's driver re-pointed them to `holder`."""
        return {
            parse_pair(peer.old)[1]
            for move_log in self.node.journal.all()
            if (move_log.begin.role, move_log.begin.rank_uid, move_log.begin.target_node) == ("peer", uid, holder)
            and move_log.committed
            for peer in move_log.record.peer_sockets
        }

    # ------------------------------------------------------------------ addresses of other nodes

    async def _ask(self, uid: str, addresses: set[Address], holder: str, nodes: list[pb.NodeAddresses]) -> set[Address]:
        """Asks the node that has these addresses, which are all of one IP; empty if it does not answer."""
        (ip,) = {address.ip for address in addresses}
        named = [node for node in nodes if ip in {text.partition("/")[0] for text in node.addresses}]
        request = pb.DepartureRequest(
            rank_uid=uid,
            holder=holder,
            addresses=[pb.Endpoint(ip=address.ip, port=address.port) for address in addresses],
        )
        for node in named[:1]:
            try:
                port = split_address(node.endpoint)[1]
            except ValueError as error:
                raise Usage(f"{node.endpoint!r} is not the endpoint of a node") from error
            # The list of nodes is the caller's word, so it only says where to ask.
            for endpoint, name in ((str(Address(ip, port)), node.name), (node.endpoint, ip)):
                try:
                    async with self.node.client(name, endpoint) as client:
                        await client.peer.ConfirmDeparture(request, timeout_s=ASK_S)
                    return addresses
                except Unreachable as error:
                    log.debug("%s does not confirm that rank %s has left it: %s", node.name, uid, error.message)
                except Denied:
                    raise
                except SnapshotError as error:
                    log.info("%s cannot confirm that rank %s has left it: %s", node.name, uid, error.message)
                    break
        return set()


def _unknown_to(departures: Sequence[MoveLog], addresses: Collection[Address]) -> set[Address]:
    """Those of the addresses at which the rank did not listen when it left. Blocking: reads moves that have ended, the newest
    first, until it has found all addresses."""
    own, left = sorted({*sockets.own_addresses(), *LOOPBACKS}), set(addresses)
    for move_log in reversed(departures):
        if not left:
            break
        for rewire in move_log.whole().rewires:
            if rewire.kind == pb.Rewire.LISTENER:
                local = Address(rewire.old_local.ip, rewire.old_local.port)
                left.difference_update(reached_at(local, own, v6only=rewire.v6only))
    return left
