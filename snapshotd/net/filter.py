"""Drops all packets of a rank's connections during a move, on every node that can see them.

A flow is held from before its rank is frozen until both of its sockets have each other's addresses again. That does not
depend on any process: the table is in the kernel, named after the move, and `tables` finds it after a crash. To TCP
dropped packets are a bad network: they are retransmitted, and the flow continues by itself soon after its release.

New connections to a listener of the rank are held too (`hold_listeners`): the kernel would complete handshakes for a frozen
copy, and those connections would be lost with it. A dropped SYN is sent again after a second, and is then redirected by
`forward`.

Invariant: a packet of a held flow neither leaves this node nor reaches a socket here, whatever its flags (RST above all), and
no error is reported to either side. Connection tracking is not needed and does not see a held flow: packets are dropped at
raw priority, before it. The price is that addresses are those on the wire: a socket that is reached through `forward` is held
by two pairs, the one the socket has and the one on the wire (see snapshotd/net/tracking.py).

All functions are idempotent and take a pair in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.api.errors import Internal
from snapshotd.moves.journal import MOVE_ID, check_move_id
from snapshotd.net import nft
from snapshotd.net.flows import Address, Pair

# One rule for any number of flows: a hash table of (source, port, destination, port) for each family.
_TABLE = """
add table inet {table}
add set inet {table} v4 {{ type ipv4_addr . inet_service . ipv4_addr . inet_service ; }}
add set inet {table} v6 {{ type ipv6_addr . inet_service . ipv6_addr . inet_service ; }}
add set inet {table} listeners4 {{ type ipv4_addr . inet_service ; }}
add set inet {table} listeners6 {{ type ipv6_addr . inet_service ; }}
add chain inet {table} arriving {{ type filter hook prerouting priority -300 ; policy accept ; }}
add chain inet {table} leaving {{ type filter hook output priority -300 ; policy accept ; }}
flush chain inet {table} arriving
flush chain inet {table} leaving
"""
_RULES = """
add rule inet {table} {chain} ip saddr . tcp sport . ip daddr . tcp dport @v4 drop
add rule inet {table} {chain} ip6 saddr . tcp sport . ip6 daddr . tcp dport @v6 drop
add rule inet {table} {chain} tcp flags & (fin | syn | rst | ack) == syn ip daddr . tcp dport @listeners4 drop
add rule inet {table} {chain} tcp flags & (fin | syn | rst | ack) == syn ip6 daddr . tcp dport @listeners6 drop
"""
_FAMILIES = {4: "v4", 6: "v6"}


def hold(move: str, pairs: Iterable[Pair]) -> None:
    """When this returns, no packet of these flows passes. Further calls add to what the move already holds."""
    table = _table(move)
    nft.apply(_made(table) + _change("add", table, _flows(pairs)))


def release(move: str, pairs: Iterable[Pair]) -> None:
    """Releases these flows, both directions in one transaction; those that are not held are ignored."""
    _remove(_table(move), _flows(pairs))


def hold_listeners(move: str, addresses: Iterable[Address]) -> None:
    """When this returns, no new connection to these addresses can begin; existing flows are not affected.

    To be called on the node of the listener and on those of its clients, with the addresses that clients use, so never with
    a wildcard. The move's `drop_table` ends it. `forward` comes first, or the next SYN finds no listener and is refused.
    """
    table = _table(move)
    nft.apply(_made(table) + _change("add", table, _listeners(addresses)))


def drop_table(move: str) -> None:
    """Releases everything that the move holds, and removes its table."""
    nft.drop_table(_table(move).removeprefix(nft.PREFIX))


def tables() -> list[str]:
    """The moves that hold flows on this node: read when a daemon starts."""
    return [name for name in nft.tables() if MOVE_ID.fullmatch(name)]


def held(move: str) -> set[Pair]:
    """What a move holds on this node; every flow is listed twice, once in each direction."""
    name = _table(move).removeprefix(nft.PREFIX)
    found: set[Pair] = set()
    for family in _FAMILIES.values():
        for element in nft.elements(name, family):
            source, source_port, destination, destination_port = element["concat"]
            found.add((Address(source, source_port), Address(destination, destination_port)))
    return found


def check_support() -> None:
    """Raises NotSupported unless flows can be held on this node; leaves nothing behind. For preflight."""
    table = nft.PREFIX + "probe"
    nft.probe(_made(table) + f"delete table inet {table}\n")


def _table(move: str) -> str:
    return nft.PREFIX + check_move_id(move)


def _made(table: str) -> str:
    """The commands that create the table if it does not exist, and rewrite its rules."""
    rules = "".join(_RULES.format(table=table, chain=chain) for chain in ("arriving", "leaving"))
    return _TABLE.format(table=table) + rules


def _remove(table: str, elements: dict[str, list[str]]) -> None:
    # Added first, because the kernel refuses to remove a missing element, and checking before would be a race.
    commands = _change("add", table, elements) + _change("delete", table, elements)
    if commands:
        nft.apply_where_there(commands)


def _change(verb: str, table: str, elements: dict[str, list[str]]) -> str:
    return "".join(f"{verb} element inet {table} {name} {nft.braces(kept)}\n" for name, kept in elements.items())


def _flows(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """Both directions of each pair, by the set they belong to."""
    found: dict[str, set[str]] = {}
    for here, there in pairs:
        if here.version != there.version:
            raise Internal(f"a flow has one address family: {here} and {there}")
        for a, b in ((here, there), (there, here)):
            found.setdefault(_FAMILIES[here.version], set()).add(f"{a.ip} . {a.port} . {b.ip} . {b.port}")
    return {name: sorted(kept) for name, kept in found.items()}


def _listeners(addresses: Iterable[Address]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for address in addresses:
        if address.wildcard:
            raise Internal(f"{address} is an address to listen on, not one that clients connect to")
        found.setdefault(f"listeners{address.version}", set()).add(f"{address.ip} . {address.port}")
    return {name: sorted(kept) for name, kept in found.items()}
