"""Ends a network process that has outlived its daemon, before the next one is started.

The kernel kills a network process with its daemon. This is for one that code of an attacker has kept alive: it would answer
calls with this node's certificate beside the next daemon. Its pid is recorded where only root can write, with its start time
and the boot, so that no other process is ever killed. It is recorded before it has read anything.
"""

from __future__ import annotations

import json
import logging
import select
import signal
from pathlib import Path

from snapshotd.api.errors import Busy
from snapshotd.proc import host
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: Of a daemon that was killed just now, the kernel is still ending it.
_BY_ITSELF_MS = 1_000
_KILLED_MS = 5_000


def record(run_dir: Path, pid: int) -> None:
    """Raises ProcessLookupError if it has ended already."""
    place = _place(run_dir)
    fresh = place.with_suffix(".new")
    fresh.write_text(json.dumps([pid, Process.of(pid).start_ticks, host.boot_id()]))
    fresh.rename(place)


def end(run_dir: Path) -> None:
    """Waits until the network process of an earlier daemon has ended, and kills it if need be. Raises Busy if that does not
    help. Blocking; the caller holds the lock of run_dir."""
    place = _place(run_dir)
    try:
        pid, start_ticks, boot_id = json.loads(place.read_text())
        process = Process(int(pid), int(start_ticks))
    except (FileNotFoundError, ValueError, TypeError):
        return
    if boot_id != host.boot_id():
        return
    try:
        with process.pidfd() as pidfd:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if ended.poll(_BY_ITSELF_MS):
                return
            log.warning("the network process %d has outlived its daemon: killing it", process.pid)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not ended.poll(_KILLED_MS):
                raise Busy(
                    f"the network process {process.pid} of an earlier daemon was killed and has not ended yet",
                    remedy="a process in state D waits for the kernel; try again later",
                )
    except ProcessLookupError:
        return


def _place(run_dir: Path) -> Path:
    return run_dir / "network.pid"
