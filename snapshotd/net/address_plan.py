"""Decides which addresses each socket of a rank gets on the target. Pure: from flows and addresses to a list of `Rewire`.

Invariant: after a move every connection has the same two processes and the same ports; only addresses of the source node are
replaced. An address that cannot be determined with certainty is reported as a problem, never guessed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.flows import Address, Flow
from snapshotd.net.places import Places, Unclear


def plan(flows: Iterable[Flow], places: Places) -> tuple[list[pb.Rewire], list[str]]:
    """(rewirings, problems) for the inet sockets of a rank's process tree."""
    flows = [flow for flow in flows if flow.protocol in {"tcp", "udp"}]  # others are refused by refusals.py
    endpoints = {(flow.protocol, flow.endpoints) for flow in flows if flow.connected}
    rewires: list[pb.Rewire] = []
    problems: list[str] = []
    for flow in flows:
        try:
            if flow.connected and (flow.protocol, flow.mirrored()) in endpoints:
                rewires.append(_inside(flow, places))
            elif flow.connected and flow.protocol == "tcp":
                rewires.append(_outward(flow, places))
            elif flow.local.port:
                rewires.append(_alone(flow, places))
            # else it is neither bound nor connected: it has no address
        except Unclear as why:
            problems.append(f"{flow}: {why}")
    return rewires, problems


def _alone(flow: Flow, places: Places) -> pb.Rewire:
    """A listener, a socket that is only bound, or a datagram socket, whose peer keeps no connection: its own address changes.
    One that is bound to all addresses or to loopback stays as it is."""
    local = _moved(flow.local, places)
    return pb.Rewire(
        kind=pb.Rewire.LISTENER if flow.listens else pb.Rewire.OWN,
        family=flow.family,
        old_local=_endpoint(flow.local),
        new_local=_endpoint(flow.local.at(local)),
        v6only=flow.listens and flow.v6only,
        old_remote=_endpoint(flow.remote) if flow.remote else None,
        new_remote=_endpoint(flow.remote) if flow.remote else None,
    )


def _inside(flow: Flow, places: Places) -> pb.Rewire:
    old_local, old_remote = flow.endpoints
    local, remote = _moved(old_local, places), _moved(old_remote, places)
    return _rewire(pb.Rewire.INSIDE, flow, local, remote, "")


def _outward(flow: Flow, places: Places) -> pb.Rewire:
    local, far = flow.endpoints
    if far.loopback and places.source == places.target:  # suspended with its job: rejoin.py plans the addresses later
        return _rewire(pb.Rewire.PEER, flow, local.ip, far.ip, places.source)
    if far.loopback:  # to a process that stays on the source: both sockets get real addresses
        return _rewire(pb.Rewire.PEER, flow, *places.real_endpoints(far.version), places.source)
    peer = places.node_of(far.ip)
    if peer is None:  # it ends with the move, so it needs no new address
        with contextlib.suppress(Unclear):
            return _rewire(pb.Rewire.OUTSIDE, flow, places.counterpart(local.ip), far.ip, "")
        return _rewire(pb.Rewire.OUTSIDE, flow, local.ip, far.ip, "")
    return _rewire(pb.Rewire.PEER, flow, places.counterpart(local.ip), far.ip, peer)


def _moved(address: Address, places: Places) -> str:
    """The target's address for one that no peer keeps in a connection. Loopback and wildcard addresses stay, and one that
    source and target both have: it means the node itself."""
    both = {places.source, places.target} <= set(places.owners(address.ip))
    return address.ip if address.loopback or address.wildcard or both else places.counterpart(address.ip)


def _rewire(kind: pb.Rewire.Kind.ValueType, flow: Flow, local: str, remote: str, peer: str) -> pb.Rewire:
    old_local, old_remote = flow.endpoints
    return pb.Rewire(
        kind=kind,
        family=flow.family,
        old_local=_endpoint(old_local),
        old_remote=_endpoint(old_remote),
        new_local=_endpoint(old_local.at(local)),
        new_remote=_endpoint(old_remote.at(remote)),
        peer_node=peer,
        ended=kind == pb.Rewire.PEER and flow.reads_end,
    )


def _endpoint(address: Address) -> pb.Endpoint:
    return pb.Endpoint(ip=address.ip, port=address.port)
