"""Moves the device memory of one process into stripe files and back, with the help of the shim inside it.

The driver's own checkpoint copies device memory at a fraction of the speed of the bus. Memory that the shim backs leaves
faster: the shim's threads copy it into files in this node's memory, which the daemon has opened and handed over. Its physical
memory is released before the driver's checkpoint, which then finds little to do.

Invariant: the daemon knows only stripes and byte counts. Only the process, and its restored copy, know their layout. The
process is asked whether its memory is offloaded; the daemon never remembers it. While it is, no thread of the job may run.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from snapshotd.api.errors import GpuFailed, Internal, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import abi, mailbox, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.mailbox import Answer
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: Less than this is left to the driver's checkpoint: nothing would be gained.
LEAST_BYTES = 32 << 20
#: For a process that is offloaded now. The numbers of one that is offloaded already are in the journal, and in the image.
STRIPES = min(8, max(2, (os.cpu_count() or 2) // 2))
STRIPES_MAX = abi.STRIPES_MAX
SLOT_BYTES = 8 << 20

#: Making the pinned staging buffers takes time, more on a busy GPU.
_OPEN_S, _READY_S, _DROP_S = 5.0, 30.0, 10.0
#: How long a cancelled command may take to give up: the copy of a slot, and a driver that is slow to answer.
_QUIET_S = 20.0
_PIDFD_GETFD = 438  # the same number on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


class Caught(Exception):
    """A thread of the job was parked inside an allocation, or inside a CUDA call with a lock that other threads need.

    Nothing was moved, and what `ready` made still exists. Release the threads, then try again.
    """


class TooSmall(Exception):
    """The files are too small for the memory. Nothing was moved, and what `ready` made still exists."""

    def __init__(self, total_bytes: int, largest_bytes: int) -> None:
        super().__init__(f"{total_bytes} bytes, {largest_bytes} in the largest stripe")
        self.total_bytes, self.largest_bytes = total_bytes, largest_bytes


class DeviceMemory(Protocol):
    """A way to move a process's device memory. The shim is one; the driver's own storage callbacks may become another."""

    @property
    def process(self) -> Process: ...

    def size(self) -> int:
        """The bytes that would be moved now."""

    def offloaded(self) -> bool:
        """Whether they are in stripes, and not on the device."""

    def ready(self, stripes: Sequence[int], slot_bytes: int) -> int:
        """Hands over descriptors of the stripe files, in order, and makes everything that copying needs. The job may run.

        Returns the bytes that `offload` or `fill` would copy now. `slot_bytes` are contiguous in one stripe; `fill` needs as
        many stripes and as large slots as `offload` had.
        """

    def offload(self, timeout_s: float) -> int:
        """Moves everything into the stripes, and returns the bytes. The job's threads are parked, its driver unlocked.

        Raises Caught and TooSmall. After any other error `offloaded` tells whether the memory was moved; if not, all is as
        before `ready`.
        """

    def fill(self, timeout_s: float) -> int:
        """Moves everything back from the stripes, which may still be growing. If it fails, the memory is still offloaded."""

    def done(self) -> Sequence[int]:
        """Of each stripe, how many bytes `offload` has written so far, or `fill` has read."""

    def cancel(self) -> None:
        """Cancels an `offload` or `fill`, perhaps from before a restart of the daemon, and waits until it has given up."""

    def drop(self) -> None:
        """Releases what `ready` made. Idempotent."""


class ShimMemory:
    """The memory that libsnapshim-offload.so backs in one process; see shim/README.md."""

    def __init__(self, found: shimctl.Mailbox) -> None:
        self._mailbox = found

    @property
    def process(self) -> Process:
        return self._mailbox.process

    def size(self) -> int:
        return self._mailbox.device_memory().bytes

    def offloaded(self) -> bool:
        return self._mailbox.device_memory().offloaded

    def ready(self, stripes: Sequence[int], slot_bytes: int) -> int:
        if not 1 <= len(stripes) <= STRIPES_MAX:
            raise Internal(f"{len(stripes)} stripes: 1 to {STRIPES_MAX} are possible")
        with self._mailbox.turn():
            self._mailbox.cancel_device(False)
            opened = self._mailbox.ask(Command.MEMORY_OPEN, _OPEN_S)
            theirs = self._first(opened, "made ready for its descriptors")
            try:
                self._hand_over(theirs, stripes, opened.second)
            except GpuFailed:
                with contextlib.suppress(SnapshotError):
                    self.drop()  # what it has opened for them
                raise
            return self._ask("made ready to be copied", Command.MEMORY_READY, _READY_S, len(stripes), slot_bytes)

    def offload(self, timeout_s: float) -> int:
        answer = self._mailbox.ask(Command.MEMORY_OFFLOAD, timeout_s)
        if answer.status == errno.EAGAIN:
            raise Caught(answer.text)
        if answer.status == errno.EFBIG:
            raise TooSmall(answer.first, answer.second)
        return self._copied(answer, "taken off the GPU")

    def fill(self, timeout_s: float) -> int:
        return self._copied(self._mailbox.ask(Command.MEMORY_FILL, timeout_s), "put back onto the GPU")

    def done(self) -> Sequence[int]:
        return self._mailbox.device_memory().done

    def cancel(self) -> None:
        began = time.monotonic()
        wake_s = began
        while self._mailbox.device_memory().busy:
            self._mailbox.cancel_device(True)
            now = time.monotonic()
            if now >= wake_s:  # a daemon that was killed may have written its request and not sent its signal
                self._mailbox.wake()
                wake_s = now + mailbox.SIGNAL_AGAIN_S
            if now > began + _QUIET_S:
                raise Timeout(
                    f"process {self.process.pid} did not stop copying its device memory in {_QUIET_S:.0f} s",
                    remedy="the GPU or its driver hangs: see `nvidia-smi` and the kernel's log on this node",
                    where=Where.SOURCE_FROZEN,
                )
            time.sleep(0.002)
        self._mailbox.cancel_device(False)

    def drop(self) -> None:
        self._ask("released", Command.MEMORY_DROP, _DROP_S)

    def _ask(self, wanted: str, command: Command, timeout_s: float, *arguments: int) -> int:
        return self._first(self._mailbox.ask(command, timeout_s, *arguments), wanted)

    def _copied(self, answer: Answer, wanted: str) -> int:
        size, seconds = self._first(answer, wanted), answer.second / 1e9
        log.info(
            "process %d: %d bytes %s, copied in %.3f s, %.1f GB/s",
            *(self.process.pid, size, wanted, seconds, size / 1e9 / max(seconds, 1e-6)),
        )
        return size

    def _first(self, answer: Answer, wanted: str) -> int:
        if answer.status:
            raise _failure(self.process, wanted, answer)
        return answer.first

    def _hand_over(self, theirs: int, stripes: Sequence[int], inode: int = 0) -> None:
        """Sends the descriptors over a socket pair of the process, so that it need not connect to the daemon."""
        try:
            with _descriptor(self.process, theirs, inode) as connection:
                payload = array.array("i", stripes)
                connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, payload)])
        except OSError as error:
            if not self.process.goes_on():
                raise RankGone(f"process {self.process.pid} has ended", where=Where.ENDED) from error
            raise GpuFailed(
                f"process {self.process.pid} cannot be given the files for its device memory: {error}",
                remedy="the driver's checkpoint carries the memory instead, more slowly",
            ) from error


def find(process: Process) -> DeviceMemory | None:
    """A way to move the process's device memory; None where only the driver can. Raises as `shimctl.find` does."""
    found = shimctl.find(process)
    return ShimMemory(found) if found is not None else None


