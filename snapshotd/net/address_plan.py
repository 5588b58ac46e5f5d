"""Decides which addresses each socket of a rank gets on the target. Pure: from flows and addresses to a list of `Rewire`.

Invariant: after a move every connection has the same two processes and the same ports; only addresses of the source node are
replaced. An address that cannot be determined with certainty is reported as a problem, never guessed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.flows import Address, Flow


@dataclass(frozen=True)
class Places:
    """The cluster's nodes by name, each with its addresses ("10.0.0.1/24"), and the source and target of the move."""

    nodes: Mapping[str, Sequence[str]]
    source: str
    target: str

    def node_of(self, ip: str) -> str | None:
        for name, addresses in self.nodes.items():
            if ip in _plain(addresses):
                return name
        return None

    def counterpart(self, ip: str) -> str | None:
        """The target's address that replaces `ip` of the source: of the same network, else of the same family."""
        wanted = ipaddress.ip_address(ip)
        own = [ipaddress.ip_interface(text) for text in self.nodes.get(self.source, ())]
        theirs = [ipaddress.ip_interface(text) for text in self.nodes.get(self.target, ())]
        networks = [item.network for item in own if item.ip == wanted]
        for candidate in theirs:
            if candidate.network in networks:
                return str(candidate.ip)
        return next((str(item.ip) for item in theirs if item.version == wanted.version), None)

    def real_endpoints(self, version: int) -> tuple[str, str] | None:
        """(target's, source's) address for a connection over the source's loopback: of one network if possible."""
        own = [ipaddress.ip_interface(text) for text in self.nodes.get(self.source, ())]
        theirs = [ipaddress.ip_interface(text) for text in self.nodes.get(self.target, ())]
        pairs = [(there, here) for here in own for there in theirs if here.version == there.version == version]
        pairs.sort(key=lambda pair: pair[0].network != pair[1].network)  # stable: otherwise in the nodes' own order
        return (str(pairs[0][0].ip), str(pairs[0][1].ip)) if pairs else None


def plan(flows: Iterable[Flow], places: Places) -> tuple[list[pb.Rewire], list[str]]:
    """(rewirings, problems) for the inet sockets of a rank's process tree."""
    flows = [flow for flow in flows if flow.protocol in {"tcp", "udp"}]  # others are refused by refusals.py
    endpoints = {(flow.protocol, flow.endpoints) for flow in flows if flow.connected}
    rewires: list[pb.Rewire] = []
    problems: list[str] = []
    for flow in flows:
        if flow.connected and (flow.protocol, flow.mirrored()) in endpoints:
            rewire = _inside(flow, places)
        elif flow.connected and flow.protocol == "tcp":
            rewire = _outward(flow, places)
        elif flow.local.port:
            rewire = _alone(flow, places)
        else:
            continue  # neither bound nor connected: it has no address
        if rewire is None:
            problems.append(f"{flow}: {places.target} has no address that can replace {flow.local.ip}")
        else:
            rewires.append(rewire)
    return rewires, problems


def _alone(flow: Flow, places: Places) -> pb.Rewire | None:
    """A listener, a socket that is only bound, or a datagram socket, whose peer keeps no connection: its own address changes.
    One that is bound to all addresses or to loopback stays as it is."""
    local = _moved(flow.local, places)
    if local is None:
        return None
    return pb.Rewire(
        kind=pb.Rewire.LISTENER if flow.listens else pb.Rewire.OWN,
        family=flow.family,
        old_local=_endpoint(flow.local),
        new_local=_endpoint(flow.local.at(local)),
        old_remote=_endpoint(flow.remote) if flow.remote else None,
        new_remote=_endpoint(flow.remote) if flow.remote else None,
    )


def _inside(flow: Flow, places: Places) -> pb.Rewire | None:
    old_local, old_remote = flow.endpoints
    local, remote = _moved(old_local, places), _moved(old_remote, places)
    if local is None or remote is None:
        return None
    return _rewire(pb.Rewire.INSIDE, flow, local, remote, "")


def _outward(flow: Flow, places: Places) -> pb.Rewire | None:
    _, far = flow.endpoints
    if far.loopback:  # to a process that stays on the source: both sockets get real addresses
        real = places.real_endpoints(far.version)
        return _rewire(pb.Rewire.PEER, flow, *real, places.source) if real else None
    local = _moved(flow.local, places)
    if local is None:
        return None
    peer = places.node_of(far.ip)
    return _rewire(pb.Rewire.PEER if peer else pb.Rewire.OUTSIDE, flow, local, far.ip, peer or "")


def _moved(address: Address, places: Places) -> str | None:
    """The target's address for one of the source's; loopback and wildcard addresses stay."""
    return address.ip if address.loopback or address.wildcard else places.counterpart(address.ip)


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
    )


def _endpoint(address: Address) -> pb.Endpoint:
    return pb.Endpoint(ip=address.ip, port=address.port)


def _plain(addresses: Sequence[str]) -> set[str]:
    return {text.partition("/")[0] for text in addresses}
