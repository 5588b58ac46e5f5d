"""Checks of sockets other than TCP and UDP, which snapshotd/moves/peers/connections.py checks."""

from __future__ import annotations

import os

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.objects import Object, is_carried
from snapshotd.preflight.outsiders import find_outsiders
from snapshotd.preflight.sockets import inode_of
from snapshotd.preflight.verdict import listed, passed, refused, warned


def _holder(thing: Object) -> str:
    process, number = next(iter(thing.holders.items()))
    return f"{process} fd {number}"


def other_sockets(rank: Inspection) -> Check:
    found = [f"{_holder(thing)}: {protocol}" for thing, protocol in rank.sockets["other"]]
    if found:
        return refused(
            "other-sockets", f"the rank has sockets that cannot be moved: {listed(found)}", "close them before the move"
        )
    netlink = len(rank.sockets["netlink"])
    return passed("other-sockets", f"{netlink} netlink sockets, which CRIU opens again" if netlink else "none")


def unix_sockets(rank: Inspection, *, thorough: bool = True) -> Check:
    """A unix socket can be moved together with its peer. `thorough` also finds outside processes that inherited one."""
    ours = {inode_of(thing): thing for thing, _ in rank.sockets["unix"]}
    if not ours:
        return passed("unix-sockets", "none")
    peers, names = rank.unix.peers, rank.unix.names
    away = {inode: peers[inode] for inode in ours if inode in peers and peers[inode] not in ours}
    links = {f"socket:[{inode}]" for inode in [*away.values(), *(ours if thorough else ())]}
    holders = find_outsiders(rank.inside, links, ()) if links else {}
    found = []
    for inode, peer in away.items():
        outside = holders.get(f"socket:[{peer}]")
        name = names.get(peer) or names.get(inode) or "an unnamed socket"
        found.append(f"{_holder(ours[inode])} → {name} of {outside[0].process if outside else 'an unknown process'}")
    inherited = [(thing, holders.get(thing.link)) for thing in ours.values()] if thorough else []
    found += [f"{_holder(thing)}, also open in {outside[0].process}" for thing, outside in inherited if outside]
    if found:
        return refused(
            "unix-sockets",
            f"the rank has unix sockets that are connected to processes outside it: {listed(found)}",
            "close them before the move; typical ones lead to syslog, a database or an agent on the node",
        )
    return _bound(rank, len(ours))


def _bound(rank: Inspection, count: int) -> Check:
    paths = [name for name in rank.bound_names if name.startswith("/")]
    local = sorted({path for path in paths if not is_carried(path, rank.carry_paths)})
    relative = sorted({name for name in rank.bound_names if not name.startswith(("/", "@"))})
    if local or relative:
        return warned(
            "unix-sockets",
            f"sockets are bound to {listed(local + relative)}: processes outside the rank cannot reach them after the move",
            "bind sockets that only the job uses under /tmp, or to abstract names",
        )
    folders = f", bound under {listed(sorted({os.path.dirname(path) for path in paths}))}" if paths else ""
    return passed("unix-sockets", f"{count}, all between processes of the rank{folders}")
