"""Redirects new connections from a rank's former addresses to its present one.

For each rank that has moved, every node of its job has a table `inet snapshotd-fwd-UID` with a map from each address the rank
ever listened on to the present one. A SYN that a process of this node sends to such an address is redirected (DNAT, output
hook). So is one that arrives from a host without a daemon, if this node forwards packets at all. The table is in the kernel:
it outlives the daemon, and is removed by `forget` or with the node.

Invariants: only SYNs are translated, so existing and re-pointed flows are never affected. A rank's map is replaced in one
transaction: a SYN never meets a partial map. Loopback addresses are translated for processes of the rank's own user alone.

A SYN to a former address that is not translated is refused. The daemon holds the rank's former ports on this node
(snapshotd/net/held_ports.py), and such a SYN must not find its sockets.

Loopback (127.0.0.1, ::1) needs more, because the kernel keeps such addresses off the wire. The source becomes this node's own
address (masquerade), and the answers, once translated back, must be accepted: by `route_localnet` of the interface for IPv4,
by a second local route to ::1 through it for IPv6. What `route_localnet` would open to the neighbours is closed by a rule
that drops loopback addresses which arrive from the wire. Both are undone with the last rank that needs them.

A translated connection has two pairs of addresses: the socket's, with the old address, and the one on the wire. Holding or
re-pointing it needs both, and its tracking entry must be removed: see snapshotd/net/tracking.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from snapshotd.api.errors import Internal
from snapshotd.keepers.ranks import check_rank_uid
from snapshotd.net import nft
from snapshotd.net.flows import Address
from snapshotd.net.loopback import close_loopback, interface_towards, loopback_is_open, open_loopback

_KIND = "fwd-"
_FAMILIES = {4: ("v4", "ip", "ipv4_addr"), 6: ("v6", "ip6", "ipv6_addr")}
_LOOPBACK = {4: "127.0.0.0/8", 6: "::1"}
_SYN = "tcp flags & (fin | syn | rst | ack) == syn"

# Protects the list of opened interfaces in the tables together with the state of the interfaces.
_changing = threading.Lock()


def forward(rank_uid: str, addresses: Mapping[Address, Address], user_id: int | None = None) -> None:
    """When this returns, new connections to each key go to its value. Replaces the previous map of this rank.

    Loopback keys belong in the map of one node alone, the one whose processes used them for this rank; they need the
    rank's user. An empty map is `forget`. Raises NotSupported, with nothing changed, if the kernel cannot translate.
    """
    wanted = {old: new for old, new in addresses.items() if old != new}
    for old, new in wanted.items():
        if old.version != new.version or old.wildcard or new.wildcard or new.loopback or not (old.port and new.port):
            raise Internal(f"connections to {old} cannot be forwarded to {new}")
        if old.loopback and user_id is None:
            raise Internal(f"connections to {old} cannot be forwarded: the user of rank {rank_uid} is not known")
    if not wanted:
        forget(rank_uid)
        return
    table = nft.PREFIX + _name(rank_uid)
    with _changing:
        interfaces = {interface_towards(new.ip) for old, new in wanted.items() if old.loopback} - {"lo"}
        before = _opened()
        # Already open, but not by this product: it must not be closed here.
        ours = {found for found in interfaces if found in before or not loopback_is_open(found)}
        # The rule that guards an interface exists before it is opened and until it is closed, also across a crash.
        closing = before - ours - _opened(but=rank_uid)
        for interface in sorted(closing):
            close_loopback(interface)
        try:
            nft.apply(_rules(table, wanted, ours, user_id))
        except nft.NftFailed:
            for interface in sorted(closing):
                open_loopback(interface)
            check_support()  # raises NotSupported if that is the reason
            raise
        for interface in sorted(interfaces):
            open_loopback(interface)


def forget(rank_uid: str) -> None:
    """Stops forwarding for this rank. Idempotent."""
    with _changing:
        for interface in sorted(_opened() - _opened(but=rank_uid)):
            close_loopback(interface)
        nft.drop_table(_name(rank_uid))


def listed() -> dict[str, dict[Address, Address]]:
    """All forwardings of this node: rank uid -> map."""
    return {uid: forwarded(uid) for uid in _listed()}


def forwarded(rank_uid: str) -> dict[Address, Address]:
    """The map that `forward` last set for this rank; empty if nothing is forwarded."""
    found: dict[Address, Address] = {}
    for name, _, _ in _FAMILIES.values():
        for kind in (name, f"{name}-loopback"):
            for old, new in nft.elements(_name(rank_uid), kind, "map"):
                found[Address(*old["concat"])] = Address(*new["concat"])
    return found


def collapse(addresses: Mapping[Address, Address], moved: Mapping[Address, Address]) -> dict[Address, Address]:
    """The map after one more move (`moved`: present listening address -> next one): every former address maps directly to the
    newest, and an address to which the rank has returned is not mapped."""
    latest = {old: moved.get(new, new) for old, new in addresses.items()} | dict(moved)
    return {old: new for old, new in latest.items() if old != new}


def check_support() -> None:
    """Raises NotSupported unless this kernel can forward; leaves nothing behind. For preflight."""
    table = nft.PREFIX + "probe"
    example = {Address("127.0.0.1", 1): Address("192.0.2.1", 1), Address("::1", 1): Address("2001:db8::1", 1)}
    nft.probe(_rules(table, example, set(), 0) + f"delete table inet {table}\n")


# ---------------------------------------------------------------- rules


def _rules(table: str, addresses: Mapping[Address, Address], opened: set[str], user_id: int | None) -> str:
    """One transaction that creates the table, or replaces it."""
    lines = [
        f"add table inet {table}",
        f"delete table inet {table}",
        f"add table inet {table}",
        f"add set inet {table} opened {{ type ifname ; }}",
        f"add chain inet {table} guard {{ type filter hook prerouting priority -300 ; policy accept ; }}",
        f"add rule inet {table} guard iifname @opened ip daddr 127.0.0.0/8 drop",
        f"add rule inet {table} guard iifname @opened ip saddr 127.0.0.0/8 drop",
        f"add chain inet {table} leaving {{ type nat hook output priority -100 ; policy accept ; }}",
        f"add chain inet {table} arriving {{ type nat hook prerouting priority -100 ; policy accept ; }}",
        f"add chain inet {table} sources {{ type nat hook postrouting priority 100 ; policy accept ; }}",
        f"add chain inet {table} refusing {{ type filter hook input priority 0 ; policy accept ; }}",
    ]
    lines += [f'add element inet {table} opened {{ "{name}" }}' for name in sorted(opened)]
    for version, (name, prefix, kind) in _FAMILIES.items():
        chosen = {old: new for old, new in addresses.items() if old.version == version}
        if not chosen:
            continue
        former = [f"{old.ip} . {old.port}" for old in chosen]
        reached = sorted({f"{new.ip} . {new.port}" for new in chosen.values()})
        lines += [
            f"add set inet {table} {name}-former {{ type {kind} . inet_service ; }}",
            f"add set inet {table} {name}-reached {{ type {kind} . inet_service ; }}",
            f"add element inet {table} {name}-former {nft.braces(former)}",
            f"add element inet {table} {name}-reached {nft.braces(reached)}",
            f"add rule inet {table} refusing {prefix} daddr . tcp dport @{name}-former {_SYN} reject with tcp reset",
        ]
        for loopback in (False, True):
            entries = [
                f"{old.ip} . {old.port} : {new.ip} . {new.port}"
                for old, new in chosen.items()
                if old.loopback is loopback
            ]
            if not entries:
                continue
            mapped = f"{name}-loopback" if loopback else name
            translate = f"{_SYN} dnat {prefix} to {prefix} daddr . tcp dport map @{mapped}"
            lines += [
                f"add map inet {table} {mapped} {{ type {kind} . inet_service : {kind} . inet_service ; }}",
                f"add element inet {table} {mapped} {nft.braces(entries)}",
                f"add rule inet {table} leaving {f'meta skuid {user_id} ' if loopback else ''}{translate}",
            ]
            # If the kernel forwards nothing, a refused connection is better than no answer.
            if not loopback and _forwards_packets(version):
                lines.append(f"add rule inet {table} arriving {translate}")
        # A loopback or foreign source address becomes this node's own: the answer must return here to be translated.
        ours = f'{prefix} daddr . tcp dport @{name}-reached ct status dnat oifname != "lo"'
        lines += [
            f"add rule inet {table} sources {ours} {prefix} saddr {_LOOPBACK[version]} masquerade",
            f"add rule inet {table} sources {ours} fib saddr type != local masquerade",
        ]
    return "\n".join(lines) + "\n"


def _forwards_packets(version: int) -> bool:
    setting = {4: "ipv4/ip_forward", 6: "ipv6/conf/all/forwarding"}[version]
    try:
        return Path("/proc/sys/net", setting).read_text().strip() != "0"
    except FileNotFoundError:  # a kernel without IPv6
        return False


# ---------------------------------------------------------------- names


def _name(rank_uid: str) -> str:
    return _KIND + check_rank_uid(rank_uid)


def _listed() -> list[str]:
    return [name.removeprefix(_KIND) for name in nft.tables() if name.startswith(_KIND)]


def _opened(but: str = "") -> set[str]:
    """The interfaces opened to loopback addresses, according to the tables of all ranks `but` one."""
    tables = (_name(uid) for uid in _listed() if uid != but)
    return {str(found) for table in tables for found in nft.elements(table, "opened")}
