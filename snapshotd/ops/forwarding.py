"""New connections to a moved rank's former addresses reach the present one, from every node of the cluster.

The node that has the rank tells all others, again and again until each has heard it; what was heard is the kernel's (nftables)
and outlives every daemon. When the rank ends, the node that had it takes it back everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Usage
from snapshotd.blocking import in_thread
from snapshotd.net import forward
from snapshotd.net.flows import Address, BadAddress
from snapshotd.ops.node import Node
from snapshotd.ranks import RankEntry, check_rank_uid

log = logging.getLogger(__name__)

TRY_AGAIN_S = 2.0
GIVE_UP_S = 600.0


class Forwarding:
    """Both sides of it: telling the other nodes, and doing what another node told."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._telling: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def set(self, request: pb.ForwardRequest) -> pb.ForwardReply:
        """What another node says about a rank of its own; an empty list forgets the rank."""
        uid = check_rank_uid(request.rank_uid)
        try:
            addresses = {
                Address(item.old_address.ip, item.old_address.port): Address(item.new_address.ip, item.new_address.port)
                for item in request.forwardings
            }
        except BadAddress as error:
            raise Usage(f"an address to be forwarded makes no sense: {error}") from error
        if addresses:
            await in_thread(forward.forward, uid, addresses)
        else:
            await in_thread(forward.forget, uid)
        return pb.ForwardReply()

    def publish(self, entry: RankEntry) -> None:
        """Tells every node where the rank's listeners are now. Returns at once; goes on until all have heard."""
        self._tell(entry.uid, entry.nodes, {Address.parse(old): Address.parse(new) for old, new in entry.former})

    def withdraw(self, entry: RankEntry) -> None:
        """The rank has ended: nothing is forwarded to it any more, anywhere."""
        if entry.former:
            self._tell(entry.uid, entry.nodes, {})

    def _tell(self, uid: str, nodes: Iterable[Iterable[Any]], addresses: Mapping[Address, Address]) -> None:
        if not addresses and not any(key[0] == uid for key in self._telling) and not nodes:
            return
        for name, endpoint, _ in nodes:
            if (old := self._telling.get((uid, name))) is not None:
                old.cancel()
            task = asyncio.create_task(self._tell_one(uid, name, endpoint, addresses), name=f"forward {uid} on {name}")
            self._telling[uid, name] = task

    async def _tell_one(self, uid: str, name: str, endpoint: str, addresses: Mapping[Address, Address]) -> None:
        forwardings = [
            pb.Forwarding(
                old_address=pb.Endpoint(ip=old.ip, port=old.port), new_address=pb.Endpoint(ip=new.ip, port=new.port)
            )
            for old, new in addresses.items()
        ]
        request = pb.ForwardRequest(rank_uid=uid, forwardings=forwardings)
        waited_s = 0.0
        while waited_s < GIVE_UP_S:
            try:
                async with self.node.client(name, endpoint) as client:
                    await client.peer.Forward(request, timeout_s=10)
                return
            except SnapshotError as error:
                if not waited_s:
                    log.info("%s does not forward to rank %s yet: %s", name, uid, error.message)
            await asyncio.sleep(TRY_AGAIN_S)
            waited_s += TRY_AGAIN_S


def moved_listeners(
    former: Iterable[Iterable[str]], rewires: Iterable[pb.Rewire], source: Iterable[str], target: Iterable[str]
) -> list[list[str]]:
    """[old address, present address] for every listener of a rank that has just come from `source` to `target`.

    A listener on all addresses was reachable at each of the source's, and is at the target's of the same family.
    """
    sources, targets = [text.partition("/")[0] for text in source], [text.partition("/")[0] for text in target]
    present: dict[Address, Address] = {}
    for rewire in rewires:
        if rewire.kind != pb.Rewire.LISTENER:
            continue
        old, new = (Address(end.ip, end.port) for end in (rewire.old_local, rewire.new_local))
        if old.loopback:
            continue  # on loopback nobody else could reach it; the processes of its own tree still can
        reachable = [old.at(ip) for ip in sources] if old.wildcard else [old]
        for address in reachable:
            there = (
                new
                if not new.wildcard
                else next((new.at(ip) for ip in targets if Address(ip, 0).version == address.version), None)
            )
            if there is not None:
                present[address] = there
    known = {Address.parse(old): Address.parse(new) for old, new in former}
    merged = forward.collapse(known, present)
    return [[str(old), str(new)] for old, new in sorted(merged.items())]
