"""Handles the rank's own sockets during a move: finds them on the source, filters their packets, rewrites them in the image.

Invariant: from the freeze until the outcome no packet of the rank's connections enters or leaves the node that has a copy.
A copy is silenced before it is dropped, so that no peer sees a close: the connections continue elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, Usage, Where
from snapshotd.criu import inet
from snapshotd.criu.inet import Endpoints
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.peers import new_connections
from snapshotd.moves.record_parts import ClusterNode, SocketOptions
from snapshotd.net import filter as packets
from snapshotd.net import forward, held_ports, orphans, refusals, repair, repoint, sockets, timers
from snapshotd.net import reset as sockets_reset
from snapshotd.net.address_plan import plan
from snapshotd.net.flows import Address, BadAddress, Flow, Holder, Pair
from snapshotd.net.places import Places
from snapshotd.proc import nccl_ras, tree

log = logging.getLogger(__name__)


#: How long a connection that is opening or closing may take to settle.
SETTLE_S = 1.0
NAME_THE_NETWORK = (
    "have the job use addresses that its node alone has, and name the networks of the nodes in cluster.toml"
    " ([nodes.NAME.networks])"
)


def look(pids: Sequence[int], places: Places) -> tuple[list[pb.Rewire], list[pb.Check]]:
    """The rewirings of the rank's sockets, and the checks of preflight on them. Never raises; blocking."""
    rewires, checks, _ = _look(pids, places, moves=_moves)
    return rewires, checks


def _moves(flow: Flow) -> bool:
    """Not a socket of NCCL's RAS, which is closed before the freeze: every node may have one at the same port."""
    return not (flow.listens and any(nccl_ras.waits_at(holder.pid, flow.local.port) for holder in flow.holders))


def _look(
    pids: Sequence[int], places: Places, moves: Callable[[Flow], bool] = lambda _: True
) -> tuple[list[pb.Rewire], list[pb.Check], list[Flow]]:
    try:
        flows, found = _settled(pids, places)
        flows = [flow for flow in flows if moves(flow)]
        rewires, unclear = plan(flows, places)
    except (OSError, ValueError) as error:
        return [], [_check("connections", f"the sockets could not be looked at: {error}", "try again")], []
    wrong = [str(problem) for problem in found]
    checks = [
        _check(
            "connections", "; ".join(wrong[:5]), "close it, or try again in a moment: one that opens or closes settles"
        )
        if wrong
        else pb.Check(name="connections", reason=_count(rewires))
    ]
    if unclear:
        checks.append(_check("new-addresses", "; ".join(unclear[:5]), NAME_THE_NETWORK))
    outside = [
        f"{rewire.old_remote.ip}:{rewire.old_remote.port}" for rewire in rewires if rewire.kind == pb.Rewire.OUTSIDE
    ]
    if outside:
        checks.append(
            pb.Check(
                name="outside-world",
                verdict=pb.Check.WARN,
                reason=f"these hosts run no daemon: {', '.join(sorted(set(outside))[:10])}",
                remedy="the job sees a reset there and has to connect again",
            )
        )
    inner = sorted(
        f"{rewire.old_local.ip}:{rewire.old_local.port}"
        for rewire in rewires
        if rewire.kind == pb.Rewire.LISTENER and _of_one_node(rewire)
    )
    if inner:
        checks.append(
            pb.Check(
                name="loopback-listeners",
                verdict=pb.Check.WARN,
                reason=f"these are reached from the rank's own node alone: {', '.join(inner[:10])}",
                remedy="new connections to them work inside the rank and on its new node, not from the node it leaves",
            )
        )
    return rewires, checks, flows


