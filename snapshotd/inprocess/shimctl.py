"""Asks libsnapshim.so in a process to park its threads, to release them, or to empty torch's cache.

mailbox.py carries the requests. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from dataclasses import dataclass

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import abi, mailbox
from snapshotd.inprocess.abi import Command
from snapshotd.inprocess.mailbox import LIBRARY, RESERVED_SIGNAL, Answer
from snapshotd.proc import status, syscall, tree

log = logging.getLogger(__name__)

_DRIVER_THREAD = re.compile(r"cuda-EvtHandlr|cuda[0-9]{11}")
_REMEDY = "start the rank with `migrator run`, and do not clear LD_PRELOAD from its environment"


@dataclass(frozen=True)
class ShimState:
    """Whether a process's threads are parked, and what it shares with other processes on the GPU."""

    parked: bool
    threads: int
    managed: int
    exports: int
    imports: int
    moving_exports: int = 0  # of `exports` and `imports` those that can move with the rank
    moving_imports: int = 0
    server: int = 0  # that offers what is exported; 0: none
    opened_from: tuple[int, ...] = ()  # the servers of what is opened
    shared_closed: bool = False  # some of that is closed or not offered: no thread of the job may run
    imports_closed: bool = False  # all of what was opened is closed
    shared_outside: bool = False  # a process outside this one's cgroup has got something that is exported
    device_offloaded: bool = False  # its device memory is in stripes: no thread of the job may run
    foreign_blocks: int = 0  # of its device memory, which another process created
    visible: str | None = None  # CUDA_VISIBLE_DEVICES when CUDA started, "" if not set; None: not known


@dataclass(frozen=True)
class DeviceMemory:
    """The device memory that the library backs."""

    bytes: int
    blocks: int
    offloaded: bool  # the content is in stripes, the physical memory released
    done: tuple[int, ...]  # of each stripe: bytes that are in its file, or back on the device
    busy: bool  # a command is under way, perhaps one from before a restart of the daemon


@dataclass(frozen=True)
class Emptied:
    """What torch has given back."""

    released_bytes: int | None = None  # of its unused device memory; None: it was not asked, or could not
    pools_told: int = 0  # pools of torch.compile that were told to end their workers


class InDriver(Timeout):
    """Threads cannot be parked, because some do not leave the CUDA driver."""

    remedy = (
        "try again when the work that was given to the GPU is shorter; a debugger in the process says what it waits for"
    )


@dataclass(frozen=True)
class Mailbox(mailbox.Connection):
    """The library in one process, found by `find`."""

    def state(self) -> ShimState:
        """`parked` is also true while a request to park is unanswered: the process may park at any moment."""
        box = self.fields()
        ours = box.owner == self.inner_pid()
        asked = box.request != box.answer and box.command == Command.PARK
        shares = ours and box.size > abi.Offset.IPC_CLOSED
        return ShimState(
            parked=(bool(box.parked) or asked) and ours,
            threads=box.parked_threads,
            managed=box.managed_allocations,
            exports=box.ipc_exports,
            imports=box.ipc_imports,
            moving_exports=box.ipc_exports_that_move if shares else 0,
            moving_imports=box.ipc_imports_that_move if shares else 0,
            server=box.ipc_server if shares else 0,
            opened_from=tuple(server for server in box.ipc_opened_from if server) if shares else (),
            shared_closed=bool(box.ipc_closed) and shares,
            imports_closed=bool(box.ipc_closed & abi.IPC_NOT_OPEN) and shares,
            shared_outside=bool(box.ipc_outside) and shares,
            device_offloaded=bool(box.device_offloaded) and ours,
            foreign_blocks=box.device_imported if box.size > abi.Offset.DEVICE_IMPORTED else box.ipc_imports,
            visible=_visible(box) if ours else None,
        )

    def device_memory(self) -> DeviceMemory:
        """A forked child has none: its copy of the mailbox describes its parent's memory."""
        box = self.fields()
        if box.owner != self.inner_pid():
            return DeviceMemory(0, 0, False, (), False)
        done = box.device_done[: box.device_stripes]
        busy = box.request != box.answer
        return DeviceMemory(box.device_bytes, box.device_blocks, bool(box.device_offloaded), done, busy)

    def cancel_device(self, wanted: bool) -> None:
        """Sets whether a MEMORY_OFFLOAD or MEMORY_FILL, current or future, gives up."""
        self.write_word(abi.Offset.DEVICE_CANCEL, wanted)

    def park(self, timeout_s: float, *, outside_driver: bool = False) -> None:
        """Parks all threads of the job. When it raises, all of them run, or will as soon as they can.

        With `outside_driver` no thread is parked inside the CUDA driver, and in the first half of the time none that seems to
        sleep there. Raises InDriver if some threads do not leave it. Without it the driver must be locked.
        """
        try:
            answer = self.ask(Command.PARK, timeout_s, int(outside_driver))
        except Timeout:
            # The process may still park when it is continued; then it must release its threads at once.
            with contextlib.suppress(SnapshotError, OSError):
                self.post(Command.RELEASE, timeout_s)
            raise
        if answer.status == errno.EBUSY:
            raise InDriver(f"process {self.process.pid}: {answer.text}", where=Where.SOURCE_RUNNING)
        if answer.status:
            raise self._failure("its threads cannot be parked", answer)

    def release(self, timeout_s: float) -> None:
        """Releases the job's threads; they have left the handler when this returns. Idempotent."""
        answer = self.ask(Command.RELEASE, timeout_s)
        if answer.status:
            raise self._failure("its threads did not go on", answer)

    def twin(self, timeout_s: float, life_s: float) -> int:
        """Makes a process that has this one's memory as it is now, does nothing, and ends by itself after `life_s`. Returns
        its pid in this process's pid namespace."""
        try:
            answer = self.ask(Command.TWIN, timeout_s, round(life_s * 1000))
        except Timeout:
            # The process may still take the request when it is continued; it must find another one there, without effect.
            with contextlib.suppress(SnapshotError, OSError):
                self.post(Command.TRACK_CLOSE, timeout_s)
            raise
        if answer.status:
            raise self._failure("no copy of it can be made", answer)
        return answer.first

    def empty_cache(self, timeout_s: float) -> Emptied:
        """Has torch release its unused device memory and end idle compilers, at the interpreter's safe point."""
        try:
            answer = self.ask(Command.EMPTY_CACHE, timeout_s)
        except (GpuFailed, Timeout) as error:
            log.warning("torch's cache in process %d moves with it: %s", self.process.pid, error)
            return Emptied()
        if answer.status:
            log.info("torch's cache in process %d moves with it: %s", self.process.pid, answer.text)
        return Emptied(None if answer.status else answer.first, answer.second)

    def _failure(self, what: str, answer: Answer) -> SnapshotError:
        text = f"process {self.process.pid} ({mailbox.name(self.process.pid)}): {what}: {answer.text}"
        if answer.status == errno.ETIMEDOUT:
            return Timeout(
                text,
                remedy="`migrator check` names threads that can never be parked; otherwise retry when the node is less busy",
                where=Where.SOURCE_RUNNING,
            )
        return GpuFailed(text, where=Where.SOURCE_RUNNING)


