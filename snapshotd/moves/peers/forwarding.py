"""Forwards new connections from a moved rank's former addresses to its present one, on every node of the cluster.

The node that has the rank sends the addresses to all other nodes and retries until each has confirmed. The forwarding itself
is in the kernel (nftables) and survives every daemon. When the rank ends, its last node and its home withdraw it everywhere.

The node that the rank has just left is notified last. It holds new connections (new_connections.py) until then, so that
those it admits are forwarded to the new address. Each node also keeps the addresses on disk: a rebooted node forwards again,
and a node that was down when the rank ended finds out at its start that no node knows the rank any more.

Addresses are accepted only if the nodes that they belong to confirm them (departures.py). A rank's former ports on this node
are kept bound (held_ports.py); one that another process has got is not forwarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Denied, SnapshotError, Unreachable, Usage
from snapshotd.keepers.ranks import RankEntry, check_rank_uid
from snapshotd.moves.node import Node
from snapshotd.moves.peers.departures import Departures
from snapshotd.moves.peers.new_connections import LOOPBACKS, reached_at
from snapshotd.moves.steps import step
from snapshotd.net import forward, held_ports, tracking
from snapshotd.net.flows import Address, BadAddress
from snapshotd.net.places import Places, Unclear
from snapshotd.runtime.blocking import in_thread

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
#: How long the others have before the node that was left is notified: an unreachable one must not delay that for ever.
OTHERS_FIRST_S = 3.0
#: How often ports that are not held yet are tried again: until the copy of the rank that was left here is gone, or later.
HOLD_AGAIN_S, HOLD_LATER_S = 0.1, 5.0

Map = Mapping[Address, Address]
Known = dict[str, Any]  # the content of a file in STATE_DIR/forwards


class Forwarding:
    """Both sides: publishes addresses to the other nodes, and applies those that another node published."""

    def __init__(self, node: Node, forwarded: Callable[[str], Awaitable[None]]) -> None:
        self.node = node
        self._forwarded = forwarded  # called with a rank's uid once its published addresses are in force here
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._positive: dict[str, bool] = {}  # by rank: publishes addresses (True) or withdraws them
        self._folder = node.config.state_dir / "forwards"
        self._changing = asyncio.Lock()
        self._holding: dict[str, asyncio.Task[None]] = {}
        self.departures = Departures(node, self._known)

    # ------------------------------------------------------------------ applying what another node published

    @step
    async def accept(self, request: pb.ForwardRequest, caller: str) -> pb.ForwardReply:
        """Applies the addresses of a rank that another node published; an empty list forgets the rank.

        Raises Denied, with nothing changed, if the caller is not where the rank is, or if the rank never listened there.
        Raises Unreachable if some addresses could not be confirmed now; the others are in force.
        """
        uid = check_rank_uid(request.rank_uid)
        try:
            addresses = {
                Address(item.old_address.ip, item.old_address.port): Address(item.new_address.ip, item.new_address.port)
                for item in request.forwardings
            }
        except BadAddress as error:
            raise Usage(f"an address to be forwarded makes no sense: {error}") from error
        try:
            confirmed = await self._confirmed(uid, addresses, caller, request)
        except Denied as error:
            log.warning("%s may not have connections to rank %s forwarded: %s", caller, uid, error.message)
            raise
        if caller != self.node.config.node and self._positive.get(uid) and uid in self._telling:
            self._telling[uid].cancel()  # the rank has moved on, or ended there: our addresses are out of date
        if confirmed or not addresses:
            known: Known = {
                "addresses": [[str(old), str(new)] for old, new in confirmed.items()],
                "nodes": [[node.name, node.endpoint] for node in request.nodes],
                "moves": request.moves,
                "by": caller,
                "home": request.home_node,
                "user_id": home.user_id if (home := self.node.ranks.get(uid, "home")) is not None else None,
            }
            async with self._changing:
                await in_thread(self._put, uid, known)
            self._keep_holding(uid)
        if missing := sorted(addresses.keys() - confirmed.keys()):
            raise Unreachable(
                f"no node confirms yet that rank {uid} listened at {', '.join(map(str, missing[:5]))}",
                remedy="check the daemons of the nodes that the rank has left; the request is repeated",
            )
        await self._forwarded(uid)
        return pb.ForwardReply()

    async def _confirmed(self, uid: str, addresses: Map, caller: str, request: pb.ForwardRequest) -> Map:
        if caller == self.node.config.node:
            return addresses
        if not addresses:
            known = await in_thread(self._read, uid)
            # Before "by" was stored, any node could publish.
            owners = {known.get("by"), known.get("home")} if known and "by" in known else None
            if known and owners is not None and caller not in owners:
                raise Denied(f"rank {uid} is on {known.get('by')}: {caller} may not end its forwardings")
            return addresses
        confirmed = await self.departures.check(uid, addresses, caller, request.nodes)
        return {old: new for old, new in addresses.items() if old in confirmed}

    def _known(self, uid: str, holder: str) -> set[Address]:
        """Addresses of a rank on `holder` that were confirmed before."""
        known = self._read(uid)
        return {Address.parse(old) for old, _ in known["addresses"]} if known and known.get("by") == holder else set()

    def _read(self, uid: str) -> Known | None:
        try:
            found: Known = json.loads((self._folder / f"{uid}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def _put(self, uid: str, known: Known) -> None:
        """Applies and stores addresses. Blocking; the caller holds the lock."""
        path = self._folder / f"{uid}.json"
        earlier = self._read(uid)
        if earlier is not None and earlier["moves"] > known["moves"]:
            return  # a late request of a node that the rank has left since
        addresses = {Address.parse(old): Address.parse(new) for old, new in known["addresses"]}
        if not addresses:
            forward.forget(uid)
            held_ports.release(uid)
            path.unlink(missing_ok=True)
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(known))
        path.with_suffix(".new").rename(path)
        self._apply(uid, addresses, known.get("user_id"))

    def _apply(self, uid: str, addresses: Map, user_id: int | None) -> bool:
        """Holds the rank's former ports here and forwards from them. Returns whether some ports could not be held yet.

        A port at which another process listens is not forwarded, unless a move of the rank is not finished here: then it is
        the rank's own copy that listens.
        """
        if user_id is None and (home := self.node.ranks.get(uid, "home")) is not None:
            user_id = home.user_id  # of a file from before the user was stored
        if user_id is None:
            addresses = {old: new for old, new in addresses.items() if not old.loopback}
        unfinished = self._unfinished(uid)
        in_use = held_ports.hold(uid, addresses) if "target" not in unfinished else set[Address]()
        taken = {address for address in in_use if not unfinished and held_ports.others_listen(address)}
        wanted = {old: new for old, new in addresses.items() if old not in taken}
        before = forward.forwarded(uid)
        if wanted != before:
            for address in sorted(taken):
                log.warning("%s is not forwarded to rank %s: another process listens there", address, uid)
            forward.forward(uid, wanted, user_id)
            # A SYN that is still unanswered would otherwise be sent again to where the first one went.
            tracking.untrack_calls({old: old for old in before} | wanted)
        return bool(in_use)

    def _keep_holding(self, uid: str) -> None:
        if (task := self._holding.get(uid)) is None or task.done():
            self._holding[uid] = asyncio.create_task(self._hold(uid), name=f"hold ports of {uid}")

    async def _hold(self, uid: str) -> None:
        """Tries until all former ports of the rank on this node are held, or nothing is forwarded from them."""
        wait_s = HOLD_AGAIN_S
        while True:
            async with self._changing:
                try:
                    if not await in_thread(self._hold_once, uid):
                        break
                except (SnapshotError, OSError, ValueError, KeyError) as error:
                    log.warning("the former ports of rank %s are not held: %s", uid, error)
                    wait_s = HOLD_LATER_S
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.2, HOLD_LATER_S)
        del self._holding[uid]

    def _hold_once(self, uid: str) -> bool:
        known = self._read(uid)
        if known is None:
            return False
        addresses = {Address.parse(old): Address.parse(new) for old, new in known["addresses"]}
        return self._apply(uid, addresses, known.get("user_id"))

    def _unfinished(self, uid: str) -> set[str]:
        """The roles in which a move of the rank is not finished here. As a target it needs its ports itself."""
        return {
            move_log.begin.role
            for move_log in self.node.journal.all()
            if move_log.begin.rank_uid == uid and not move_log.ended_unix_s
        } & {"source", "target"}

    async def make_room(self, uid: str) -> None:
        """The rank is about to be restored here, perhaps at a port where it listened before."""
        async with self._changing:
            await in_thread(held_ports.release, uid)

    def hold_again(self, uid: str) -> None:
        """The rank was not restored here after all."""
        self._keep_holding(uid)

    async def recall(self) -> None:
        """At start: applies the addresses from before the restart again, unless every node reports that the rank is gone."""
        stored = sorted(self._folder.glob("*.json"))
        for path in stored:
            self._keep_holding(path.name.removesuffix(".json"))  # at once: while no daemon runs, no port is held
        for path in stored:
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
                await in_thread(self._put, uid, {**fields, "addresses": []})

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
        for task in [*self._telling.values(), *self._holding.values()]:
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
        nodes = [pb.NodeAddresses(name=name, endpoint=endpoint, addresses=own) for name, endpoint, own in entry.nodes]
        # A loopback address referred to the rank only on its home node.
        others = {old: new for old, new in addresses.items() if not old.loopback}
        requests = {
            node.name: pb.ForwardRequest(
                rank_uid=entry.uid,
                nodes=nodes,
                moves=entry.moves,
                home_node=entry.home_node,
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
    places: Places,
    *,
    leaves_home: bool = False,
    comes_home: bool = False,
) -> list[list[Any]]:
    """[old address, present address] for every listener of a rank that has just come from the source to the target.

    A listener on all addresses was reachable at each of the source's, and is now at the target's of the same network, else of
    the same family. On its home node it was also reached at loopback addresses: these are forwarded for as long as it is
    elsewhere. Addresses that several nodes have are not forwarded: on each node they mean that node.
    """
    sources = [item.ip for item in places.usable(places.source)]
    if leaves_home:
        sources += LOOPBACKS
    present: dict[Address, Address] = {}
    for rewire in rewires:
        if rewire.kind != pb.Rewire.LISTENER:
            continue
        old, new = (Address(end.ip, end.port) for end in (rewire.old_local, rewire.new_local))
        if old.loopback or (not old.wildcard and old == new):
            continue  # it cannot be reached from another node; preflight has warned
        for address in reached_at(old, sources, v6only=rewire.v6only):
            ip = _reached_there(address, places) if new.wildcard else new.ip
            if ip is not None:
                present[address] = new.at(ip)
    known = {Address.parse(old): Address.parse(new) for old, new in former}
    merged = forward.collapse(known, present)
    return [[str(old), str(new)] for old, new in sorted(merged.items()) if not (comes_home and old.loopback)]


def _reached_there(address: Address, places: Places) -> str | None:
    with contextlib.suppress(Unclear):
        return places.real_endpoints(address.version)[0] if address.loopback else places.counterpart(address.ip)
    return next((item.ip for item in places.usable(places.target, address.version)), None)