def _settled(pids: Sequence[int], places: Places) -> tuple[list[Flow], list[refusals.Problem]]:
    """The rank's sockets and the problems with them. Waits for up to SETTLE_S while all problems are transient.

    A connection to a host without a daemon is reset in the move, so it may be half closed: pools of HTTP clients keep such
    ones for hours. Another one that the peer has closed moves; the peer's node refuses it if a process there still has it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        flows = sockets.tree_flows(pids)
        inside = {flow.endpoints for flow in flows if flow.connected}
        found = [
            problem
            for problem in refusals.problems(flows)
            if not (problem.half_closed and _may_be_half_closed(problem.flow, places, inside))
        ]
        if not found or not all(problem.passing for problem in found) or time.monotonic() > deadline:
            return flows, found
        time.sleep(0.01)


def _may_be_half_closed(flow: Flow, places: Places, inside: Collection[Pair]) -> bool:
    return places.is_outside(flow) or (flow.reads_end and flow.mirrored() not in inside)


def examine(rewires: Iterable[pb.Rewire], rank_uid: str) -> list[pb.Check]:
    """On the target: checks that the ports of the rank's listeners are free here. Blocking."""
    rewires = list(rewires)
    wanted = {rewire.new_local.port for rewire in rewires if rewire.kind == pb.Rewire.LISTENER}
    try:
        kept = [new_pair(rewire) for rewire in rewires if rewire.kind in (pb.Rewire.PEER, pb.Rewire.INSIDE)]
    except BadAddress as error:
        raise Usage(f"an address of the rank's connections is invalid: {error}") from error
    if not wanted and not kept:
        return []
    # Ports at which this same rank listened here before are held for it.
    held = held_ports.inodes(rank_uid)
    taken = {flow.local.port for flow in sockets.listeners(wanted) if flow.inode not in held}
    # New connections to a port where another rank used to listen here are forwarded to it: this rank would not get them.
    own = sockets.own_addresses()
    for uid, addresses in forward.listed().items():
        taken |= {old.port for old in addresses if uid != rank_uid and old.ip in own and old.port in wanted}
    wrong = [f"these ports are taken here: {', '.join(map(str, sorted(taken)))}"] if taken else []
    busy = [f"{local} – {remote}" for local, remote in sockets.existing(kept)]
    if busy:
        wrong.append(f"connections with these addresses and ports exist here: {', '.join(busy[:5])}")
    if wrong:
        return [_check("target-ports", "; ".join(wrong), "choose another target, free them, or try again in a minute")]
    return [
        pb.Check(
            name="target-ports",
            reason=f"{len(wanted)} listening ports and the addresses of {len(kept)} connections are free here",
        )
    ]


def remove_orphans(rewires: Iterable[pb.Rewire]) -> None:
    """On the target of a resumption: removes what the kernel is still closing of the rank's former connections. Blocking."""
    pairs = [new_pair(rewire) for rewire in rewires if rewire.kind in (pb.Rewire.PEER, pb.Rewire.INSIDE)]
    if removed := orphans.remove(pairs):
        log.info("removed %d connections that an ended copy of the rank has left", removed)


def frozen(pids: Sequence[int], places: Places) -> tuple[list[pb.Rewire], list[Flow]]:
    """The rewirings of a frozen rank, and its sockets. Raises Refused when one of them cannot be moved."""
    rewires, checks, flows = _look(pids, places)
    for check in checks:
        if check.verdict == pb.Check.REFUSE:
            raise Refused(f"{check.name}: {check.reason}", remedy=check.remedy, where=Where.SOURCE_FROZEN)
    return rewires, flows


def hold(move: str, rewires: Sequence[pb.Rewire], *, on_target: bool) -> None:
    """Filters the rank's connections on this node: as they were on the source, or as they will be on the target. There new
    connections are dropped as well, until it is known whether the copy will run."""
    pairs = [new_pair(rewire) if on_target else old_pair(rewire) for rewire in rewires if leaves_the_tree(rewire)]
    if pairs:
        packets.hold(move, pairs)
    if on_target:
        listeners = [rewire for rewire in rewires if rewire.kind == pb.Rewire.LISTENER]
        own = sorted(sockets.own_addresses()) if listeners else []
        addresses = {
            address
            for listener in listeners
            for address in new_connections.reached_at(_address(listener.new_local), own, v6only=listener.v6only)
        }
        if addresses:
            packets.hold_listeners(move, addresses)


def let_go(move_log: MoveLog) -> None:
    """Drops the filter; costs nothing where the rank has no connections."""
    if move_log.record.rewires or move_log.record.filtered:
        packets.drop_table(move_log.move)


def tables_of(move_log: MoveLog) -> set[str]:
    """The names of the filters that an unfinished move may have on this node."""
    return {move_log.move, new_connections.table(move_log.move), peer_table(move_log.move)}


def peer_table(move: str) -> str:
    """The name of a node's filter as a peer. It is separate: as source or target the node may filter the same flows."""
    return f"m-{hashlib.sha256(f'peer of {move}'.encode()).hexdigest()[:12]}"


def sweep(moves: Iterable[str]) -> None:
    """At start: drops all filters here except those of these moves; a crash left the others. Blocking."""
    keep = set(moves)
    for move in packets.tables():
        if move not in keep:
            log.info("dropping the filter of move %s, which has ended", move)
            packets.drop_table(move)


def silence(pids: Sequence[int]) -> None:
    """Before a copy is killed: makes sure that its connections send no packet when they close."""
    repoint.silence(pids)


