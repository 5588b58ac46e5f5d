"""Checks of sockets that are not TCP's; connections and listeners are looked at by snapshotd/moves/peers/connections.py."""

from __future__ import annotations

import os

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.look import Look
from snapshotd.preflight.objects import Object, is_carried
from snapshotd.preflight.outsiders import find_outsiders
from snapshotd.preflight.sockets import inode_of, unix_names, unix_peers
from snapshotd.preflight.verdict import listed, passed, refused, warned


def _holder(thing: Object) -> str:
    process, number = next(iter(thing.holders.items()))
    return f"{process} fd {number}"


def other_sockets(look: Look) -> Check:
    found = [f"{_holder(thing)}: {protocol}" for thing, protocol in look.sockets["other"]]
    if found:
        return refused(
            "other-sockets", f"sockets of a kind that cannot be moved: {listed(found)}", "close them before the move"
        )
    netlink = len(look.sockets["netlink"])
    return passed("other-sockets", f"{netlink} netlink sockets, which CRIU opens again" if netlink else "none")


def unix_sockets(look: Look, *, thorough: bool = True) -> Check:
    """Unix sockets move when both ends do. `thorough` also looks for outsiders that inherited one of them."""
    ours = {inode_of(thing): thing for thing, _ in look.sockets["unix"]}
    if not ours:
        return passed("unix-sockets", "none")
    peers = unix_peers(look.root_pid)
    away = {inode: peers[inode] for inode in ours if inode in peers and peers[inode] not in ours}
    links = {f"socket:[{inode}]" for inode in [*away.values(), *(ours if thorough else ())]}
    holders = find_outsiders(look.inside, links, ()) if links else {}
    names = unix_names(look.root_pid) if away else {}
    found = []
    for inode, peer in away.items():
        who = holders.get(f"socket:[{peer}]")
        name = names.get(peer) or names.get(inode) or "an unnamed socket"
        found.append(f"{_holder(ours[inode])} → {name} of {who[0].process if who else 'nobody that can be found'}")
    inherited = [(thing, holders.get(thing.link)) for thing in ours.values()] if thorough else []
    found += [f"{_holder(thing)}, also held by {who[0].process}" for thing, who in inherited if who]
    if found:
        return refused(
            "unix-sockets",
            f"unix sockets to processes outside the rank: {listed(found)}",
            "close them before the move (a syslog handler, a database or agent on the node)",
        )
    return _bound(look, len(ours))


def _bound(look: Look, count: int) -> Check:
    paths = [name for name in look.bound_names if name.startswith("/")]
    local = sorted({path for path in paths if not is_carried(path, look.carry_paths)})
    relative = sorted({name for name in look.bound_names if not name.startswith(("/", "@"))})
    if local or relative:
        return warned(
            "unix-sockets",
            f"bound to {listed(local + relative)}: clients outside the rank will not find it after the move",
            "bind sockets that only the job uses under /tmp or as abstract names",
        )
    folders = f", bound under {listed(sorted({os.path.dirname(path) for path in paths}))}" if paths else ""
    return passed("unix-sockets", f"{count}, all between processes of the rank{folders}")
