"""Decides which addresses the sockets of a suspended job get when it is resumed. Pure: from rewirings and nodes to rewirings.

Every rank of the job is restored, some on other nodes. Both ends of a connection between two ranks are in images, and each
target plans the addresses of its own rank alone. Invariant: two targets with the same list of ranks give the two ends of a
connection mirrored addresses, with the same ports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.flows import Address, BadAddress, Pair
from snapshotd.net.places import Places, Unclear


@dataclass(frozen=True)
class Resumed:
    """One rank of the job: where it was, where it will be, and its sockets as the freeze found them."""

    uid: str
    source: str
    target: str
    rewires: Sequence[pb.Rewire]


def plan(own: str, ranks: Iterable[Resumed], nodes: Sequence[pb.NodeAddresses]) -> tuple[list[pb.Rewire], list[str]]:
    """(rewirings, problems) of the rank `own`, which is one of `ranks`."""
    by_uid = {rank.uid: rank for rank in ranks}
    ends = _ends(by_uid)
    mine = by_uid[own]
    rewires: list[pb.Rewire] = []
    problems: list[str] = []
    for rewire in mine.rewires:
        try:
            rewires.append(_planned(rewire, mine, ends, by_uid, nodes))
        except Unclear as why:
            problems.append(f"{rewire.old_local.ip}:{rewire.old_local.port}: {why}")
        except BadAddress as error:
            problems.append(str(error))
    return rewires, problems


#: One end of a connection: the pair (local, remote), and the node, if only processes of that node see this connection.
_End = tuple[str, Pair]


def _end(node: str, local: Address, remote: Address) -> _End:
    """Nodes can have the same connection, from their loopback address to itself, or from one that several of them have."""
    within = local.loopback or local.ip == remote.ip
    return (node if within else "", (local, remote))


def _ends(ranks: Mapping[str, Resumed]) -> dict[_End, str]:
    """The rank that has this end of a connection to another rank."""
    return {
        _end(rank.source, *_pair(rewire)): rank.uid
        for rank in ranks.values()
        for rewire in rank.rewires
        if rewire.kind == pb.Rewire.PEER
    }


def _planned(
    rewire: pb.Rewire,
    mine: Resumed,
    ends: Mapping[_End, str],
    ranks: Mapping[str, Resumed],
    nodes: Sequence[pb.NodeAddresses],
) -> pb.Rewire:
    places = Places.of(nodes, mine.source, mine.target)
    new = pb.Rewire()
    new.CopyFrom(rewire)
    if rewire.kind == pb.Rewire.OUTSIDE:
        return new  # it ends, so it needs no new address
    if rewire.kind != pb.Rewire.PEER:
        new.new_local.ip = _moved(rewire.old_local, places)
        if rewire.kind == pb.Rewire.INSIDE:
            new.new_remote.ip = _moved(rewire.old_remote, places)
        return new
    local, remote = _pair(rewire)
    peer = ranks.get(ends.get(_end(mine.source, remote, local), ""))
    if peer is None:
        if not rewire.ended:
            raise Unclear(f"no rank of the job has the other end, {remote}")
        new.new_local.ip = _moved(
            rewire.old_local, places
        )  # no process has the other end: the rank only reads what it got
        return new
    new.peer_node = peer.target
    if not remote.loopback:
        new.new_local.ip = _moved(rewire.old_local, places)
        new.new_remote.ip = _moved(rewire.old_remote, Places.of(nodes, peer.source, peer.target))
    elif mine.target != peer.target:  # they were on one node, and are not any more
        first, second = sorted((mine, peer), key=lambda rank: rank.uid)
        of_first, of_second = Places.of(nodes, second.target, first.target).real_endpoints(local.version)
        here, there = (of_first, of_second) if mine is first else (of_second, of_first)
        new.new_local.ip, new.new_remote.ip = here, there
    return new


def _moved(endpoint: pb.Endpoint, places: Places) -> str:
    """The target's address that replaces one of the source. Loopback and wildcard addresses stay, and one that both have."""
    address = Address(endpoint.ip, endpoint.port)
    both = {places.source, places.target} <= set(places.owners(address.ip))
    return address.ip if address.loopback or address.wildcard or both else places.counterpart(address.ip)


def _pair(rewire: pb.Rewire) -> Pair:
    return (
        Address(rewire.old_local.ip, rewire.old_local.port),
        Address(rewire.old_remote.ip, rewire.old_remote.port),
    )
