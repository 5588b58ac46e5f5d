"""Takes the device memory of one process over as descriptors, and gives it back: the content stays on the GPU.

The shim exports its physical memory, sends the descriptors over a socket pair of the process, and releases the memory. A
descriptor keeps it, whichever process dies. When it is given back, it is mapped at the same addresses, without a copy.

Invariant: the process releases memory only after it has sent every descriptor, and `hand_over` returns only when `keep` has
all of them. If it fails, the process is asked (`offloaded`) whether it has released its memory. The process does not wait
until `keep` has them: if the daemon or the holder fails between the two, released memory is lost. `hold_device_memory` is
therefore off by default.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import abi, devmem, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.devmem import Caught
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: Of one message; the kernel accepts 253, the shim receives 16.
BATCH = abi.STRIPES_MAX
_BLOCK = struct.Struct("QQiI")
_OPEN_S, _READY_S = 5.0, 30.0
#: How long descriptors that were sent may take to be kept.
_KEPT_S = 30.0
_LOOK_S = 0.05


class CannotExport(Exception):
    """Some of the memory cannot be exported. Nothing was released; what `ready` made is dropped."""


@dataclass(frozen=True)
class HeldBlock:
    """Physical memory, as the process had it mapped."""

    address: int
    bytes: int
    device: int  # as the process numbers them


#: Takes these descriptors over, which are closed when it returns.
Keep = Callable[[Sequence[HeldBlock], Sequence[int]], None]


class Holding:
    """The process's end of a hand-over, in either direction."""

    def __init__(self, found: shimctl.Mailbox) -> None:
        self._mailbox = found
        self._line: socket.socket | None = None

    @property
    def process(self) -> Process:
        return self._mailbox.process

    def ready(self, stripes: int, slot_bytes: int) -> int:
        """Prepares a hand-over while the job may run; returns the bytes. The numbers describe the layout in which the content
        may be sent (shim/README.md), and must be the same for both directions."""
        with self._mailbox.turn():
            self.close()
            self._mailbox.cancel_device(False)
            theirs = self._ask("made ready for a hand-over", Command.MEMORY_OPEN, _OPEN_S)
            try:
                self._line = devmem._descriptor(self.process, theirs)
            except OSError as error:
                raise self._failed("be handed over", str(error)) from error
            return self._ask("made ready", Command.MEMORY_READY, _READY_S, stripes, slot_bytes, 1)

    def hand_over(self, timeout_s: float, keep: Keep) -> int:
        """Takes all memory over; returns the bytes. The job's threads are parked, its driver unlocked. Raises Caught: release
        the threads and try again; and CannotExport."""
        assert self._line is not None
        reader = _Reader(self._line, keep)
        reader.start()
        try:
            answer = self._mailbox.ask(Command.MEMORY_HAND_OVER, timeout_s)
        finally:
            reader.answered.set()
        if answer.status == errno.EAGAIN:
            reader.give_up()
            raise Caught(answer.text)
        if answer.status:
            reader.give_up()
        if answer.status == errno.EXDEV:
            self.close()
            raise CannotExport(answer.text)
        if answer.status:
            self.close()
            raise devmem._failure(self.process, "handed over", answer)
        reader.finish(time.monotonic() + _KEPT_S, self.process)
        self.close()
        return answer.first

    def take_back(self, timeout_s: float, descriptors: Iterable[Sequence[int]]) -> int:
        """Maps the memory of these descriptors again, in the order in which they were handed over; returns the bytes. `ready`
        comes first. They stay open here. If it fails, the memory is still offloaded."""
        assert self._line is not None
        line, sending = self._line, threading.Event()

        def send() -> None:
            try:
                for batch in descriptors:
                    if sending.is_set():
                        return
                    line.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", batch))])
            except (OSError, SnapshotError) as error:
                log.warning("giving process %d its device memory back: %s", self.process.pid, error)
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # it gives up, and says why

        line.settimeout(timeout_s)
        sender = threading.Thread(target=send, name="give descriptors back", daemon=True)
        sender.start()
        try:
            answer = self._mailbox.ask(Command.MEMORY_TAKE_BACK, timeout_s)
        finally:
            sending.set()
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            sender.join()
            self.close()
        if answer.status:
            raise devmem._failure(self.process, "taken back", answer)
        return answer.first

    def has_imported(self) -> bool:
        """Whether it has memory that another process created, as after `take_back`. The driver can neither export such memory
        again nor restore a process that has it, so such a rank is refused (`gpu-ipc`)."""
        return self._mailbox.state().imports > 0

    def own(self, timeout_s: float) -> None:
        """Replaces such memory by memory of the process itself, one block after the other, copied on the GPU.

        It needs room for one block there. The job's threads are parked, its driver unlocked; `ready` comes first. Raises
        GpuFailed: what was not replaced is still there."""
        try:
            self._ask("made its own", Command.MEMORY_OWN, timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _ask(self, wanted: str, command: Command, timeout_s: float, *arguments: int) -> int:
        answer = self._mailbox.ask(command, timeout_s, *arguments)
        if answer.status:
            raise devmem._failure(self.process, wanted, answer)
        return answer.first

    def _failed(self, what: str, why: str) -> SnapshotError:
        if not self.process.alive():
            return RankGone(f"process {self.process.pid} has ended", where=Where.ENDED)
        return GpuFailed(f"the device memory of process {self.process.pid} cannot {what}: {why}")


class _Reader(threading.Thread):
    """Receives descriptors while the process sends them: the kernel limits how many may be on their way."""

    def __init__(self, line: socket.socket, keep: Keep) -> None:
        super().__init__(name="receive device memory", daemon=True)
        self._line, self._keep = line, keep
        self.answered, self._given_up = threading.Event(), False
        self._complete = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def _read(self) -> None:
        pending = b""
        while not self._complete:
            readable, _, _ = select.select([self._line], [], [], _LOOK_S)
            if not readable:
                if self._given_up:
                    return
                continue
            blob, fds, _, _ = socket.recv_fds(self._line, BATCH * _BLOCK.size, BATCH)
            try:
                if not blob:
                    return
                pending += blob
                whole = len(pending) // _BLOCK.size * _BLOCK.size
                blocks = [HeldBlock(*fields[:3]) for fields in _BLOCK.iter_unpack(pending[:whole])]
                pending = pending[whole:]
                self._complete = any(not block.bytes for block in blocks)
                blocks = [block for block in blocks if block.bytes]
                if len(blocks) != len(fds):
                    raise GpuFailed(f"{len(fds)} descriptors came for {len(blocks)} blocks of device memory")
                if blocks:
                    self._keep(blocks, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def give_up(self) -> None:
        self._given_up = True
        self.join()

    def finish(self, until_s: float, process: Process) -> None:
        """The process has sent everything: waits until it was kept."""
        self.join(max(0.0, until_s - time.monotonic()))
        if self._error is not None:
            raise self._error
        if not self._complete:
            self._given_up = True
            raise Timeout(f"the descriptors of the device memory of process {process.pid} did not arrive")


def find(process: Process) -> Holding | None:
    """None where the library is not loaded."""
    found = shimctl.find(process)
    return Holding(found) if found is not None else None
