"""Checks of the processes themselves: their tree, session, tracers, namespaces and locks."""

from __future__ import annotations

import os
import time

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.api.version import version_pair
from snapshotd.preflight.inspection import Inspection
from snapshotd.preflight.node import kernel_problems
from snapshotd.preflight.objects import is_carried
from snapshotd.preflight.process_info import read_identity
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc import cgroup_paths, fuse, host, locks, maps, status
from snapshotd.proc import credentials as proc_credentials
from snapshotd.proc import namespaces as namespace_links
from snapshotd.proc.files import GONE, read_text

OLDEST_CRIU = (4, 2)
#: How long preflight waits for a running rank to release a lock, and how often it looks.
LOCK_WAIT_S, _LOCK_LOOK_S = 3.0, 0.05
RUN = "start the rank with `migrator run -- COMMAND`"


def rank_alive(rank: Inspection) -> Check:
    root = rank.tree.processes.get(rank.tree.root_pid)
    if root is None or root.zombie:
        return refused(
            "rank-alive",
            f"the rank's process {rank.tree.root_pid} has ended",
            "there is nothing to move; its exit status went to its launcher",
        )
    return passed("rank-alive", f"{root}, {len(rank.tree.alive)} processes")


def keeper(rank: Inspection) -> Check:
    if not rank.keeper_pid:
        return refused("keeper", "the rank has no keeper, because it was not started by `migrator run`", RUN)
    found = read_identity(rank.keeper_pid)
    if found.zombie:
        return refused("keeper", f"the rank's keeper {found} has ended", RUN)
    root = rank.tree.processes[rank.tree.root_pid]
    if root.parent != rank.keeper_pid:
        return refused("keeper", f"{root} is not a child of its keeper {found}", RUN)
    return passed("keeper", f"{'guest ' if rank.keeper_is_guest else ''}keeper {found}")


def credentials(rank: Inspection) -> Check:
    """A set-uid program acts for two users, and its memory would be sent, and restored, for the one that started it."""
    keeper_status = status.read(rank.keeper_pid) if rank.keeper_pid else None
    root = rank.tree.processes[rank.tree.root_pid]
    problems = []
    for process in rank.tree.alive:
        problem = proc_credentials.mixed(process.status)
        if not problem and keeper_status is not None:
            problem = proc_credentials.foreign(process.status, keeper_status)
        if problem:
            problems.append(f"{process}: {problem}")
    if problems:
        return refused(
            "credentials",
            f"these processes run a set-uid or set-gid program, or belong to another user: {listed(problems)}",
            "end these processes, or run the rank without programs that change their user (sudo, su, set-uid programs)",
        )
    return passed("credentials", f"user {root.user_id}, group {root.status.group_ids[0]}")


def kernel(rank: Inspection) -> Check:
    return kernel_check("kernel", cgroup_paths.unified_path(rank.tree.root_pid) or "")


def kernel_check(name: str, group: str = "") -> Check:
    """The same check on both nodes."""
    problems = kernel_problems(group)
    if problems:
        return refused(
            name,
            f"this node's kernel (Linux {host.kernel()}) lacks: {listed(problems)}",
            "run Linux 5.14 or newer with cgroup v2 mounted",
        )
    return passed(name, f"Linux {host.kernel()}")


def criu(rank: Inspection) -> Check:
    return criu_check("criu", rank.criu_version)


def criu_check(name: str, version: str) -> Check:
    pair = version_pair(version)
    remedy = (
        "install CRIU 4.2 or newer (`tools/get-criu /opt/snapshotd/criu` builds one) and set `criu` in snapshotd.toml"
    )
    if pair is None:
        return refused(name, f"this node has no usable CRIU (version {version!r})", remedy)
    if pair < OLDEST_CRIU:
        return refused(name, f"this node's CRIU {version} is too old", remedy)
    return passed(name, f"CRIU {version}")


def process_tree(rank: Inspection) -> Check:
    detached = [process for process in rank.tree.alive if not rank.tree.descends(process)]
    if detached:
        return refused(
            "process-tree",
            "these processes are in the rank's cgroup but no longer in its process tree (they became daemons, or their parent"
            f" ended): {listed([str(process) for process in detached])}",
            "end these processes, or start them outside the job",
        )
    headless = [process for process in rank.tree.processes.values() if process.zombie and process.threads > 1]
    if headless:
        return refused(
            "process-tree",
            f"the main thread has ended while other threads run, which CRIU cannot dump: {listed([*map(str, headless)])}",
            "end these processes, or change the program so that its main thread waits for the others",
        )
    zombies = len(rank.tree.processes) - len(rank.tree.alive)
    return passed("process-tree", f"{len(rank.tree.alive)} processes, {zombies} zombies")


