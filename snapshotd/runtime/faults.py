"""Declared fault points: places where a test, or a drill on a real cluster, makes this process fail on purpose.

A file `fault` in the daemon's run directory (or the path in $MIGRATOR_FAULT for the driver) holds `POINT ACTION`; the
first time POINT is reached the file is removed and ACTION happens. Actions: `kill` (SIGKILL to this process),
`stop` (SIGSTOP to this process: it hangs), `fail` (an Internal error), `wait` (until the file `POINT.go`
is made there; it is removed).
Without the file every point costs one failed open(2).
"""

from __future__ import annotations

import asyncio
import os
import signal
from enum import StrEnum
from pathlib import Path

from snapshotd.api.errors import Internal


class Point(StrEnum):
    """Every place where a fault can be injected; `X` is after the step X was journalled, `before-X` before it began."""

    BEFORE_BEGIN = "before-begin"
    BEGIN = "begin"
    READY = "ready"  # files, lane and rings for device memory are there, the job runs
    BEFORE_FREEZE = "before-freeze"
    PARKED = "parked"  # the threads of a rank that uses GPUs stand still, its work there may go on
    LOCKED = "locked"  # that is drained as well
    PARKED_MEMORY = "memory-parked"  # what the shim moves is in stripes, the rest still on the GPU, unlocked
    CHECKPOINTED = "checkpointed"  # its device memory is in host memory, nothing is stopped yet
    STOPPED = "stopped"  # SIGSTOP sent, cgroup not yet frozen
    FREEZE = "freeze"
    BEFORE_DUMP = "before-dump"
    DUMPING = "dumping"  # criu has seized the tree and is writing
    STREAM = "stream"
    BEFORE_COMMIT = "before-commit"
    COMMIT = "commit"
    BEFORE_ABORT = "before-abort"
    ABORT = "abort"  # recorded, not yet thawed
    BEFORE_RELEASE = "before-release"
    RELEASE = "release"
    BEFORE_PREPARE = "before-prepare"
    PREPARE = "prepare"
    RECEIVING = "receiving"
    SEAL = "seal"
    BEFORE_RESTORE = "before-restore"
    RESTORING = "restoring"  # criu restore under way
    CUDA_RESTORED = "cuda-restored"  # its device memory is on the target's GPU, still locked
    REFILLED = "memory-refilled"  # what was in stripes is as well, unlocked
    RESTORED = "restored"  # criu is done, not yet journalled as held
    RESTORE = "restore"
    BEFORE_ACTIVATE = "before-activate"
    ACTIVATED = "activated"  # journalled, not yet continued
    ACTIVATE = "activate"
    BEFORE_DISCARD = "before-discard"
    DISCARD = "discard"
    BEFORE_BRACE = "before-brace"
    BRACE = "brace"
    BEFORE_REPOINT = "before-repoint"
    REPOINTING = "repointing"  # sockets changed, not yet journalled
    REPOINT = "repoint"
    BEFORE_SETTLE = "before-settle"
    QUIESCED = "quiesced"  # the gates here are closed
    BEFORE_DETACH = "before-detach"
    DETACHED = "detached"  # the communicators of the processes here are down
    DETACH = "detach"  # those of all members are
    BEFORE_ATTACH = "before-attach"
    ATTACHING = "attaching"  # the ids are known, nothing is built yet
    ATTACHED = "attached"  # the communicators of the processes here are up again
    ATTACH = "attach"  # those of all members are
    BEFORE_OPEN = "before-open"


_folder: Path | None = None


def arm(folder: Path) -> None:
    """Look for fault files in `folder` from now on."""
    global _folder
    _folder = folder


async def reach(point: Point | str) -> None:
    """Does what a fault file for this point asks for; otherwise nothing."""
    if _folder is None:
        return
    try:
        wanted, action = (_folder / "fault").read_text().split()
    except (OSError, ValueError):
        return
    if wanted != point:
        return
    (_folder / "fault").unlink(missing_ok=True)
    (_folder / "fault.fired").write_text(f"{point} {action}\n")
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fail":
            raise Internal(f"fault injected at {point}", remedy="remove the fault file; this was asked for")
        case "wait":
            go = _folder / f"{point}.go"
            while not go.exists():  # noqa: ASYNC110 - a file, made by another process
                await asyncio.sleep(0.01)
            go.unlink(missing_ok=True)
