"""Where a skip is a failure: a lane that has what a test needs must run it.

$SNAPSHOT_LANE names the lane: `ci` (`make test`: root, CRIU, a compiler, no GPU), `gpu` (`integration/gpu/run`: all of
these and a GPU) or `systemd` (`make test-systemd`: nodes that boot systemd). Without it a skip is a skip. What a lane may
lack is listed here and nowhere else.
"""

from __future__ import annotations

import os

MAY_LACK: dict[str, tuple[str, ...]] = {
    # Also on arm64, with an older kernel, and in containers whose root does not have all capabilities and devices.
    "ci": (
        "no NVIDIA",
        "no NCCL is installed",
        "on x86-64 only",
        "needs CAP_SYS_RESOURCE",
        "needs Linux 6.7",
        "needs the memory controller of cgroup v1",
        "needs a file system with O_DIRECT",
        "needs /dev/fuse",
        "needs a loop device",
        "make test-systemd",
        "make test-all",
    ),
    # Only the whole lane boots other releases, and only where their registries are named. `make test-systemd` builds no RPM.
    "systemd": ("make test-all", "names no registry", "tools/package --rpm"),
    "gpu": (
        "no NCCL is installed",
        "no git here",
        "make test-all",
    ),  # torch's own NCCL is beside torch, not in the system
}


def must_run(reason: str) -> str:
    """Why this skip is a failure, or "" if it is none."""
    lane = os.environ.get("SNAPSHOT_LANE", "")
    if not lane or any(lack in reason for lack in MAY_LACK[lane]):
        return ""
    return f"skipped ({reason}), but the lane {lane} has what this test needs: see tests/lanes.py"