def session(rank: Inspection) -> Check:
    root = rank.tree.processes[rank.tree.root_pid]
    if root.session != root.pid:
        return refused("session", f"{root} does not lead its session (the leader is pid {root.session})", RUN)
    outside = [
        str(process)
        for process in rank.tree.alive
        if process.session not in rank.tree.processes and _exists(process.session)
    ]
    if outside:
        return refused("session", f"these processes are in a session outside the rank: {listed(outside)}", RUN)
    return passed("session", f"{root} leads its session")


def _exists(pid: int) -> bool:
    return pid == 0 or os.path.exists(f"/proc/{pid}")


def tracing(rank: Inspection) -> Check:
    found = []
    for process in rank.tree.alive:
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            try:
                tracer = status.read(process.pid, int(thread)).tracer_pid
            except GONE:
                continue
            if tracer:
                found.append(f"{process} by {_name_of(tracer)}")
                break
    if found:
        return refused(
            "tracing",
            f"a debugger or profiler is attached, so CRIU cannot attach: {listed(found)}",
            "detach it (gdb, strace, py-spy …)",
        )
    return passed("tracing", "no debugger attached")


def _name_of(pid: int) -> str:
    try:
        return str(read_identity(pid))
    except GONE:
        return f"pid {pid}"


def stopped(rank: Inspection) -> Check:
    found = [str(process) for process in rank.tree.alive if process.state in "Tt"]
    if found:
        return warned(
            "stopped",
            f"these processes are stopped by a signal: {listed(found)}",
            "they may run after the move; continue or end them first",
        )
    return passed("stopped", "no process is stopped")


def namespaces(rank: Inspection) -> Check:
    """The rank must be in the daemon's namespaces, except for the pid and mount namespaces that a guest keeper made.

    Only the main thread of each process is looked at: other threads can leave its namespaces only with privileges."""
    ours = {name: namespace_links.read("self", name) for name in namespace_links.KINDS}
    if rank.keeper_is_guest and rank.keeper_pid:
        made = {name: namespace_links.read(rank.keeper_pid, name) for name in ("mnt", "pid")}
        ours |= made | {"pid_for_children": made["pid"]}
    # CRIU puts a restored rank into a time namespace; the whole tree must share it.
    for name in ("time", "time_for_children"):
        ours[name] = namespace_links.read(rank.tree.root_pid, "time")
    root = rank.tree.processes[rank.tree.root_pid]
    found = [f"{root}: {name}, which was not made by root" for name in _foreign(rank)]
    for process in rank.tree.alive:
        other = [name for name, here in ours.items() if namespace_links.read(process.pid, name) != here]
        if other:
            found.append(f"{process}: {', '.join(other)}")
    if found:
        return refused(
            "namespaces",
            f"these processes are in other namespaces than the node: {listed(found)}",
            "start the job outside containers and `unshare`, with `migrator run` as the outermost command",
        )
    return passed("namespaces", "the node's own")


def _foreign(rank: Inspection) -> list[str]:
    """The kinds of namespaces of the root process that a user made."""
    found = []
    for name in ("mnt", "pid", "time"):
        try:
            namespace = namespace_links.opened(rank.root_pid, name)
        except FileNotFoundError:
            continue  # this kernel has no such kind
        try:
            if not namespace_links.made_by_root(namespace):
                found.append(name)
        finally:
            os.close(namespace)
    return found


def file_systems(rank: Inspection) -> Check:
    """A file system that a user's process serves may never answer: nothing on one is looked at."""
    found = []
    for process in rank.tree.alive:
        if process.users_devices:
            links = [(link, f"/proc/{process.pid}/{link}") for link in ("cwd", "root")]
            places = [(link, fuse.stat_in_memory(path).st_dev) for link, path in links]
            places += [
                (f"fd {each.number}: {each.link}", each.stat.st_dev) for each in process.descriptors if each.stat
            ]
            places += [(f"maps {each.path}", maps.device_number(each.device)) for each in process.mappings]
            found += [f"{process} {text}" for text, device in places if device in process.users_devices]
    if found:
        return refused(
            "file-systems",
            f"the rank uses file systems that processes of users serve (FUSE): {listed(found)}",
            "copy what the job needs to a file system of the nodes, or have an administrator mount it on both nodes",
        )
    return passed("file-systems", "none that a user's process serves")


