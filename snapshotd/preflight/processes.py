"""Checks of the processes themselves: who they are, where they live, who else has a hand on them."""

from __future__ import annotations

import os

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.look import Look
from snapshotd.preflight.node import kernel_problems, kernel_release, version_pair
from snapshotd.preflight.objects import is_carried
from snapshotd.preflight.verdict import listed, passed, refused, warned
from snapshotd.proc.processes import read_identity, read_status, read_text

OLDEST_CRIU = (4, 2)
RUN = "start it with `migrator run -- CMD`"


def rank_alive(look: Look) -> Check:
    root = look.tree.processes.get(look.tree.root_pid)
    if root is None or root.zombie:
        return refused(
            "rank-alive", f"the rank's process {look.tree.root_pid} has ended", "there is nothing left to move"
        )
    return passed("rank-alive", f"{root}, {len(look.tree.alive)} processes")


def keeper(look: Look) -> Check:
    if not look.keeper_pid:
        return refused("keeper", "no keeper stands for this rank: it was not started by `migrator run`", RUN)
    who = read_identity(look.keeper_pid)
    if who.zombie:
        return refused("keeper", f"its keeper {who} has ended", RUN)
    root = look.tree.processes[look.tree.root_pid]
    if root.parent != look.keeper_pid:
        return refused("keeper", f"{root} is not a child of its keeper {who}", RUN)
    return passed("keeper", f"{'guest ' if look.keeper_is_guest else ''}keeper {who}")


def kernel(look: Look) -> Check:
    group = next(
        (line[3:] for line in read_text(f"/proc/{look.tree.root_pid}/cgroup").splitlines() if line.startswith("0::")),
        "",
    )
    return kernel_check("kernel", group)


def kernel_check(name: str, group: str = "") -> Check:
    """The same question on both nodes."""
    problems = kernel_problems(group)
    if problems:
        return refused(name, f"Linux {kernel_release()}: {listed(problems)}", "run Linux 5.14 or newer with cgroup v2")
    return passed(name, f"Linux {kernel_release()}")


def criu(look: Look) -> Check:
    return criu_check("criu", look.criu_version)


def criu_check(name: str, version: str) -> Check:
    pair = version_pair(version)
    remedy = "install CRIU 4.2 or newer (`make setup` gets a private one) and name it in snapshotd's configuration"
    if pair is None:
        return refused(name, f"no usable CRIU (version {version!r})", remedy)
    if pair < OLDEST_CRIU:
        return refused(name, f"CRIU {version} is too old", remedy)
    return passed(name, f"CRIU {version}")


def process_tree(look: Look) -> Check:
    strays = [process for process in look.tree.alive if not look.tree.descends(process)]
    if strays:
        return refused(
            "process-tree",
            f"left the rank's tree (daemonised, or their parent ended): {listed([str(stray) for stray in strays])}",
            "end these processes, or start them outside the job",
        )
    headless = [process for process in look.tree.processes.values() if process.zombie and process.threads > 1]
    if headless:
        return refused(
            "process-tree",
            f"the main thread has ended while others run: {listed([str(process) for process in headless])}",
            "CRIU cannot take such a process; let its main thread wait for the others",
        )
    zombies = len(look.tree.processes) - len(look.tree.alive)
    return passed("process-tree", f"{len(look.tree.alive)} processes, {zombies} zombies")


def session(look: Look) -> Check:
    root = look.tree.processes[look.tree.root_pid]
    if root.session != root.pid:
        return refused("session", f"{root} does not lead its session (leader: pid {root.session})", RUN)
    outside = [
        str(process)
        for process in look.tree.alive
        if process.session not in look.tree.processes and _exists(process.session)
    ]
    if outside:
        return refused("session", f"in a session of somebody else: {listed(outside)}", RUN)
    return passed("session", f"{root} leads its session")


def _exists(pid: int) -> bool:
    return pid == 0 or os.path.exists(f"/proc/{pid}")


