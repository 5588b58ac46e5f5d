"""The connections that `forward` has translated: their two pairs of addresses, and how to make the kernel forget one.

A translated connection is (here, old address) for the socket that made it, and (here, new address) on the wire and for the
rank. One made from a loopback address differs in both addresses. Connection tracking remembers it by the 4-tuple alone.
Once the socket has been re-pointed, or the rank has moved on, that entry is wrong and harmful: it would translate the
re-pointed flow again, or give it another port. Therefore such a socket is re-pointed to the real address, and `untrack` is
called before its flow is released. Undo points it to the real address too, never to the old one.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import (
    IPS_DST_NAT,
    IPS_SEEN_REPLY,
    IPS_SRC_NAT,
    NFCTAttrTuple,
    NFCTSocket,
)

from snapshotd.net.flows import Address, Pair
from snapshotd.net.nft import NotSupported


@dataclass(frozen=True)
class Translation:
    """A connection that was made through `forward`: (local, remote) of its client, as its socket has them and on the wire."""

    socket: Pair
    wire: Pair


def translations() -> list[Translation]:
    """Every translated TCP connection of this node; none without connection tracking."""
    found: list[Translation] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with _tracker(family) as tracker:
            found += _translated(tracker)
    return found


def untrack(pairs: Iterable[Pair]) -> None:
    """Makes the kernel forget the translation of these flows, named as the socket or as the wire has them. Idempotent.

    This cuts off a flow that is still in use under its old addresses: only for sockets that were re-pointed or closed.
    """
    wanted = {pair for local, remote in pairs for pair in ((local, remote), (remote, local))}
    for known in translations():
        if known.socket not in wanted and known.wire not in wanted:
            continue
        family = socket.AF_INET if known.socket[0].version == 4 else socket.AF_INET6
        with _tracker(family) as tracker:
            _delete(tracker, family, known.socket)


def untrack_calls(present: Mapping[Address, Address]) -> None:
    """Makes the kernel forget every unanswered SYN to a key that was not sent to its value: the client's next one is then
    translated by the present rules of `forward`, not sent where the first one went. Connections are not affected.

    An unanswered SYN that went to the right place stays: it may be answered before its entry is removed, and removing the
    entry of a connection breaks it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with _tracker(family) as tracker:
            try:
                for entry in list(tracker.dump()):
                    made, answered = (_ends(entry.get_attr(name)) for name in ("CTA_TUPLE_ORIG", "CTA_TUPLE_REPLY"))
                    if not made or not answered or entry.get_attr("CTA_STATUS") & IPS_SEEN_REPLY:
                        continue
                    if present.get(made[1], answered[0]) != answered[0]:
                        _delete(tracker, family, made)
            except NetlinkError as error:
                raise NotSupported(f"tracked connections cannot be read (CONFIG_NF_CT_NETLINK): {error}") from error


def _delete(tracker: Any, family: int, made: Pair) -> None:
    local, remote = made
    endpoints = {"saddr": local.ip, "sport": local.port, "daddr": remote.ip, "dport": remote.port}
    try:
        tracker.entry("del", tuple_orig=NFCTAttrTuple(family=family, proto=socket.IPPROTO_TCP, **endpoints))
    except NetlinkError as error:
        if error.code != errno.ENOENT:  # it ended in the meantime
            raise NotSupported(f"an entry of connection tracking cannot be removed: {error}") from error


def _tracker(family: int) -> Any:
    try:
        return NFCTSocket(nfgen_family=family)
    except (NetlinkError, OSError) as error:
        raise NotSupported(f"tracked connections cannot be read (CONFIG_NF_CT_NETLINK): {error}") from error


def _translated(tracker: Any) -> Iterator[Translation]:
    try:
        for entry in tracker.dump():
            if not entry.get_attr("CTA_STATUS") & (IPS_SRC_NAT | IPS_DST_NAT):
                continue
            made, answered = (_ends(entry.get_attr(name)) for name in ("CTA_TUPLE_ORIG", "CTA_TUPLE_REPLY"))
            if made and answered:
                yield Translation(socket=made, wire=(answered[1], answered[0]))
    except NetlinkError as error:
        raise NotSupported(f"tracked connections cannot be read (CONFIG_NF_CT_NETLINK): {error}") from error


def _ends(packet: Any) -> Pair | None:
    """(source, destination) of a tracked direction; None if it is not TCP."""
    protocol, ip = packet.get_attr("CTA_TUPLE_PROTO"), packet.get_attr("CTA_TUPLE_IP")
    if protocol.get_attr("CTA_PROTO_NUM") != socket.IPPROTO_TCP:
        return None
    version = "V4" if ip.get_attr("CTA_IP_V4_SRC") else "V6"
    source, destination = ip.get_attr(f"CTA_IP_{version}_SRC"), ip.get_attr(f"CTA_IP_{version}_DST")
    ports = protocol.get_attr("CTA_PROTO_SRC_PORT"), protocol.get_attr("CTA_PROTO_DST_PORT")
    return Address(source, ports[0]), Address(destination, ports[1])
