"""Exchanges requests and answers with libsnapshim.so inside a process, through its mailbox (shim/lib/abi.h).

There is no connection. The request is written into the process's own memory, and its control thread is woken with the
reserved signal. So nothing has to be closed before a dump, and everything works on a restored process as before. Invariant:
nothing is written and no thread is signalled before the mailbox is known to have our version and to belong to that process,
and nothing is written once the process has other users than when the conversation began.
Pids are those of the daemon's pid namespace; pids inside the mailbox are those of the process's namespace.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import abi, symbols
from snapshotd.proc import comm, foreign_memory, status, tree

log = logging.getLogger(__name__)

LIBRARY = "libsnapshim.so"
#: A process has one of them: the second, unless `migrator run --device-memory` has started it with another one.
LIBRARIES = (LIBRARY, "libsnapshim-offload.so", "libsnapshim-shared.so")
RESERVED_SIGNAL = abi.SIGNAL

_MAGIC = b"SNAPSHIM"
_REQUEST = struct.Struct("<I4Q")  # `command` and `argument`, which follow each other
_WORD = struct.Struct("<I")
#: How much longer the daemon waits than the process itself, whose own error message is more precise.
_GRACE_S = 2.0
#: How often a control thread that has not answered is signalled.
SIGNAL_AGAIN_S = 0.25
#: libc blocks all signals briefly, and the control thread starts shortly after the second thread: one check is not enough.
LOOKS, LOOK_EVERY_S = 6, 0.03

_turns: weakref.WeakValueDictionary[tree.Process, threading.RLock] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()
_control_threads: dict[tree.Process, int] = {}  # where each was found last
_CONTROL_THREADS_MAX = 4096


@dataclass(frozen=True)
class Answer:
    """The outcome of a command: 0 or an errno, its message, and two numbers that the command defines."""

    status: int
    text: str
    first: int
    second: int


@dataclass(frozen=True)
class Connection:
    """The mailbox of one process, at an address that `locate` has found.

    `user_id` is what `user_of` returned before that: an exec changes it, and keeps the process.
    """

    process: tree.Process
    address: int
    user_id: int

    def speaks_our_version(self) -> bool:
        return self.read(self.address, 12) == struct.pack("<8sI", _MAGIC, abi.ABI_VERSION)

    def serves(self) -> bool:
        """Whether the process has a control thread: a program with one thread has none."""
        return self.fields().owner == self.inner_pid()

    def fields(self) -> abi.MailboxFields:
        """The mailbox of an older library ends before the last members, and its memory may end there, too."""
        raw = self.read(self.address, abi.MAILBOX_BYTES)
        if len(raw) < abi.Offset.VISIBLE:
            raise self._lost()
        fields = abi.unpack(raw.ljust(abi.MAILBOX_BYTES, b"\0"))
        if fields.magic != _MAGIC or fields.abi != abi.ABI_VERSION:
            raise self._lost()
        return fields

    def controlled(self) -> abi.MailboxFields:
        """The mailbox, once its control thread exists: it starts shortly after the process's second thread."""
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_EVERY_S)
            fields = self.fields()
            if fields.owner == self.inner_pid() and self._control_thread(fields.thread):
                return fields
        raise GpuFailed(
            f"process {self.process.pid} ({name(self.process.pid)}) has no control thread of {LIBRARY}",
            remedy="it has a single thread, or was forked from one that has more; neither holds a GPU: try again",
        )

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Serializes requests: a mailbox has room for one request and one answer."""
        with _turns_lock:
            turn = _turns.setdefault(self.process, threading.RLock())
        with turn:
            yield

    def ask(
        self, command: abi.Command, timeout_s: float, *arguments: int, given_up: threading.Event | None = None
    ) -> Answer:
        """Sends a command, with its arguments from the second on, and waits for the answer.

        Any thread can cancel an NCCL command before its deadline by setting `given_up`. The command still answers.
        """
        with self.turn():
            fields = self._converse(command, timeout_s, *arguments, given_up=given_up)
        text = fields.text.partition(b"\0")[0].decode(errors="replace")
        return Answer(fields.status, text or (os.strerror(fields.status) if fields.status else ""), *fields.result[:2])

    def wake(self) -> None:
        """Makes the control thread check the mailbox; harmless if it contains no request."""
        self._wake(self.fields().thread)

    def read(self, address: int, size: int) -> bytes:
        try:
            return foreign_memory.read(self.process.pid, self.process.start_ticks, address, size, user_id=self.user_id)
        except PermissionError as error:
            raise _not_of(self.process, self.user_id) from error
        except OSError as error:
            raise self._lost() from error

    def write(self, address: int, data: bytes) -> None:
        try:
            foreign_memory.write(self.process.pid, self.process.start_ticks, address, data, user_id=self.user_id)
        except PermissionError as error:
            raise _not_of(self.process, self.user_id) from error
        except OSError as error:
            raise self._lost() from error

    def write_word(self, offset: abi.Offset, value: int) -> None:
        self.write(self.address + offset, _WORD.pack(value))

    def post(self, command: abi.Command, timeout_s: float, *arguments: int) -> int:
        """Sends a command without waiting. Returns the number that `answer` will have."""
        fields = self.controlled()
        number = fields.request % 0xFFFFFFFE + 1
        if number == fields.answer:
            number = number % 0xFFFFFFFE + 1
        request = _REQUEST.pack(command, max(1, round(timeout_s * 1000)), *(*arguments, 0, 0, 0)[:3])
        self.write(self.address + abi.Offset.COMMAND, request)
        self.write_word(abi.Offset.REQUEST, number)
        self._wake(fields.thread)
        return number

    def _converse(
        self, command: abi.Command, timeout_s: float, *arguments: int, given_up: threading.Event | None
    ) -> abi.MailboxFields:
        number = self.post(command, timeout_s, *arguments)
        started = signalled = time.monotonic()
        pause_s = 0.0005
        while True:
            fields = self.fields()
            if fields.answer == number:
                return fields
            now = time.monotonic()
            if now > started + timeout_s + _GRACE_S:
                raise self._silence(timeout_s)
            if given_up is not None and given_up.is_set():
                self.write_word(abi.Offset.CANCEL, number)
            if now > signalled + SIGNAL_AGAIN_S:
                self._wake(fields.thread)
                signalled = now
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.01)

    def _wake(self, inner_tid: int) -> None:
        """Signals exactly that thread: after an exec it is gone, and no other thread gets the signal."""
        tid = self._control_thread(inner_tid)
        if not tid or not self.process.signal_thread(tid, RESERVED_SIGNAL):
            raise self._lost()

    def _control_thread(self, inner_tid: int) -> int:
        """Its id here; 0 if there is none. The last one found is tried first, because listing hundreds of threads takes
        longer than the conversation itself."""
        pid, known = self.process.pid, _control_threads.get(self.process, 0)
        if known and _inner_tid(pid, known) == inner_tid:
            return known
        found = next((tid for tid, inner in threads(pid) if inner == inner_tid and tid != pid), 0)
        if found:
            with _turns_lock:
                if len(_control_threads) >= _CONTROL_THREADS_MAX:
                    _control_threads.clear()
                _control_threads[self.process] = found
        return found

    def inner_pid(self) -> int:
        try:
            return tree.inner_pid(self.process.pid)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ended(self.process.pid) from error

    def _lost(self) -> SnapshotError:
        pid = self.process.pid
        if self.process.goes_on():
            return GpuFailed(
                f"process {pid} ({name(pid)}) has replaced its program or lost {LIBRARY} during a conversation with it",
                remedy="a plain retry is safe",
            )
        return ended(pid)

    def _silence(self, timeout_s: float) -> Timeout:
        pid = self.process.pid
        letter = tree.state(pid)
        why = "it is stopped" if letter in "Tt" else f"its state is {letter or 'gone'}"
        return Timeout(
            f"the control thread of process {pid} ({name(pid)}) did not answer in {timeout_s + _GRACE_S:.0f} s: {why}",
            remedy="continue the process if it was stopped by hand; otherwise the node gives it no time to run",
            where=Where.SOURCE_RUNNING,
        )


def user_of(process: tree.Process) -> int:
    """The real user of a process, for `locate` and a Connection. Raises RankGone."""
    try:
        return status.read(process.pid).user_id
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ended(process.pid) from error


def locate(process: tree.Process, user_id: int) -> int | None:
    """The address of the mailbox in a user's process; None where the library is not loaded.

    Raises GpuFailed when it has another version of the library, a build that this node does not know, or other users;
    RankGone when it has ended; Timeout when its memory does not answer.
    """
    try:
        address = symbols.mailbox_address(process, user_id, LIBRARIES)
        if address is None and process.goes_on():
            return None
        if address and Connection(process, address, user_id).speaks_our_version():
            return address
    except ValueError as error:
        log.debug("%s in process %d: %s", LIBRARY, process.pid, error)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ended(process.pid) from error
    except PermissionError as error:
        raise _not_of(process, user_id) from error
    if not process.goes_on():
        raise ended(process.pid)
    raise GpuFailed(
        f"process {process.pid} ({name(process.pid)}) has another version of {LIBRARY} than this daemon speaks to",
        remedy="start the job with the `migrator run` of this node's installation; after an upgrade, restart the job;"
        " until then it stays where it is",
    )


def _not_of(process: tree.Process, user_id: int) -> SnapshotError:
    pid = process.pid
    if not process.goes_on():
        return ended(pid)
    return GpuFailed(
        f"process {pid} ({name(pid)}) has privileges beyond those of user {user_id}, or is not dumpable: nothing was written"
        " into its memory",
        remedy="the process goes on; it executed a set-user-id or set-group-id program, one with file capabilities, or one"
        " whose file its user cannot read, or called prctl(PR_SET_DUMPABLE): let the rank do this in another process",
        where=Where.UNKNOWN,
    )


def ended(pid: int) -> RankGone:
    return RankGone(f"process {pid} has ended", where=Where.ENDED)


def threads(pid: int) -> list[tuple[int, int]]:
    """The threads of a process: their ids here, and in its own pid namespace."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [(task, inner) for task in map(int, tasks) if (inner := _inner_tid(pid, task))]


def _inner_tid(pid: int, thread: int) -> int:
    """The id of one of its threads in its own pid namespace; 0 if the process has no such thread."""
    try:
        return status.read(pid, thread).inner_pid
    except (FileNotFoundError, ProcessLookupError):
        return 0


def name(pid: int) -> str:
    return comm.name_or(pid, "gone")