def tracing(look: Look) -> Check:
    found = []
    for process in look.tree.alive:
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            try:
                tracer = int(read_status(f"/proc/{process.pid}/task/{thread}/status").get("TracerPid", "0"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that ended is traced by nobody
            if tracer:
                found.append(f"{process} by {_name_of(tracer)}")
                break
    if found:
        return refused(
            "tracing", f"a debugger or profiler is attached: {listed(found)}", "detach it (gdb, strace, py-spy …)"
        )
    return passed("tracing", "no debugger attached")


def _name_of(pid: int) -> str:
    try:
        return str(read_identity(pid))
    except (FileNotFoundError, ProcessLookupError):
        return f"pid {pid}"


def stopped(look: Look) -> Check:
    found = [str(process) for process in look.tree.alive if process.state in "Tt"]
    if found:
        return warned(
            "stopped", f"stopped by a signal: {listed(found)}", "it will run after the move; continue or end it before"
        )
    return passed("stopped", "no process is stopped")


def namespaces(look: Look) -> Check:
    """The rank lives where the daemon lives; a guest keeper's pid and mount namespaces are this product's own."""
    ours = {name: _namespace("self", name) for name in ("mnt", "pid", "user", "net", "uts", "ipc", "cgroup")}
    root = look.tree.root_pid
    if look.keeper_is_guest and look.keeper_pid:
        ours |= {name: _namespace(look.keeper_pid, name) for name in ("mnt", "pid")}
    ours["time"] = _namespace(root, "time")  # CRIU gives a restored rank one of its own; the tree must share it
    found = []
    for process in look.tree.alive:
        other = [name for name, here in ours.items() if _namespace(process.pid, name) != here]
        if other:
            found.append(f"{process}: {', '.join(other)}")
    if found:
        return refused(
            "namespaces",
            f"in namespaces of their own: {listed(found)}",
            "start the job outside containers and `unshare`, with `migrator run` as the outermost command",
        )
    return passed("namespaces", "the node's own")


def _namespace(pid: int | str, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}")
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/ns"):  # a kernel without this kind
            return ""
        raise


def root_directory(look: Look) -> Check:
    here = os.stat("/")
    found = []
    for process in look.tree.alive:
        there = os.stat(f"/proc/{process.pid}/root/.")
        if process.root != "/" or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            found.append(f"{process}: {process.root}")
    if found:
        return refused("root-directory", f"another root directory: {listed(found)}", "do not chroot inside the job")
    return passed("root-directory", "/")


def security_label(look: Look) -> Check:
    labels = sorted({_label(process.pid) for process in look.tree.alive} - {"", "unconfined"})
    if labels:
        return warned(
            "security-label",
            f"confined by {', '.join(labels)}",
            "the same profile must be loaded on the target, and let CRIU restore it",
        )
    return passed("security-label", "unconfined")


def _label(pid: int) -> str:
    try:
        return read_text(f"/proc/{pid}/attr/current").strip("\0\n ")
    except OSError:  # no such module in this kernel: EINVAL
        return ""


def file_locks(look: Look) -> Check:
    """CRIU carries locks; but a frozen copy still holds its own, which shows where a file is shared by both nodes."""
    carried = {thing.inode for thing in look.objects if is_carried(thing.path, look.carry_paths)}
    ghosts = {thing.inode for thing in look.objects if thing.stat is not None and thing.stat.st_nlink == 0}
    names = {thing.inode: str(thing) for thing in look.objects}
    mine, shared = 0, []
    for line in read_text("/proc/locks").splitlines():
        fields = line.replace("->", "").split()
        try:
            kind, pid, (major, minor, inode) = fields[1], int(fields[4]), fields[5].split(":")
            key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
        except (IndexError, ValueError):
            continue
        if pid not in look.inside and not (kind == "OFDLCK" and key in names):
            continue
        mine += 1
        if key not in carried | ghosts:
            shared.append(f"{kind} on {names.get(key, f'inode {inode}')}")
    if shared:
        return refused(
            "file-locks",
            f"locked files that stay where they are: {listed(shared)}",
            "the frozen copy keeps its lock until the move is over, so the restored one could not take it: try again when"
            " the lock is released, or let the job lock a file below carry_paths",
        )
    return passed("file-locks", f"{mine} locks" if mine else "none")
