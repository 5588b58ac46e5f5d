"""Takes the device memory of one process over as descriptors, and gives it back: the content stays on the GPU.

The shim exports its physical memory, sends the descriptors over a socket pair of the process, and releases the memory. A
descriptor keeps it, whichever process dies. When it is given back, it is mapped at the same addresses, without a copy.

Invariant: the process releases memory only after `keep` has every descriptor, which it is told with one byte. If a hand-over
fails, the process is asked (`offloaded`) whether it has released its memory.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Where
from snapshotd.inprocess import abi, devmem, shimctl
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.devmem import Caught
from snapshotd.proc.tree import Process

log = logging.getLogger(__name__)

#: Of one message; the kernel accepts 253, the shim receives 16.
BATCH = abi.STRIPES_MAX
_BLOCK = struct.Struct("QQiI")
_OPEN_S, _READY_S = 5.0, 30.0
_LOOK_S = 0.05
_KEPT = b"\1"


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


#: What is given back: blocks and their descriptors, in batches of at most BATCH.
Batches = Iterable[tuple[Sequence[HeldBlock], Sequence[int]]]


class Holding:
    """The process's end of a hand-over, in either direction."""

    def __init__(self, found: shimctl.Mailbox) -> None:
        self._mailbox = found
        self._line: socket.socket | None = None

    @property
    def process(self) -> Process:
        return self._mailbox.process

    def must_know_how(self) -> None:
        """Raises GpuFailed at once if the process has an older library, which would wait for files."""
        if self.has_imported():
            return
        answer = self._mailbox.ask(Command.MEMORY_OWN, _OPEN_S)
        if answer.status:
            raise devmem._failure(self.process, "handed over", answer)

    def ready(self, stripes: int, slot_bytes: int) -> int:
        """Prepares a hand-over while the job may run; returns the bytes. The numbers describe the layout in which the content
        may be sent (shim/README.md), and must be the same for both directions. Raises CannotExport."""
        with self._mailbox.turn():
            self.close()
            self._mailbox.cancel_device(False)
            opened = self._mailbox.ask(Command.MEMORY_OPEN, _OPEN_S)
            if opened.status:
                raise devmem._failure(self.process, "made ready for a hand-over", opened)
            try:
                self._line = devmem._descriptor(self.process, opened.first, opened.second)
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
        except BaseException:
            reader.give_up()
            self.close()
            raise
        reader.give_up()
        if answer.status == errno.EAGAIN:
            raise Caught(answer.text)
        self.close()
        if answer.status and reader.error is not None:
            raise reader.error
        if answer.status == errno.EXDEV:
            raise CannotExport(answer.text)
        if answer.status:
            raise devmem._failure(self.process, "handed over", answer)
        return answer.first

    def take_back(self, timeout_s: float, held: Batches, count: int) -> int:
        """Maps the memory of these `count` descriptors again; returns the bytes. `ready` comes first. They stay open here. If
        it fails, the memory is still offloaded."""
        assert self._line is not None
        line, sending = self._line, threading.Event()

        def send() -> None:
            try:
                for blocks, fds in held:
                    if sending.is_set():
                        return
                    records = b"".join(_BLOCK.pack(one.address, one.bytes, one.device, 0) for one in blocks)
                    line.sendmsg([records], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            except (OSError, SnapshotError) as error:
                log.warning("giving process %d its device memory back: %s", self.process.pid, error)
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # it gives up, and says why

        line.settimeout(timeout_s)
        sender = threading.Thread(target=send, name="give descriptors back", daemon=True)
        sender.start()
        try:
            answer = self._mailbox.ask(Command.MEMORY_TAKE_BACK, timeout_s, count)
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
        again nor restore a process that has it."""
        return self._mailbox.state().foreign_blocks > 0

    def own(self, timeout_s: float) -> None:
        """Replaces such memory by memory of the process itself, one block after the other, copied on the GPU.

        It needs room for one block there. The job's threads are parked, its driver unlocked; `ready` comes first. Raises
        GpuFailed or Timeout: what was not replaced is still there."""
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
        if answer.status == errno.EXDEV:
            raise CannotExport(answer.text)
        if answer.status:
            raise devmem._failure(self.process, wanted, answer)
        return answer.first

    def _failed(self, what: str, why: str) -> SnapshotError:
        if not self.process.goes_on():
            return RankGone(f"process {self.process.pid} has ended", where=Where.ENDED)
        return GpuFailed(f"the device memory of process {self.process.pid} cannot {what}: {why}")


class _Reader(threading.Thread):
    """Receives descriptors while the process sends them: the kernel limits how many may be on their way. Once all are kept it
    tells the process, which then releases its memory."""

    def __init__(self, line: socket.socket, keep: Keep) -> None:
        super().__init__(name="receive device memory", daemon=True)
        self._line, self._keep = line, keep
        self._given_up = False
        self.error: SnapshotError | OSError | None = None

    def run(self) -> None:
        try:
            if self._read():
                self._line.sendall(_KEPT)
        except (SnapshotError, OSError) as error:
            self.error = error
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)  # it gives up, and releases nothing

    def _read(self) -> bool:
        """Whether everything is kept."""
        pending, complete = b"", False
        arriving = select.poll()  # not select(), which fails from descriptor 1024 on
        arriving.register(self._line, select.POLLIN)
        while not complete:
            if not arriving.poll(_LOOK_S * 1000):
                if self._given_up:
                    return False
                continue
            blob, fds, flags, _ = socket.recv_fds(self._line, BATCH * _BLOCK.size, BATCH)
            try:
                if not blob:
                    return False
                if flags & socket.MSG_CTRUNC:
                    raise GpuFailed("this daemon can open no more files: raise its limit (LimitNOFILE=)")
                pending += blob
                whole = len(pending) // _BLOCK.size * _BLOCK.size
                blocks = [HeldBlock(*fields[:3]) for fields in _BLOCK.iter_unpack(pending[:whole])]
                pending = pending[whole:]
                complete = any(not block.bytes for block in blocks)
                blocks = [block for block in blocks if block.bytes]
                if len(blocks) != len(fds):
                    raise GpuFailed(f"{len(fds)} descriptors came for {len(blocks)} blocks of device memory")
                if blocks:
                    self._keep(blocks, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        return True

    def give_up(self) -> None:
        """The process has answered, or never will: ends it."""
        self._given_up = True
        self.join()


def find(process: Process) -> Holding | None:
    """None where the library is not loaded."""
    found = shimctl.find(process)
    return Holding(found) if found is not None else None
