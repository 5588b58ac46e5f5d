"""Forwards new connections from a moved rank's former addresses to its present one, on every node of the cluster.

The node that has the rank sends the addresses to all other nodes and retries until each has confirmed. The forwarding itself
is in the kernel (nftables) and survives every daemon. When the rank ends, its last node and its home withdraw it everywhere.

The node that the rank has just left is notified last. It holds new connections (new_connections.py) until then, so that
those it admits are forwarded to the new address. Each node also keeps the addresses on disk: a rebooted node forwards again,
and a node that was down when the rank ended finds out at its start that no node knows the rank any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError, Usage
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves.node import Node
from snapshotd.moves.peers.new_connections import LOOPBACKS, reached_at
from snapshotd.moves.steps import step
from snapshotd.net import forward, tracking
from snapshotd.net.flows import Address, BadAddress
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
#: How long the others have before the node that was left is notified: an unreachable one must not delay that for ever.
OTHERS_FIRST_S = 3.0

Map = Mapping[Address, Address]


class Forwarding:
    """Both sides: publishes addresses to the other nodes, and applies those that another node published."""

    def __init__(self, node: Node, forwarded: Callable[[str], Awaitable[None]]) -> None:
        self.node = node
        self._forwarded = forwarded  # called with a rank's uid once its published addresses are in force here
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._positive: dict[str, bool] = {}  # by rank: publishes addresses (True) or withdraws them
        self._folder = node.config.state_dir / "forwards"
        self._changing = asyncio.Lock()

    # ------------------------------------------------------------------ applying what another node published

    @step
    async def set(self, request: pb.ForwardRequest, caller: str) -> pb.ForwardReply:
        """Applies the addresses of a rank that another node published; an empty list forgets the rank."""
        uid = check_rank_uid(request.rank_uid)
        if caller != self.node.config.node and self._positive.get(uid) and uid in self._telling:
            self._telling[uid].cancel()  # the rank has moved on, or ended there: our addresses are out of date
        try:
            addresses = {
                Address(item.old_address.ip, item.old_address.port): Address(item.new_address.ip, item.new_address.port)
                for item in request.forwardings
            }
        except BadAddress as error:
            raise Usage(f"an address to be forwarded makes no sense: {error}") from error
        nodes = [[node.name, node.endpoint] for node in request.nodes]
        async with self._changing:
            await in_thread(self._put, uid, addresses, nodes, request.moves)
        await self._forwarded(uid)
        return pb.ForwardReply()

    def _put(self, uid: str, addresses: Map, nodes: list[list[str]], moves: int) -> None:
        path = self._folder / f"{uid}.json"
        if path.exists() and json.loads(path.read_text())["moves"] > moves:
            return  # a late request of a node that the rank has left since
        if not addresses:
            forward.forget(uid)
            path.unlink(missing_ok=True)
            return
        before = forward.forwarded(uid)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        known = {"addresses": [[str(old), str(new)] for old, new in addresses.items()], "nodes": nodes, "moves": moves}
        path.with_suffix(".new").write_text(json.dumps(known))
        path.with_suffix(".new").rename(path)
        forward.forward(uid, addresses)
        # A SYN that is still unanswered would otherwise be sent again to where the first one went.
        tracking.untrack_calls({*before, *addresses})

    async def recall(self) -> None:
        """At start: applies the addresses from before the restart again, unless every node reports that the rank is gone."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                await self._recall(path)
            except (SnapshotError, OSError, ValueError, KeyError) as error:
                log.warning("what %s says is not forwarded: %s", path.name, error)

    async def _recall(self, path: Path) -> None:
        uid = check_rank_uid(path.name.removesuffix(".json"))
        known = await in_thread(path.read_text)
        fields = json.loads(known)
        answers = await asyncio.gather(*(self._knows(uid, *node) for node in fields["nodes"]))
        if answers and not any(answers):  # all nodes have answered, and none has the rank
            log.info("rank %s has ended: nothing is forwarded to it any more", uid)
            async with self._changing:
                await in_thread(self._put, uid, {}, [], fields["moves"])
            return
        async with self._changing:
            await in_thread(self._again, path)

    def _again(self, path: Path) -> None:
        """Applies the file's addresses, if it still exists: the rank may just have been withdrawn."""
        if path.exists() and (uid := path.name.removesuffix(".json")) not in forward.listed():
            fields = json.loads(path.read_text())
            addresses = {Address.parse(old): Address.parse(new) for old, new in fields["addresses"]}
            self._put(uid, addresses, fields["nodes"], fields["moves"])

    async def _knows(self, uid: str, name: str, endpoint: str) -> bool:
        """Whether a node has the rank or its keeper. True for a node that does not answer, because it may."""
        try:
            async with self.node.client(name, endpoint) as client:
                reply = await client.node.ListRanks(pb.ListRanksRequest(), timeout_s=10)
        except SnapshotError:
            return True
        return any(rank.uid == uid for rank in reply.ranks)

    # ------------------------------------------------------------------ publishing

    def publish(self, entry: RankEntry, left: str = "") -> None:
        """Publishes to every node where the rank's listeners are now, to the node it left last. Returns at once; a task
        retries until all nodes have confirmed."""
        addresses = {Address.parse(old): Address.parse(new) for old, new in entry.former}
        self._tell(entry, addresses, left)

    def withdraw(self, entry: RankEntry) -> None:
        """The rank has ended: removes its forwardings on all nodes."""
        self._tell(entry, {}, "")

    def stop(self) -> None:
        for task in self._telling.values():
            task.cancel()

    def _tell(self, entry: RankEntry, addresses: Map, left: str) -> None:
        if (old := self._telling.pop(entry.uid, None)) is not None:
            old.cancel()
        if not entry.nodes:
            return  # it never moved
        self._positive[entry.uid] = bool(addresses)
        task = asyncio.create_task(self._tell_all(entry, addresses, left), name=f"forward {entry.uid}")
        self._telling[entry.uid] = task
        task.add_done_callback(lambda done: self._done(entry.uid, done))

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        if self._telling.get(uid) is task:
            del self._telling[uid]
            self._positive.pop(uid, None)

    async def _tell_all(self, entry: RankEntry, addresses: Map, left: str) -> None:
        nodes = [pb.NodeAddresses(name=name, endpoint=endpoint) for name, endpoint, _ in entry.nodes]
        # A loopback address referred to the rank only on its home node.
        others = {old: new for old, new in addresses.items() if not old.loopback}
        requests = {
            node.name: pb.ForwardRequest(
                rank_uid=entry.uid,
                nodes=nodes,
                moves=entry.moves,
                forwardings=_forwardings(addresses if node.name == entry.home_node else others),
            )
            for node in nodes
        }
        async with asyncio.TaskGroup() as group:
            first = [
                group.create_task(self._tell_one(node, requests[node.name])) for node in nodes if node.name != left
            ]
            if first:
                await asyncio.wait(first, timeout=OTHERS_FIRST_S if left else 0)
            for node in nodes:
                if node.name == left:
                    group.create_task(self._tell_one(node, requests[left]))

    async def _tell_one(self, node: pb.NodeAddresses, request: pb.ForwardRequest) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                async with self.node.client(node.name, node.endpoint) as client:
                    await client.peer.Forward(request, timeout_s=10)
                return
            except SnapshotError as error:
                if wait_s == FIRST_WAIT_S:
                    log.info("%s has not heard where rank %s is yet: %s", node.name, request.rank_uid, error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)


