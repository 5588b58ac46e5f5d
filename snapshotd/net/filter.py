"""Keeps flows silent while a move lasts: their packets vanish, on every node that can see them.

A flow is held from before its rank is frozen until both of its ends point at each other again. Nobody has to live for
that: the table is the kernel's, named by the move, and `tables` finds it after any crash. A flow whose packets vanish is
to TCP a bad network, nothing more: what was sent is sent again, and the flow goes on by itself soon after its release.

Invariant: a packet of a held flow neither leaves this node nor reaches a socket here, whatever its flags (a RST least of
all), and no error is reported to anyone. Connection tracking is not needed and sees nothing of a held flow: the drops are
at raw priority, before it. The price is that addresses are those of the wire: an end that is reached through `forward`
is held by two pairs, the one its socket has and the one on the wire (see snapshotd/net/tracking.py).

All functions are idempotent and take a pair in either direction.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TypeAlias

from snapshotd.api.errors import Internal
from snapshotd.journal import MOVE_ID
from snapshotd.net import nft
from snapshotd.net.flows import Address

Pair: TypeAlias = tuple[Address, Address]

# One rule for a thousand flows: a look-up in a hash table of (source, port, destination, port) for either family.
_TABLE = """
add table inet {table}
add set inet {table} v4 {{ type ipv4_addr . inet_service . ipv4_addr . inet_service ; }}
add set inet {table} v6 {{ type ipv6_addr . inet_service . ipv6_addr . inet_service ; }}
add chain inet {table} arriving {{ type filter hook prerouting priority -300 ; policy accept ; }}
add chain inet {table} leaving {{ type filter hook output priority -300 ; policy accept ; }}
flush chain inet {table} arriving
flush chain inet {table} leaving
"""
_RULES = """
add rule inet {table} {chain} ip saddr . tcp sport . ip daddr . tcp dport @v4 drop
add rule inet {table} {chain} ip6 saddr . tcp sport . ip6 daddr . tcp dport @v6 drop
"""
_FAMILIES = {4: "v4", 6: "v6"}


def hold(move: str, pairs: Iterable[Pair]) -> None:
    """From the return on, no packet of these flows passes. More calls add to what the move already holds."""
    table = _table(move)
    commands = _TABLE.format(table=table)
    commands += _RULES.format(table=table, chain="arriving") + _RULES.format(table=table, chain="leaving")
    nft.apply(commands + _change("add", table, pairs))


def release(move: str, pairs: Iterable[Pair]) -> None:
    """Lets these flows go on, both directions at one instant; those that are not held are passed over."""
    table = _table(move)
    chosen = list(pairs)
    # Added first, because the kernel refuses to remove what is not there, and asking before would be a race.
    commands = _change("add", table, chosen) + _change("delete", table, chosen)
    if commands:
        nft.apply_where_there(commands)


def drop_table(move: str) -> None:
    """Lets go everything the move holds; nothing is left of it."""
    nft.drop_table(_table(move).removeprefix(nft.PREFIX))


def tables() -> list[str]:
    """The moves that hold flows on this node: what a daemon looks at when it starts."""
    return [name for name in nft.tables() if MOVE_ID.fullmatch(name)]


def held(move: str) -> set[Pair]:
    """What a move holds on this node; every flow is there twice, once in each direction."""
    name = _table(move).removeprefix(nft.PREFIX)
    found: set[Pair] = set()
    for family in _FAMILIES.values():
        for element in nft.elements(name, family):
            source, source_port, destination, destination_port = element["concat"]
            found.add((Address(source, source_port), Address(destination, destination_port)))
    return found


def _table(move: str) -> str:
    if not MOVE_ID.fullmatch(move):
        raise Internal(f"{move!r} is no name of a move")
    return nft.PREFIX + move


def _change(verb: str, table: str, pairs: Iterable[Pair]) -> str:
    """The commands that add or delete both directions of each pair."""
    elements: dict[str, dict[str, None]] = {name: {} for name in _FAMILIES.values()}
    for here, there in pairs:
        versions = {ipaddress.ip_address(end.ip).version for end in (here, there)}
        if len(versions) != 1:
            raise Internal(f"a flow has one address family: {here.ip} and {there.ip}")
        kept = elements[_FAMILIES[versions.pop()]]
        for a, b in ((here, there), (there, here)):
            kept[f"{nft.literal(a.ip)} . {a.port:d} . {nft.literal(b.ip)} . {b.port:d}"] = None
    return "".join(
        f"{verb} element inet {table} {name} {nft.braces(kept)}\n" for name, kept in elements.items() if kept
    )
