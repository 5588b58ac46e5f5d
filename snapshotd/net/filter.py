"""Keeps flows silent while a move lasts: their packets vanish, on every node that can see them.

A flow is held from before its rank is frozen until both of its ends point at each other again. Nobody has to live for
that: the table is the kernel's, named by the move, and `tables` finds it after any crash. A flow whose packets vanish is
to TCP a bad network, nothing more: what was sent is sent again, and the flow goes on by itself soon after its release.

New connections to a listener of the rank are held too (`hold_listeners`): a frozen copy's kernel would go on completing
handshakes for it, and whoever was let in would be lost with the copy. A SYN that vanishes is sent again after a second,
and then finds `forward` in force.

Invariant: a packet of a held flow neither leaves this node nor reaches a socket here, whatever its flags (a RST least of
all), and no error is reported to anyone. Connection tracking is not needed and sees nothing of a held flow: the drops are
at raw priority, before it. The price is that addresses are those of the wire: an end that is reached through `forward`
is held by two pairs, the one its socket has and the one on the wire (see snapshotd/net/tracking.py).

All functions are idempotent and take a pair in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.api.errors import Internal
from snapshotd.moves.journal import MOVE_ID, check_move_id
from snapshotd.net import nft
from snapshotd.net.flows import Address, Pair

# One rule for a thousand flows: a look-up in a hash table of (source, port, destination, port) for either family.
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
    """From the return on, no packet of these flows passes. More calls add to what the move already holds."""
    table = _table(move)
    nft.apply(_made(table) + _change("add", table, _flows(pairs)))


def release(move: str, pairs: Iterable[Pair]) -> None:
    """Lets these flows go on, both directions at one instant; those that are not held are passed over."""
    _take_away(_table(move), _flows(pairs))


def hold_listeners(move: str, addresses: Iterable[Address]) -> None:
    """From the return on, no new connection to these addresses begins; flows that exist are not concerned.

    On the node that has them and on those that call, with the addresses that callers use: a wildcard is none of these.
    """
    table = _table(move)
    nft.apply(_made(table) + _change("add", table, _listeners(addresses)))


def release_listeners(move: str, addresses: Iterable[Address]) -> None:
    """Undoes `hold_listeners`; `forward` comes first, or the next SYN finds nobody and is refused."""
    _take_away(_table(move), _listeners(addresses))


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


def check_support() -> None:
    """Raises NotSupported unless flows can be held here; leaves nothing behind. For preflight."""
    table = nft.PREFIX + "probe"
    nft.probe(_made(table) + f"delete table inet {table}\n")


def _table(move: str) -> str:
    return nft.PREFIX + check_move_id(move)


def _made(table: str) -> str:
    """The commands that make the table, or leave it as it is; its rules are written anew either way."""
    rules = "".join(_RULES.format(table=table, chain=chain) for chain in ("arriving", "leaving"))
    return _TABLE.format(table=table) + rules


def _take_away(table: str, elements: dict[str, list[str]]) -> None:
    # Added first, because the kernel refuses to remove what is not there, and asking before would be a race.
    commands = _change("add", table, elements) + _change("delete", table, elements)
    if commands:
        nft.apply_where_there(commands)


def _change(verb: str, table: str, elements: dict[str, list[str]]) -> str:
    return "".join(f"{verb} element inet {table} {name} {nft.braces(kept)}\n" for name, kept in elements.items())


def _flows(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """Both directions of each pair, by the set they belong in."""
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
            raise Internal(f"{address} is where a socket listens, not what anybody calls")
        found.setdefault(f"listeners{address.version}", set()).add(f"{address.ip} . {address.port}")
    return {name: sorted(kept) for name, kept in found.items()}
