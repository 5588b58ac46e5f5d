"""A cgroup with a memory limit, for programs that a test runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from snapshotd.proc import mountinfo


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[list[str]]:
    """The beginning of a command that runs in a new cgroup with this limit; v1 or v2, wherever this machine has memory."""
    folder, limit = _place()
    group = folder / f"test-memory-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        for left in reversed(range(600)):  # the kernel removes processes that have ended a moment later
            try:
                group.rmdir()
                break
            except OSError:
                if not left:
                    raise
                time.sleep(0.1)


def killed(command: list[str]) -> int:
    """How many processes of the group the kernel has killed for lack of memory."""
    group = Path(command[2].split(" > ")[1].split("/cgroup.procs")[0])
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(FileNotFoundError):
            rows = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(rows.get("oom_kill", 0))
    return 0


def _place() -> tuple[Path, str]:
    mounts = mountinfo.parse(Path("/proc/self/mountinfo").read_text())
    for mount in mounts:
        if mount.kind == "cgroup" and "memory" in mount.options:
            return mount.point, "memory.limit_in_bytes"
    root = mountinfo.cgroup2_root(mounts)
    assert root is not None, "this machine has no cgroups"
    with contextlib.suppress(OSError):
        (root / "cgroup.subtree_control").write_text("+memory")
    return root, "memory.max"
