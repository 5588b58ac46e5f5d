"""Preserves what a connection would lose in a move: socket options, time-outs, segment size.

criu does not carry all options (snapshotd/net/options.py). Time-outs are off during the move, on every node that has a
copy, because the silence must not end a connection. A restored connection sends small segments until that is corrected.

Invariant: time-outs are in the source's journal before they are switched off, so that undo can restore them after any crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from snapshotd.moves.record_parts import SocketOptions, SocketTimers
from snapshotd.net import options, refusals, repair, repoint, sockets, timers
from snapshotd.net.flows import Flow, Holder
from snapshotd.proc import tree

#: How long a connection may take to get its first answer after the silence before its time-outs count again.
ANSWER_S = 3.0


def of(flows: Sequence[Flow]) -> SocketOptions:
    """The options and time-outs of the stopped rank's sockets, for the journal and the image. Changes nothing; blocking."""
    found = [timers_of(flow) for flow in flows]
    return SocketOptions(
        options=options.keep(flows),
        timers=[one for one in found if one is not None],
        reset=[one for flow in flows for one in _reset_unnoticed(flow)],
        reuse_address=repoint.with_reuse_address(flows),
    )


def _reset_unnoticed(flow: Flow) -> list[tuple[int, int]]:
    for holder in flow.holders:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError), sockets.borrow(holder, flow.inode) as sock:
            return [(tree.inner_pid(holder.pid), holder.fd)] if refusals.was_reset(flow, sock) else []
    return []


def timers_of(flow: Flow) -> SocketTimers | None:
    """The time-outs of one connection; None where it has none."""
    if flow.protocol != "tcp" or not flow.connected or not flow.holders:
        return None
    found = timers.read_timers(flow.holders, flow.inode)
    if found is None:
        return None
    first = flow.holders[0]
    return SocketTimers(
        inode=flow.inode,
        holders=[(holder.pid, holder.start_ticks, holder.fd) for holder in flow.holders],
        pid_inside=tree.inner_pid(first.pid),
        fd=first.fd,
        user_timeout_ms=found.user_timeout_ms,
        keepalive=found.keepalive,
    )


def suspend(journalled: Iterable[SocketTimers]) -> None:
    """Switches off the time-outs that `timers_of` found. Blocking, idempotent."""
    for one in journalled:
        timers.hold_timers(one.descriptors, one.inode)


def resume(journalled: Sequence[SocketTimers]) -> None:
    """Switches them on again on the node that these sockets never left; its processes may run. Blocking, idempotent."""
    if journalled:
        timers.await_answers([(one.descriptors, one.inode, one.timers) for one in journalled], ANSWER_S)
    for one in journalled:
        timers.restore_timers(one.descriptors, one.inode, one.timers)


def put_back(pids: Sequence[int], saved: SocketOptions) -> list[str]:
    """On the target, before the rank runs: sets all options but the time-outs. Returns what this node refuses. Blocking."""
    processes = {tree.inner_pid(pid): tree.Process.of(pid) for pid in pids}
    wanted = []
    for item in saved.options:
        if item.pid_inside in processes:
            without = {name: value for name, value in item.options.items() if name != "TCP_USER_TIMEOUT"}
            wanted.append(options.Kept(item.pid_inside, item.fd, without))
    return options.put_back(wanted, processes)


def resume_there(pids: Sequence[int], journalled: Sequence[SocketTimers]) -> None:
    """On the target, once the rank runs: sets the time-outs as well. Blocking, idempotent."""
    if not journalled:
        return
    inside: dict[int, tree.Process] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            inside[tree.inner_pid(pid)] = tree.Process.of(pid)
    found = []
    for one in journalled:
        if (process := inside.get(one.pid_inside)) is not None:
            holder = Holder(process.pid, process.start_ticks, one.fd)
            with contextlib.suppress(ProcessLookupError), sockets.borrow(holder) as sock:
                found.append(((holder,), sockets.inode_of(sock), one.timers))
    timers.await_answers(found, ANSWER_S)
    for holders, inode, value in found:
        timers.restore_timers(holders, inode, value)


def use_full_segments(pids: Sequence[int]) -> None:
    """Lets the restored copy's connections send segments as large as before. Blocking."""
    for flow in sockets.tree_flows(pids):
        if flow.protocol == "tcp" and flow.connected and flow.remote is not None and flow.remote.version == 4:
            with contextlib.suppress(ProcessLookupError), sockets.borrow(flow.holders[0], flow.inode) as sock:
                repair.use_full_mss(sock)
