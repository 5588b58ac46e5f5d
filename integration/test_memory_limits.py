"""Moves to a node whose daemon is in a memory cgroup: none begins that does not fit, and none goes on without memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import PATIENCE_S, Cluster, pids_in, until
from integration.test_limits import MIB, SOURCE, TARGET, end, ready, until_ended
from snapshotd.proc import mountinfo
from snapshotd.runtime.faults import Point

pytestmark = pytest.mark.root

LIMIT_BYTES = 1024 * MIB
#: Takes memory of its cgroup until 64 MiB are left, which is less than must stay free, and gives it back when its input ends.
GREEDY = """
import sys
from snapshotd.proc.memory import memory_room
taken = []
while memory_room("self")[0][1] > 64 << 20:
    taken.append(bytearray(b"x") * (8 << 20))
print("taken", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def limited_daemon(nodes: Cluster, node: str) -> Iterator[Path]:
    """While the block runs, the node's daemon and what it starts are in a cgroup with a limit: the folder of the cgroup."""
    mounts = mountinfo.parse(Path("/proc/self/mountinfo").read_text())
    root = next((one.point for one in mounts if one.kind == "cgroup" and "memory" in one.options), None)
    if root is None:
        pytest.skip("needs the memory controller of cgroup v1: a lab starts its daemons in cgroups (v2) of its own")
    own = Path("/proc/self/cgroup").read_text().splitlines()
    home = root / next(line.split(":")[2] for line in own if line.split(":")[1] == "memory").lstrip("/")
    group = root / f"test-memory-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    nodes.lab.kill_daemon(node)
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))  # the daemon inherits it
        try:
            nodes.lab.start_daemon(node, timeout_s=PATIENCE_S)
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        nodes.lab.restart_daemon(node, timeout_s=PATIENCE_S)
        until("the limited processes to end", lambda: not pids_in(group / "cgroup.procs"))
        group.rmdir()


@contextlib.contextmanager
def memory_taken(group: Path) -> Iterator[None]:
    """While the block runs, another process of the cgroup has nearly all of its memory."""
    join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    argv = ["sh", "-c", join, "sh", sys.executable, "-c", GREEDY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        yield
        process.communicate(timeout=PATIENCE_S)


def test_no_move_exceeds_the_memory_of_its_target(nodes: Cluster) -> None:
    large = ready(nodes.workload(SOURCE, "memory.py", "--mib", "900", "--steps", "100000"))
    job = ready(nodes.workload(SOURCE, "memory.py", "--mib", "64", *until_ended(nodes)))
    with limited_daemon(nodes, TARGET) as group:
        refused = nodes.move(large, TARGET, expect=10)
        assert "MiB of memory" in refused["reason"]
        assert f"{TARGET} has " in refused["reason"]
        assert [phase["name"] for phase in refused["phases"]] == ["preflight"]
        large.await_progress()
        large.kill()
        with contextlib.ExitStack() as taken:
            with nodes.moving(job, TARGET, TARGET, Point.RESTORING) as asked:
                taken.enter_context(memory_taken(group))
                until("the restore to end", lambda: "is undone: memory has run out" in nodes.logs())
            assert asked.code == 11, f"{asked.answer} {asked.errors}"
            assert f"cgroup {group} has " in asked.answer["reason"]
            assert "less than the 128 MiB that must stay free" in asked.answer["reason"]
            job.await_progress()
        oom = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        assert oom["oom_kill"] == "0"
        nodes.move(job, TARGET)
        end(nodes, job)
    until("nothing to be left", lambda: not nodes.leftovers())
