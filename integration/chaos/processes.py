"""The processes of a lab, found by its cgroups: other labs on this machine may run the same programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from integration.harness import Cluster, files_below, is_twin, pids_in

_KEEPERS = {b"migrator.cli", b"shim.keeper.guest"}


def of_lab(nodes: Cluster) -> Iterator[tuple[int, list[bytes], Path]]:
    """Process id, words of the command line, and cgroup of each process, without twins."""
    for procs in files_below(nodes.lab.layout.cgroup, "cgroup.procs"):
        for pid in pids_in(procs):
            with contextlib.suppress(OSError):
                if is_twin(pid):
                    continue
                yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"), procs.parent


def with_marker(nodes: Cluster, marker: str) -> list[int]:
    """The processes with this word in their command line that have not ended, without keepers."""
    return [pid for pid, words, _ in of_lab(nodes) if marker.encode() in words and not is_keeper(words) and alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_keeper(words: list[bytes]) -> bool:
    return bool(_KEEPERS & set(words))


def criu(nodes: Cluster) -> list[int]:
    return [pid for pid, words, _ in of_lab(nodes) if b"swrk" in words]


def idle_guest_keepers(nodes: Cluster) -> list[int]:
    """Guest keepers without a child: they keep no rank."""
    found = []
    for pid, words, _ in of_lab(nodes):
        with contextlib.suppress(OSError):
            if b"shim.keeper.guest" in words and not Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                found.append(pid)
    return found


def network_process(nodes: Cluster, node: str) -> int | None:
    for child in children(nodes.lab.daemon_pid(node) or 0):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text() == "snapshotd-net\n":
                return child
    return None


def children(pid: int) -> list[int]:
    """The children of a process. The kernel lists them by the thread that started them."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended; its children are the main thread's now
            found += map(int, (thread / "children").read_text().split())
    return found
