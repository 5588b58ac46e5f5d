"""A process's device memory, moved by somebody inside it: onto stripe files, and back from them.

The driver's own checkpoint copies device memory at a fraction of what the bus carries. Memory that the shim backs leaves
faster: it is copied by the shim's threads into files of this node's memory, which the daemon has opened and handed over,
and its physical memory is released before the driver's checkpoint, which then finds little to do.

Invariant: the daemon knows stripes and byte counts alone; what lies where in them only the process knows, and its restored
copy. Whether the memory is out is asked of the process, never remembered. While it is out no thread of the job may run.

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
from snapshotd.inprocess import shimctl
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: What is smaller goes with the driver's checkpoint: nothing is gained by it.
LEAST_BYTES = 32 << 20
#: Of a process that parks now; those of one that is parked are in the journal, and in the image.
STRIPES = min(8, max(2, (os.cpu_count() or 2) // 2))
STRIPES_MAX = 16
SLOT_BYTES = 8 << 20

_OPEN, _READY, _PARK, _FILL, _DROP = 32, 33, 34, 35, 36
#: The ring of pinned memory takes a moment, more on a GPU that is busy.
_OPEN_S, _READY_S, _DROP_S = 5.0, 30.0, 10.0
#: How long a command that was told to give up may take to do so: the copy of a slot, and a driver that is slow to answer.
_QUIET_S = 20.0
_PIDFD_GETFD = 438  # the same number on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


class Caught(Exception):
    """A thread of the job was stopped in the middle of an allocation, or of a call into CUDA with a lock that others need:
    nothing has happened, and what `ready` made is still there. Let it go on, and try again."""


class TooSmall(Exception):
    """There is more to park than the files have room for. Nothing has happened, and what `ready` made is still there."""

    def __init__(self, total_bytes: int, largest_bytes: int) -> None:
        super().__init__(f"{total_bytes} bytes, {largest_bytes} in the largest stripe")
        self.total_bytes, self.largest_bytes = total_bytes, largest_bytes


class DeviceMemory(Protocol):
    """Whoever moves a process's device memory. The shim is one; the driver's own storage callbacks may be another."""

    @property
    def process(self) -> Process: ...

    def size(self) -> int:
        """Bytes that it would move now."""

    def out(self) -> bool:
        """Whether they are in stripes, and not on the device."""

    def ready(self, stripes: Sequence[int], slot_bytes: int) -> int:
        """Hands over descriptors of the stripe files, in order, and has all made that copying takes. The job may run. The
        bytes that `park` or `fill` would copy now. `slot_bytes`: what lies side by side in one stripe; as many stripes and as
        large slots fill as parked."""

    def park(self, timeout_s: float) -> int:
        """Everything into the stripes, and off the device; the bytes. The job's threads are parked, its driver unlocked.

        Caught, TooSmall: see there. Any other error: `out` says whether it happened; if not, all is as before `ready`.
        """

    def fill(self, timeout_s: float) -> int:
        """Everything back from the stripes, which may still be growing. If it fails, the memory is still out."""

    def done(self) -> Sequence[int]:
        """Of each stripe, how many bytes `park` has written so far, or `fill` has read."""

    def cancel(self) -> None:
        """A `park` or `fill` under way, also one of an earlier life of this daemon, has given up when this returns."""

    def drop(self) -> None:
        """Gives up what `ready` made. Twice is once."""


class ShimMemory:
    """What libsnapshim.so backs in one process; see shim/README.md."""

    def __init__(self, mailbox: shimctl.Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def process(self) -> Process:
        return self._mailbox.process

    def size(self) -> int:
        return self._mailbox.device_memory().bytes

    def out(self) -> bool:
        return self._mailbox.device_memory().parked

    def ready(self, stripes: Sequence[int], slot_bytes: int) -> int:
        if not 1 <= len(stripes) <= STRIPES_MAX:
            raise Internal(f"{len(stripes)} stripes: 1 to {STRIPES_MAX} are possible")
        with self._mailbox.turn():
            self._mailbox.cancel_device(False)
            theirs = self._ask("made ready for its descriptors", _OPEN, _OPEN_S)
            try:
                self._hand_over(theirs, stripes)
            except GpuFailed:
                with contextlib.suppress(SnapshotError):
                    self.drop()  # what it has opened for them
                raise
            return self._ask("made ready to be copied", _READY, _READY_S, len(stripes), slot_bytes)

    def park(self, timeout_s: float) -> int:
        answer = self._mailbox.ask(_PARK, timeout_s)
        if answer.status == errno.EAGAIN:
            raise Caught(answer.words)
        if answer.status == errno.EFBIG:
            raise TooSmall(answer.first, answer.second)
        return self._copied(answer, "taken off the GPU")

    def fill(self, timeout_s: float) -> int:
        return self._copied(self._mailbox.ask(_FILL, timeout_s), "put back onto the GPU")

    def done(self) -> Sequence[int]:
        return self._mailbox.device_memory().done

    def cancel(self) -> None:
        began = time.monotonic()
        wake_s = began
        while self._mailbox.device_memory().busy:
            self._mailbox.cancel_device(True)
            now = time.monotonic()
            if now >= wake_s:  # whoever asked may have been killed before its signal: then nobody else wakes the thread
                self._mailbox.wake()
                wake_s = now + shimctl.SIGNAL_AGAIN_S
            if now > began + _QUIET_S:
                raise Timeout(
                    f"process {self.process.pid}: what it does with its device memory is not given up in {_QUIET_S:.0f} s",
                    remedy="the GPU or its driver hangs: see `nvidia-smi` and the kernel's log on this node",
                    where=Where.SOURCE_FROZEN,
                )
            time.sleep(0.002)
        self._mailbox.cancel_device(False)

    def drop(self) -> None:
        self._ask("let alone", _DROP, _DROP_S)

    def _ask(self, wanted: str, command: int, timeout_s: float, *arguments: int) -> int:
        return self._first(self._mailbox.ask(command, timeout_s, *arguments), wanted)

    def _copied(self, answer: shimctl.Answer, wanted: str) -> int:
        size, seconds = self._first(answer, wanted), answer.second / 1e9
        log.info(
            "process %d: %d bytes %s, copied in %.3f s, %.1f GB/s",
            *(self.process.pid, size, wanted, seconds, size / 1e9 / max(seconds, 1e-6)),
        )
        return size

    def _first(self, answer: shimctl.Answer, wanted: str) -> int:
        if answer.status:
            raise _failure(self.process, wanted, answer)
        return answer.first

    def _hand_over(self, theirs: int, stripes: Sequence[int]) -> None:
        """The pair of sockets is the process's own: of the daemon nothing has to be connected to."""
        try:
            with _descriptor(self.process, theirs) as connection:
                payload = array.array("i", stripes)
                connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, payload)])
        except OSError as error:
            if not self.process.alive():
                raise RankGone(f"process {self.process.pid} has ended", where=Where.ENDED) from error
            raise GpuFailed(
                f"process {self.process.pid} cannot be given the files for its device memory: {error}",
                remedy="the driver's checkpoint carries the memory instead, more slowly",
            ) from error


