"""Device memory that one process shares with others (CUDA IPC): closes it before the driver's checkpoint, and opens it again.

The shim has its own handles for memory that it backs, so it can unmap what other processes have opened, and map at the same
addresses what the owner has afterwards. Invariant: from `close` until `offer` and `open` have succeeded no thread of the job
runs, and the process refuses to let one run.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import errno

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess import devmem, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.devmem import Caught
from snapshotd.inprocess.shimctl import ShimState
from snapshotd.proc.tree import Process

#: For a process that shares a thousand handles, on a busy machine.
_TRY_S, _CLOSE_S, _OPEN_S = 10.0, 60.0, 60.0


class OwnerGone(GpuFailed):
    """No process offers memory that this one has opened: its owner has freed it, or has ended."""


class Shared:
    """What one process shares."""

    def __init__(self, found: shimctl.Mailbox) -> None:
        self._mailbox = found

    @property
    def process(self) -> Process:
        return self._mailbox.process

    def state(self) -> ShimState:
        return self._mailbox.state()

    def attempt(self) -> None:
        """Makes every call once that the others make, and changes nothing. Asked first while the job runs, because it starts
        a thread. Raises Caught: release the threads and try again; and OwnerGone."""
        self._ask("be tried", Command.MEMORY_IPC_TRY, _TRY_S)

    def close(self) -> None:
        """Unmaps what other processes own. The job's threads are parked, its driver unlocked. Idempotent."""
        self._ask("be closed", Command.MEMORY_IPC_CLOSE, _CLOSE_S)

    def offer(self) -> None:
        """Offers what came back under its former handles; before any process opens it. Idempotent."""
        self._ask("be offered", Command.MEMORY_IPC_OFFER, _OPEN_S)

    def open(self) -> None:
        """Maps what other processes offer. Idempotent: what is mapped stays. Raises OwnerGone."""
        self._ask("be opened", Command.MEMORY_IPC_OPEN, _OPEN_S)

    def _ask(self, what: str, command: Command, timeout_s: float) -> None:
        with self._mailbox.turn():
            self._mailbox.cancel_device(False)
            answer = self._mailbox.ask(command, timeout_s)
        if answer.status == errno.EAGAIN and command == Command.MEMORY_IPC_TRY:
            raise Caught(answer.text)
        if answer.status == errno.ENOENT:
            raise OwnerGone(f"process {self.process.pid}: {answer.text}")
        if answer.status:
            raise devmem._failure(self.process, f"shared again: it cannot {what}", answer)


def is_outside(process: Process) -> bool:
    """Whether a process of another rank has got some of its memory."""
    found = find(process)
    return found is not None and found.state().shared_outside


def is_shared(process: Process) -> bool:
    """Whether it has exported memory that the shim backs."""
    found = find(process)
    return found is not None and found.state().moving_exports > 0


def find(process: Process) -> Shared | None:
    """None where the library is not loaded."""
    found = shimctl.find(process)
    return Shared(found) if found is not None else None
