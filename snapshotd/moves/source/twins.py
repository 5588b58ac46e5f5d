"""Makes twins of the processes of a rank that is snapshotted, so that the rank goes on while its memory is copied.

A twin is a process that shares all pages of a process of the rank, and does nothing (shim/lib/core/twin.c). When the rank
goes on and writes a page, the kernel gives it a copy of its own, and the twin keeps the page as it was. criu leaves out what
the twin has (snapshotd/criu/below.py), and `TwinMemory` copies that from the twin into the image, while the rank runs.

A twin is made a moment before the rank is frozen. What the rank writes in that moment, what was not copied by fork, and
what fork had to copy at once has another page frame in the twin than in the frozen rank: criu dumps it, in the pause.

Invariants:
- A page is taken from a twin only if the frozen rank has the same frame at that address: then it has the same content, for
  as long as the twin has it.
- A twin is in a cgroup of its own, whose path follows from the record of the move. Whatever happens to the daemon, its
  successor ends all twins of moves that have not ended (`sweep`), and a twin that nothing ends does so itself.
- Whatever fails here before the freeze costs time in the pause, and nothing else: criu dumps all memory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import Full, GpuFailed, SnapshotError
from snapshotd.inprocess import shimctl
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.source.large_memory import LEAST_BYTES
from snapshotd.proc import cgroup, comm, stat, tree
from snapshotd.proc.cgroup import Cgroup, mount_point
from snapshotd.proc.files import GONE, parse_fields, process_path, read_text
from snapshotd.proc.memory import memory_room
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES, mib
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: As shim/lib/core/twin.c names it.
NAME = "snapshim-twin"
#: For the kernel's copy of the page tables of a large process.
ASK_S = 20.0
#: How long a twin lives that is not ended: the time to copy its memory from a slow machine.
LIFE_S, SLOWEST_BYTES_PER_S = 60.0, 50 << 20
KILL_S = 20.0


@dataclass(frozen=True, slots=True)
class Twin:
    of: int  # the process of the rank
    inner_pid: int  # of that process, in its own pid namespace
    process: Process


def group_of(move_log: MoveLog) -> Cgroup:
    """Beside the rank's own cgroup: the limits of its scheduler apply there too, and a kernel that has to kill something
    there finds the twin. Not so where `_endangered` says."""
    return Cgroup(Path(move_log.record.cgroup).parent / f"snapshotd-twins-{move_log.move}")


def make(node: Node, move_log: MoveLog, group: Cgroup) -> list[Twin]:
    """Makes a twin of each process that is worth it. The rank runs, or its threads are parked. Raises nothing: a process
    without a twin is dumped by criu. Blocking."""
    if not node.config.snapshot_copy_on_write:
        return []
    try:
        sweep(move_log)  # what an earlier attempt has left
        wanted = _candidates(group.pids())
        if wanted and not _adopts(node, group.pids()):
            _reserve(node, move_log, sum(size for _, _, size in wanted))
            return [_twin(node, move_log, group, *one) for one in wanted]
    except (SnapshotError, OSError) as error:
        log.warning(
            "memory is copied while the rank waits: %s", error.message if isinstance(error, SnapshotError) else error
        )
    end(node, move_log)
    return []


def _candidates(pids: list[int]) -> list[tuple[Process, shimctl.Mailbox, int]]:
    """The processes with much memory and a control thread, and how much that is. Not the children of such processes: they
    share memory since the fork (fork_sharing.py)."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(*GONE):
            size = _anonymous_bytes(pid)
            if size >= LEAST_BYTES and tree.state(pid) not in {"T", "Z", "X", ""}:
                sizes[pid] = size
    found = []
    for pid, size in sizes.items():
        try:
            process = Process.of(pid)
            if stat.read(pid).parent in sizes:
                continue
            mailbox = shimctl.find(process)
            if mailbox is not None and mailbox.serves():
                found.append((process, mailbox, size))
        except GONE:
            continue
        except SnapshotError as error:
            log.info("the memory of process %d is copied while it waits: %s", pid, error.message)
    return found


def _anonymous_bytes(pid: int) -> int:
    return int(parse_fields(read_text(process_path(pid, "status"))).get("RssAnon", "0 kB").split()[0]) << 10


def _adopts(node: Node, pids: list[int]) -> bool:
    """Whether a process of the rank has adopted a twin of an earlier snapshot, and would again. It learns of the end of a
    process that it does not know, each time."""
    node.adopters.intersection_update([one for one in node.adopters if one.alive()])
    return any(one.pid in pids for one in node.adopters)


def _endangered(rank: Path) -> bool:
    """Whether a lack of memory ends the rank rather than its twin: the rank's own cgroup has a limit, as after a move or a
    rollback, or the kernel kills all processes of one above."""
    folders = [rank, *rank.parents]
    return _value(rank / "memory.max").isdigit() or any(
        _value(one / "memory.oom.group") == "1" for one in folders if one.is_relative_to(mount_point())
    )