def _forwardings(addresses: Map) -> list[pb.Forwarding]:
    return [
        pb.Forwarding(
            old_address=pb.Endpoint(ip=old.ip, port=old.port), new_address=pb.Endpoint(ip=new.ip, port=new.port)
        )
        for old, new in addresses.items()
    ]


def moved_listeners(
    former: Iterable[Iterable[str]],
    rewires: Iterable[pb.Rewire],
    source: Iterable[str],
    target: Iterable[str],
    *,
    leaves_home: bool = False,
    comes_home: bool = False,
) -> list[list[Any]]:
    """[old address, present address] for every listener of a rank that has just come from `source` to `target`.

    A listener on all addresses was reachable at each of the source's, and is now at the target's of the same family. On its
    home node it was also reached at loopback addresses: these are forwarded for as long as it is elsewhere.
    """
    sources, targets = [text.partition("/")[0] for text in source], [text.partition("/")[0] for text in target]
    if leaves_home:
        sources += LOOPBACKS
    present: dict[Address, Address] = {}
    for rewire in rewires:
        if rewire.kind != pb.Rewire.LISTENER:
            continue
        old, new = (Address(end.ip, end.port) for end in (rewire.old_local, rewire.new_local))
        if old.loopback:
            continue  # a loopback address of another node cannot be reached; preflight has warned
        for address in reached_at(old, sources):
            there = (
                new
                if not new.wildcard
                else next((new.at(ip) for ip in targets if Address(ip, 0).version == address.version), None)
            )
            if there is not None:
                present[address] = there
    known = {Address.parse(old): Address.parse(new) for old, new in former}
    merged = forward.collapse(known, present)
    return [[str(old), str(new)] for old, new in sorted(merged.items()) if not (comes_home and old.loopback)]