def part(move_log: MoveLog, pids: Sequence[int]) -> None:
    """Before a copy is killed that runs elsewhere now: resets its connections to hosts without a daemon."""
    pairs = {old_pair(rewire) for rewire in move_log.record.rewires if rewire.kind == pb.Rewire.OUTSIDE}
    if not pairs:
        return
    packets.release(move_log.move, pairs)
    for flow in sockets.tree_flows(pids):
        if flow.protocol == "tcp" and flow.connected and flow.endpoints in pairs:
            with contextlib.suppress(OSError), sockets.borrow(flow.holders[0], flow.inode) as sock:
                repair.disconnect(sock)  # not in repair mode: it sends a reset


def wake(pids: Sequence[int], journalled: SocketOptions) -> None:
    """Undoes what a killed criu leaves: takes the sockets of these processes out of repair mode."""
    repoint.end_repair(pids, journalled.reuse_address)


def rewrite(folder: Path, rewires: Iterable[pb.Rewire]) -> inet.Rewritten:
    """Gives the sockets in the image their new addresses. `finish` does what criu cannot do."""
    changes: dict[Endpoints, Endpoints] = {}
    closed: list[Pair] = []
    ended: list[Pair] = []
    for rewire in rewires:
        if rewire.kind == pb.Rewire.OUTSIDE:
            closed.append(old_pair(rewire))
        elif not rewire.HasField("old_remote"):
            changes[_address(rewire.old_local), None] = _address(rewire.new_local), None
        else:
            changes[old_pair(rewire)] = new_pair(rewire)
            ended += [old_pair(rewire)] if rewire.ended else []
    # Also where nothing changes: a socket in the image that is not accounted for must be an error.
    return inet.rewrite(folder, changes, closed, sockets.own_addresses(), ended)


def meet(rewires: Iterable[pb.Rewire], nodes: Iterable[ClusterNode]) -> None:
    """Lets this kernel learn the round-trip times to the peers: a connection without one waits 3 s before it retransmits
    what the filter dropped. Best effort; blocking."""
    endpoints = {node.name: node.endpoint for node in nodes}
    known = {(rewire.new_local.ip, rewire.peer_node) for rewire in rewires if rewire.kind == pb.Rewire.PEER}
    for ip, peer in known:
        timers.meet(ip, endpoints.get(peer, ""))


def finish(pids: Iterable[int], rewritten: inet.Rewritten, again: Iterable[tuple[int, int]]) -> None:
    """Makes connections to hosts without a daemon report a reset when the copy, still stopped, next uses them, and those that
    the peer had closed the end of the stream. `again` are those that were reset before the move: the rank has not noticed it
    yet, and criu does not carry it."""
    once_more = list(again)
    by_inner = {tree.inner_pid(pid): pid for pid in pids} if rewritten.closed or rewritten.ended or once_more else {}

    def holder(inner: int, fd: int) -> Holder:
        process = tree.Process.of(by_inner[inner])
        return Holder(process.pid, process.start_ticks, fd)

    for one in rewritten.closed:
        sockets_reset.reset(holder(*one))
    for one in rewritten.ended:
        with sockets.borrow(holder(*one)) as sock:
            sock.shutdown(socket.SHUT_RD)
    for one in once_more:
        try:
            sockets_reset.reset(holder(*one))
        except (OSError, KeyError) as error:  # it is closed in any case
            log.warning("descriptor %d of process %d reads as ended, not as reset: %s", one[1], one[0], error)


def leaves_the_tree(rewire: pb.Rewire) -> bool:
    return rewire.kind in {pb.Rewire.PEER, pb.Rewire.OUTSIDE}


def _of_one_node(rewire: pb.Rewire) -> bool:
    """Whether this listener is reached on its own node alone, and keeps its address: 127.0.0.1, or one of a local bridge."""
    old = _address(rewire.old_local)
    return old.loopback or (not old.wildcard and rewire.old_local == rewire.new_local)


def old_pair(rewire: pb.Rewire) -> Pair:
    return _address(rewire.old_local), _address(rewire.old_remote)


def new_pair(rewire: pb.Rewire) -> Pair:
    return _address(rewire.new_local), _address(rewire.new_remote)


def _address(endpoint: pb.Endpoint) -> Address:
    return Address(endpoint.ip, endpoint.port)


def _check(name: str, reason: str, remedy: str) -> pb.Check:
    return pb.Check(name=name, verdict=pb.Check.REFUSE, reason=reason, remedy=remedy)


def _count(rewires: Sequence[pb.Rewire]) -> str:
    if not rewires:
        return "none"
    peers = sum(1 for rewire in rewires if rewire.kind == pb.Rewire.PEER)
    listeners = sum(1 for rewire in rewires if rewire.kind == pb.Rewire.LISTENER)
    return f"{peers} to other nodes or processes that stay, {listeners} listening, {len(rewires)} in all"