def _value(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the root group, or no memory controller
        return ""


def floor_bytes(rank: Path, size_bytes: int) -> int:
    """Less memory than this is left to a rank with twins of that size: they are ended. A rank that is itself in danger may
    take more of it between two looks than the node keeps in reserve."""
    return max(FLOOR_BYTES, size_bytes // 4) if _endangered(rank) else FLOOR_BYTES


def _reserve(node: Node, move_log: MoveLog, size_bytes: int) -> None:
    """All of it may be written while it is copied, and exists twice then. Raises Full."""
    move, rank = move_log.move, Path(move_log.record.cgroup)
    whose, room = memory_room(move_log.record.pid)[0]
    spare_bytes = max(RESERVE_BYTES, size_bytes) if _endangered(rank) else RESERVE_BYTES
    if room < size_bytes + spare_bytes:
        raise Full(f"the rank may need {mib(size_bytes)} more for it, and {whose} leaves {mib(room)}")
    with node.room.turn():
        free = node.room.free(without=_purpose(move), own_groups=False)  # the rank's cgroups are charged with it
        if free.bytes < size_bytes + RESERVE_BYTES:
            raise Full(f"the rank may need {mib(size_bytes)} more for it, and {free}")
        node.room.count(_purpose(move), lambda: size_bytes)


def _twin(
    node: Node, move_log: MoveLog, group: Cgroup, process: Process, mailbox: shimctl.Mailbox, size_bytes: int
) -> Twin:
    """Raises a SnapshotError or an OSError; a twin that was made all the same is ended by `sweep`."""
    inner = mailbox.twin(ASK_S, LIFE_S + size_bytes / SLOWEST_BYTES_PER_S)
    pids = group.pids()
    twin = next((one for pid in pids if (one := _with_number(pid, inner)) is not None), None)
    if twin is None:
        raise GpuFailed(f"process {process.pid} has made process {inner}, which is not found")
    parent = stat.read(twin.pid).parent
    if parent in pids:  # criu would find it there, and the job would learn of its end
        node.adopters.add(Process.of(parent))
        raise GpuFailed(f"a process of the rank has adopted the twin of process {process.pid}")
    _put_aside(twin, group_of(move_log).create())
    return Twin(process.pid, tree.inner_pid(process.pid), twin)


def _put_aside(twin: Process, group: Cgroup) -> None:
    """Puts it into its cgroup, in which everything is killed later. Raises ProcessLookupError if it has ended."""
    group.add(twin.pid)
    if not twin.alive():  # the pid may be another's by now, and a new process comes from the cgroup of its parent
        for pid in group.pids():
            with contextlib.suppress(*GONE):
                if Process.of(pid) != twin:
                    Cgroup(cgroup.of_process(stat.read(pid).parent)).add(pid)
        raise ProcessLookupError(errno.ESRCH, f"the twin, process {twin.pid}, has ended")
    with contextlib.suppress(OSError), open(f"/proc/{twin.pid}/oom_score_adj", "w") as file:
        if twin.alive():  # and so the file is its own
            file.write("1000")  # rather than the rank


def _with_number(pid: int, inner: int) -> Process | None:
    """The process, if that is its number in its own pid namespace."""
    try:
        process = Process.of(pid)
        return process if tree.inner_pid(pid) == inner else None
    except GONE:
        return None


def sweep(move_log: MoveLog) -> None:
    """Ends all twins of this move, also one that was made a moment before the daemon died, and is in the rank's own cgroup
    still. Idempotent. Blocking."""
    own, rank = group_of(move_log), Cgroup(Path(move_log.record.cgroup))
    for pid in rank.pids():
        with contextlib.suppress(OSError):
            process = Process.of(pid)
            if comm.read(pid) == NAME and not os.listdir(f"/proc/{pid}/fd") and pid in rank.pids():
                process.signal(signal.SIGKILL)
    own.kill(KILL_S)
    own.remove()


def end(node: Node, move_log: MoveLog) -> None:
    """The same, and nothing is reserved for them any more. Raises nothing: the rank goes on, whatever becomes of them."""
    end_left(move_log)
    node.room.give_up(_purpose(move_log.move))


def end_left(move_log: MoveLog) -> None:
    """When the daemon starts, too: what was copied from twins is lost with its predecessor. Raises nothing. Blocking."""
    if move_log.begin.kind == "snapshot" and move_log.record.cgroup:
        try:
            sweep(move_log)
        except (OSError, SnapshotError) as error:  # they end by themselves
            log.error("twins of move %s are not ended: %s", move_log.move, error)


def _purpose(move: str) -> str:
    return f"twins of {move}"