def root_directory(rank: Inspection) -> Check:
    here = os.stat("/")
    found = []
    for process in rank.tree.alive:
        there = os.stat(f"/proc/{process.pid}/root/.")
        if process.root != "/" or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            found.append(f"{process}: {process.root}")
    if found:
        return refused(
            "root-directory",
            f"these processes have changed their root directory: {listed(found)}",
            "start the job without chroot",
        )
    return passed("root-directory", "/")


def security_label(rank: Inspection) -> Check:
    labels = sorted({_label(process.pid) for process in rank.tree.alive} - {"", "unconfined"})
    if labels:
        return warned(
            "security-label",
            f"the rank is confined by {', '.join(labels)}",
            "load the same profile on the target, and make sure that it allows CRIU to restore it",
        )
    return passed("security-label", "unconfined")


def _label(pid: int) -> str:
    try:
        return read_text(f"/proc/{pid}/attr/current").strip("\0\n ")
    except OSError:  # EINVAL: this kernel has no security module
        return ""


def file_locks(rank: Inspection) -> Check:
    """CRIU moves locks. But the frozen copy still has its own. On a file that both nodes share, a shared lock is compatible
    with that: the restored copy takes it before the frozen one is dropped. An exclusive one is not: it would have to be
    released first, and another process could take it in between. Programs hold most of these for a moment (caches of
    compilers and downloads), so a running rank is given some time to release them."""
    deadline = time.monotonic() + (0.0 if rank.frozen else LOCK_WAIT_S)
    while True:
        held, left = _locks(rank)
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(_LOCK_LOOK_S)
        rank.read_again()
    if left:
        return refused(
            "file-locks",
            f"the rank has exclusive locks or leases on files that are not moved with it: {listed(left)}",
            "retry once the locks are released, take shared ones if the job only reads, or keep these files, such as a"
            " cache, below carry_paths (/tmp), where they move with the rank: on a shared file the frozen copy keeps its"
            " lock until the move has ended, and the restored one could not take it",
        )
    return passed("file-locks", f"{held} locks" if held else "none")


def _locks(rank: Inspection) -> tuple[int, list[str]]:
    """The number of the rank's locks, and those that cannot be moved: exclusive ones on files that are not moved with it."""
    moved = {
        thing.inode
        for thing in rank.objects
        if is_carried(thing.path, rank.carry_paths) or (thing.stat is not None and thing.stat.st_nlink == 0)
    }
    held = _held_locks(rank)
    return len(held), [words for inode, carried, words in held if not carried and inode not in moved]


def _held_locks(rank: Inspection) -> list[tuple[tuple[int, int], bool, str]]:
    """Of every lock that the rank's own descriptors and mappings have: the inode, whether both copies of the rank can have it
    at the same time, and a description."""
    found: dict[tuple[tuple[int, int], bool, str], str] = {}
    seen = set()  # as the kernel names these files
    for process in rank.tree.alive:
        for descriptor in process.descriptors:
            if descriptor.stat is None:
                continue
            try:
                taken = locks.read_of(process.pid, descriptor.number)
            except GONE:
                continue  # closed meanwhile, and its locks with it
            for lock in taken:
                seen.add(lock.file)
                inode = (descriptor.stat.st_dev, descriptor.stat.st_ino)
                words = f"{lock.kind} on {process} fd {descriptor.number}: {descriptor.link}"
                found.setdefault((inode, _by_both(lock), lock.kind), words)
    for lock in locks.read():  # an flock whose descriptor was closed while its file is mapped
        if lock.pid in rank.inside and lock.file not in seen:
            words = f"{lock.kind} on inode {lock.file[1]}, which pid {lock.pid} took"
            found.setdefault((lock.file, _by_both(lock), lock.kind), words)
    return [(inode, carried, words) for (inode, carried, _), words in found.items()]


def _by_both(lock: locks.Lock) -> bool:
    """A lease is a lock too, but one that other openings of the file break."""
    return lock.shared and lock.kind in {"FLOCK", "POSIX", "OFDLCK"}