def is_out(process: Process) -> bool:
    """Whether the process's device memory is in stripes. A process that has ended has none."""
    with contextlib.suppress(RankGone):
        memory = find(process) if process.alive() else None
        return memory is not None and memory.offloaded()
    return False


def _descriptor(process: Process, theirs: int, inode: int = 0) -> socket.socket:
    """A copy of a socket that another process has open. Raises OSError if it has another inode: the job has closed the
    descriptor, and opened its own under that number. 0: unknown, from an older library."""
    with process.pidfd() as pidfd:
        ours = _libc.syscall(*map(ctypes.c_long, (_PIDFD_GETFD, pidfd, theirs, 0)))
        if ours < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        if inode and os.fstat(ours).st_ino != inode:
            raise OSError(errno.EBADF, "the process has closed the socket that was opened for it")
        connection = socket.socket(fileno=ours)
    except BaseException:  # the process has reused that descriptor number
        os.close(ours)
        raise
    connection.settimeout(_OPEN_S)
    return connection


def _failure(process: Process, wanted: str, answer: Answer) -> SnapshotError:
    text = f"the device memory of process {process.pid} could not be {wanted}: {answer.text}"
    match answer.status:
        case errno.ETIMEDOUT:
            return Timeout(text, where=Where.SOURCE_FROZEN)
        case errno.ENOMEM:
            return GpuFailed(
                text,
                remedy="end or move what takes the GPU's memory; `nvidia-smi` names it",
                where=Where.SOURCE_FROZEN,
            )
        case _:
            return GpuFailed(text, where=Where.SOURCE_FROZEN)
