"""Which address of the target replaces an address of the source. Pure: from the addresses of the cluster's nodes.

Two addresses are a pair if they are on the same network: `cluster.toml` names both as addresses of one, or they have the same
prefix, or, on a network with routers, the same interface name. Where that leaves several interfaces, the operator has to say
it: the wrong one may lead nowhere, or through a slow network.

An address that several nodes have (172.17.0.1 of Docker's bridge, for example) leads to another machine on each of them. It
neither replaces an address nor tells which node it belongs to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.net.flows import Flow


class Unclear(Exception):
    """It cannot be determined with certainty which address replaces another one; the text says why."""


@dataclass(frozen=True)
class _Own:
    """An address of a node."""

    at: ipaddress.IPv4Interface | ipaddress.IPv6Interface
    interface: str  # "": not known

    @property
    def ip(self) -> str:
        return str(self.at.ip)

    def __str__(self) -> str:
        return f"{self.ip} ({self.interface})" if self.interface else self.ip


@dataclass(frozen=True)
class Places:
    """The cluster's nodes by name, each with its addresses ("10.0.0.1/24"), and the source and target of the move."""

    nodes: Mapping[str, Sequence[str]]
    source: str
    target: str
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each address, in the same order
    networks: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # by node: network of cluster.toml -> address

    @classmethod
    def of(cls, nodes: Iterable[pb.NodeAddresses], source: str, target: str) -> Places:
        known = {node.name: node for node in nodes}
        return cls(
            {name: list(node.addresses) for name, node in known.items()},
            source,
            target,
            {name: list(node.interfaces) for name, node in known.items()},
            {name: dict(node.networks) for name, node in known.items()},
        )

    def owners(self, ip: str) -> list[str]:
        """The nodes that have this address."""
        return [name for name, addresses in self.nodes.items() if ip in {text.partition("/")[0] for text in addresses}]

    def node_of(self, ip: str) -> str | None:
        """The node that has this address; None: it is an address of no node. Raises Unclear if several have it."""
        owners = self.owners(ip)
        if len(owners) > 1:
            raise Unclear(f"{ip} is an address of several nodes: {', '.join(owners)}")
        return owners[0] if owners else None

    def is_outside(self, flow: Flow) -> bool:
        """Whether a connection leads to a host without a daemon."""
        far = flow.remote
        return far is not None and not far.loopback and not self.owners(far.ip)

    def usable(self, node: str, version: int | None = None) -> list[_Own]:
        """The addresses of a node that no other node has, in the node's own order."""
        addresses = self.nodes.get(node, ())
        interfaces = self.interfaces.get(node, ())
        named = interfaces if len(interfaces) == len(addresses) else [""] * len(addresses)
        found = [_Own(ipaddress.ip_interface(text), name) for text, name in zip(addresses, named, strict=True)]
        return [item for item in found if version in (None, item.at.version) and len(self.owners(item.ip)) == 1]

    def counterpart(self, ip: str) -> str:
        """The target's address that replaces `ip` of the source. Raises Unclear."""
        self.node_of(ip)
        if self.source == self.target:
            return ip
        if network := self._network_of(self.source, ip):
            return self._named(network, ip)
        version = ipaddress.ip_address(ip).version
        ours = self.usable(self.source, version)
        mine = next((item for item in ours if item.ip == ip), None)
        free = [item for item in self.usable(self.target, version) if not self._network_of(self.target, item.ip)]
        same_network = [item for item in free if mine and item.at.network == mine.at.network]
        # An address in the network of another address of the source replaces that one.
        others = {item.at.network for item in ours if item.ip != ip}
        candidates = same_network or [item for item in free if item.at.network not in others]
        interfaces = {item.interface for item in candidates}
        if mine and mine.interface and mine.interface in interfaces:
            return next(item.ip for item in candidates if item.interface == mine.interface)
        # Addresses of one interface are equivalent. Without a common network there must be no choice on either side.
        alone = bool(same_network) or len({item.interface for item in ours}) <= 1
        if len(interfaces) == 1 and alone:
            return candidates[0].ip
        raise Unclear(self._unclear(str(mine or ip), candidates))

    def _unclear(self, wanted: str, candidates: Sequence[_Own]) -> str:
        if not candidates:
            return f"{self.target} has no address that can replace {wanted} of {self.source}"
        listed = ", ".join(map(str, candidates[:5]))
        return f"it is not certain which address of {self.target} replaces {wanted} of {self.source}: {listed}"

    def real_endpoints(self, version: int) -> tuple[str, str]:
        """(target's, source's) address for a connection over the source's loopback: of the first network of cluster.toml,
        else of a common network if possible. Raises Unclear."""
        theirs = {item.ip: item.at.network for item in self.usable(self.target, version)}
        pairs: list[tuple[tuple[int, bool], str, str]] = []
        reasons = []
        networks = list(self.networks.get(self.source, ()))
        for item in self.usable(self.source, version):
            try:
                there = self.counterpart(item.ip)
            except Unclear as error:
                reasons.append(str(error))
                continue
            network = self._network_of(self.source, item.ip)
            place = networks.index(network) if network else len(networks)
            pairs.append(((place, theirs.get(there) != item.at.network), there, item.ip))
        if not pairs:
            fallback = f"{self.source} and {self.target} have no addresses of IPv{version} that only one node has"
            raise Unclear("; ".join(reasons[:3]) or fallback)
        _, there, here = min(pairs, key=lambda pair: pair[0])  # the first of equals: in the source's own order
        return there, here

    def _network_of(self, node: str, ip: str) -> str:
        return next((network for network, own in self.networks.get(node, {}).items() if own == ip), "")

    def _named(self, network: str, ip: str) -> str:
        found = self.networks.get(self.target, {}).get(network)
        if found is None:
            raise Unclear(
                f"cluster.toml names {ip} as the address of {self.source} in the network {network}, and none of"
                f" {self.target}"
            )
        if found not in {item.ip for item in self.usable(self.target)}:
            raise Unclear(
                f"cluster.toml names {found} as the address of {self.target} in the network {network}, and it is not an"
                " address of that node alone"
            )
        return found
