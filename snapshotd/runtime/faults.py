"""Declared fault points: places where a test, or a drill on a real cluster, makes this process fail on purpose.

A file `fault` in the daemon's run directory (or the path in $MIGRATOR_FAULT for the driver) contains `POINT ACTION`. The
first time that POINT is reached, the file is removed and ACTION is performed. Actions: `kill` (SIGKILL to this process),
`stop` (SIGSTOP to this process: it hangs), `fail` (an Internal error), `wait` (until the file `POINT.go` is created in the
same directory, which is then removed). Without the file every point costs one failed open(2).
"""

from __future__ import annotations

import asyncio
import os
import signal
from enum import StrEnum
from pathlib import Path

from snapshotd.api.errors import Internal


class Point(StrEnum):
    """Every place where a fault can be injected. `X` is after step X was journalled, `before-X` before it began."""

    BEFORE_BEGIN = "before-begin"
    BEGIN = "begin"
    READY = "ready"  # stripe files, device-memory channel and pinned staging buffers are ready; the job runs
    SENT_AHEAD = "sent-ahead"  # closed files are on the target, or in the store of a snapshot; the job runs
    PRECOPY = "precopy"  # the rank's memory is followed, nothing of it was sent; the job runs
    PRECOPIED_ROUND = "precopied-round"  # a round of its memory is on the target; the job runs
    BEFORE_FREEZE = "before-freeze"
    PARKED = "parked"  # the threads of a GPU rank are parked; the GPU may still be working
    LOCKED = "locked"  # the GPU's work is drained as well
    SHARED_CLOSED = "shared-closed"  # processes have closed the device memory that they share; all of it is on the GPU
    OFFLOADED = "memory-offloaded"  # the shim has offloaded its part into stripes; the rest is on the GPU, unlocked
    CHECKPOINTED = "checkpointed"  # all device memory is in host memory; no process is stopped yet
    TWINNED = "twinned"  # twins of a rank that is snapshotted were made; no process is stopped yet
    STOPPED = "stopped"  # SIGSTOP sent, cgroup not yet frozen
    FREEZE = "freeze"
    BEFORE_DUMP = "before-dump"
    FILES_KEPT = (
        "files-kept"  # of a snapshot: what the rank has open for writing outlives it now; nothing is dumped yet
    )
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
    FILES_PUT_BACK = "files-put-back"  # after a rollback: the rank's files are as they were; nothing is restored yet
    KEEPER_STARTED = "keeper-started"  # the guest keeper runs, and this daemon does not know its pid yet
    RESTORING = "restoring"  # criu restore is running
    PLACING = "placing"  # criu has restored; memory that it has left out is placed
    CUDA_RESTORED = "cuda-restored"  # the driver has restored device memory on the target's GPU, still locked
    REFILLED = "memory-refilled"  # the stripes are on the GPU too, unlocked
    RESTORED = "restored"  # criu has finished; not yet journalled as held
    RESTORE = "restore"
    BEFORE_ACTIVATE = "before-activate"
    ACTIVATED = "activated"  # journalled, not yet continued
    ACTIVATE = "activate"
    BEFORE_DISCARD = "before-discard"
    DISCARD = "discard"
    BEFORE_SUSPEND = "before-suspend-timeouts"
    SUSPEND = "suspend-timeouts"
    BEFORE_HOLD = "before-hold"
    HOLD = "hold"  # the peers' sockets here are filtered
    BEFORE_REPOINT = "before-repoint"
    REPOINTING = "repointing"  # sockets changed, not yet journalled
    REPOINT = "repoint"
    BEFORE_SETTLE = "before-settle"
    QUIESCED = "quiesced"  # the gates on this node are closed
    BEFORE_DETACH = "before-detach"
    DETACHED = "detached"  # the communicators on this node are torn down
    DETACH = "detach"  # those of all members are torn down
    BEFORE_ATTACH = "before-attach"
    ATTACHING = "attaching"  # the ids are known, no communicator is built yet
    ATTACHED = "attached"  # the communicators on this node are built again
    ATTACH = "attach"  # those of all members are built again
    BEFORE_OPEN = "before-open"
    BEFORE_JOB_BEGIN = "before-job-begin"  # the coordinator of a suspension or resumption
    JOB_BEGIN = "job-begin"
    BEFORE_JOB_COMMIT = "before-job-commit"
    JOB_COMMIT = "job-commit"
    BEFORE_JOB_ABORT = "before-job-abort"
    BEFORE_SEND = "before-send"
    SEND = "send"  # the image of a suspended rank is on its target
    BEFORE_CONTINUE = "before-continue"  # a rank whose image of a snapshot is complete
    CONTINUE = "continue"
    TAKEN_BACK = (
        "memory-taken-back"  # a rank that is snapshotted has its device memory, and still shares it with the copy
    )
    SAVING = "memory-saving"  # it goes on, and its device memory is not in the image yet
    SAVED = "memory-saved"
    COPYING = "host-memory-copying"  # it goes on, and memory that its twins have is not in the image yet
    COPIED = "host-memory-copied"  # all of it was copied, and does not count yet
    BEFORE_ROLLBACK = "before-rollback"  # the coordinator of a rollback
    ROLLBACK = "rollback"
    ROLLED_BACK = "rolled-back"  # no process of the former incarnation runs any more
    BEFORE_END_RANKS = "before-end-ranks"  # a node whose copies of a job are to be ended
    END_RANKS = "end-ranks"


_folder: Path | None = None


def arm(folder: Path) -> None:
    """Looks for fault files in `folder` from now on."""
    global _folder
    _folder = folder


async def reach(point: Point | str) -> None:
    """Performs the action of a fault file for this point; does nothing without one."""
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
            raise Internal(
                f"fault injected at {point}", remedy="this failure was requested by a fault file; retry without it"
            )
        case "wait":
            go = _folder / f"{point}.go"
            while not go.exists():  # noqa: ASYNC110 - a file, made by another process
                await asyncio.sleep(0.01)
            go.unlink(missing_ok=True)
