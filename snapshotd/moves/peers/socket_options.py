"""What a socket of the rank loses on its way although it is still the same connection: options, time-outs, segment size.

criu does not carry all options (snapshotd/net/options.py); time-outs are off while the move lasts, on whichever node has a
copy, because the silence must not end a connection; and a restored connection sends small segments until told otherwise.

Invariant: what is switched off on the source is in its journal first, so that undo can put it back after any crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from snapshotd.net import options, repair, sockets, timers
from snapshotd.net.flows import Flow, Holder
from snapshotd.net.timers import Timers
from snapshotd.proc import tree

#: How long a connection may take to get its first answer after the silence before its time-outs count again.
ANSWER_S = 3.0


def of(flows: Sequence[Flow]) -> dict[str, Any]:
    """What the journal and the image keep of the stopped rank's sockets. Changes nothing; blocking."""
    return {
        "options": [kept.to_json() for kept in options.keep(flows)],
        "timers": [note for flow in flows if (note := note_of(flow)) is not None],
    }


def note_of(flow: Flow) -> dict[str, Any] | None:
    """The time-outs of one connection; None where it has none."""
    if flow.protocol != "tcp" or not flow.connected or not flow.holders:
        return None
    found = timers.read_timers(flow.holders, flow.inode)
    if found is None:
        return None
    first = flow.holders[0]
    return {
        "inode": flow.inode,
        "holders": [[holder.pid, holder.start_ticks, holder.fd] for holder in flow.holders],
        "pid_inside": tree.inner_pid(first.pid),
        "fd": first.fd,
        "user_timeout_ms": found.user_timeout_ms,
        "keepalive": found.keepalive,
    }


def suspend(notes: Iterable[dict[str, Any]]) -> None:
    """Switches the time-outs off that `note_of` found. Blocking, repeatable."""
    for note in notes:
        timers.hold_timers(_holders(note), note["inode"])


def resume(notes: Sequence[dict[str, Any]]) -> None:
    """Switches them on again on the node that has always had these sockets; its processes may run. Blocking, repeatable."""
    if notes:
        timers.await_answers([(_holders(note), note["inode"]) for note in notes], ANSWER_S)
    for note in notes:
        timers.restore_timers(_holders(note), note["inode"], _timers(note))


def put_back(pids: Sequence[int], kept: dict[str, Any]) -> list[str]:
    """On the target, before the rank runs: all but the time-outs. Answers with what this node does not take. Blocking."""
    processes = {tree.inner_pid(pid): tree.Process.of(pid) for pid in pids}
    wanted = [options.Kept.from_json(item) for item in kept.get("options", [])]
    for item in wanted:
        item.options.pop("TCP_USER_TIMEOUT", None)
    return options.put_back([item for item in wanted if item.pid_inside in processes], processes)


def resume_there(pids: Sequence[int], notes: Sequence[dict[str, Any]]) -> None:
    """On the target, once the rank runs: the time-outs too. Blocking, repeatable."""
    if not notes:
        return
    inside: dict[int, tree.Process] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            inside[tree.inner_pid(pid)] = tree.Process.of(pid)
    found = []
    for note in notes:
        if (process := inside.get(note["pid_inside"])) is not None:
            holder = Holder(process.pid, process.start_ticks, note["fd"])
            with contextlib.suppress(ProcessLookupError), sockets.borrow(holder) as sock:
                found.append(((holder,), sockets.inode_of(sock), _timers(note)))
    timers.await_answers([(holders, inode) for holders, inode, _ in found], ANSWER_S)
    for holders, inode, value in found:
        timers.restore_timers(holders, inode, value)


def use_full_segments(pids: Sequence[int]) -> None:
    """The restored copy's connections send as large segments as they did. Blocking."""
    for flow in sockets.tree_flows(pids):
        if flow.protocol == "tcp" and flow.connected and flow.remote is not None and flow.remote.version == 4:
            with contextlib.suppress(ProcessLookupError), sockets.borrow(flow.holders[0], flow.inode) as sock:
                repair.use_full_mss(sock)


def _holders(note: dict[str, Any]) -> list[Holder]:
    return [Holder(*numbers) for numbers in note["holders"]]


def _timers(note: dict[str, Any]) -> Timers:
    return Timers(note["user_timeout_ms"], note["keepalive"])