def _visible(box: abi.MailboxFields) -> str | None:
    """What a library noted that is new enough to have the field."""
    noted = box.visible.partition(b"\0")[0].decode(errors="replace") if box.size >= abi.Offset.DEVICE_IMPORTED else ""
    return noted[1:] if noted[:1] in {"=", "-"} else None


def find(process: tree.Process) -> Mailbox | None:
    """The library in a process; None where it is not loaded. Raises as `mailbox.locate` does."""
    user_id = mailbox.user_of(process)
    address = mailbox.locate(process, user_id)
    return Mailbox(process, address, user_id) if address is not None else None


def problems(pid: int) -> list[str]:
    """The reasons why the threads of a process cannot be parked, as text. Changes nothing."""
    shown = f"process {pid} ({mailbox.name(pid)})"
    try:
        found = find(tree.Process.of(pid))
        if found is None:
            return [f"{shown} runs without {LIBRARY}: {_REMEDY}"]
        box = found.controlled()
        if box.parked:
            return []
        reasons = []
        if not status.read(pid).catches(RESERVED_SIGNAL):
            reasons.append(f"{shown} has replaced the handler of signal {RESERVED_SIGNAL}")
        reasons += [
            f"{shown}: thread {tid} ({name}) blocks signal {RESERVED_SIGNAL} and cannot be parked"
            for tid, name in _blocking(pid, box)
        ]
        return reasons
    except GpuFailed as error:
        return [f"{error.message} ({error.advice})"]
    except (RankGone, FileNotFoundError, ProcessLookupError):
        return [f"process {pid} has ended"]


def _blocking(pid: int, box: abi.MailboxFields) -> list[tuple[int, str]]:
    """The threads that block the reserved signal at every check: thread id in the daemon's namespace, and name. One that
    starts a process blocks all signals until it has done so; it may start many, one after the other."""
    exempt = {box.thread, box.probe, *box.exempt} - {0}
    always: set[int] | None = None
    for look in range(mailbox.LOOKS):
        if look:
            time.sleep(mailbox.LOOK_EVERY_S)
        blocking = set()
        for tid, inner in mailbox.threads(pid):
            if inner in exempt or _DRIVER_THREAD.fullmatch(mailbox.name(tid)):
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stays = tree.state(tid) not in "ZX" and not syscall.starts_a_process(pid, tid)
                if stays and status.read(pid, tid).blocks(RESERVED_SIGNAL):
                    blocking.add(tid)
        always = blocking if always is None else always & blocking
        if not always:
            return []
    return [(tid, mailbox.name(tid)) for tid in sorted(always or ())]