def find(process: Process) -> DeviceMemory | None:
    """Whoever moves the process's device memory; None where the driver alone can. Raises as `shimctl.find` does."""
    mailbox = shimctl.find(process)
    return ShimMemory(mailbox) if mailbox is not None else None


def is_out(process: Process) -> bool:
    """Whether the process's device memory is in stripes. A process that is gone has none."""
    with contextlib.suppress(RankGone):
        memory = find(process) if process.alive() else None
        return memory is not None and memory.out()
    return False


def _descriptor(process: Process, theirs: int) -> socket.socket:
    """A copy of a socket that another process has open."""
    pidfd = os.pidfd_open(process.pid)
    try:
        if not process.alive():  # whose pid is another's now
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        ours = _libc.syscall(*map(ctypes.c_long, (_PIDFD_GETFD, pidfd, theirs, 0)))
        if ours < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    try:
        connection = socket.socket(fileno=ours)
    except BaseException:  # it is something else: the process replaced it
        os.close(ours)
        raise
    connection.settimeout(_OPEN_S)
    return connection


def _failure(process: Process, wanted: str, answer: shimctl.Answer) -> SnapshotError:
    words = f"the device memory of process {process.pid} could not be {wanted}: {answer.words}"
    match answer.status:
        case errno.ETIMEDOUT:
            return Timeout(words, where=Where.SOURCE_FROZEN)
        case errno.ENOMEM:
            return GpuFailed(
                words,
                remedy="end or move what takes the GPU's memory; `nvidia-smi` names it",
                where=Where.SOURCE_FROZEN,
            )
        case _:
            return GpuFailed(words, where=Where.SOURCE_FROZEN)
