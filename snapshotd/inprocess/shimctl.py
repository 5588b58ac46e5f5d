"""Speaks to libsnapshim.so inside a process: parks its threads, lets them go, empties torch's cache.

There is no connection: the request is written into the process's own memory (`snapshim_mailbox`, see shim/lib/abi.h) and its
control thread is woken with the reserved signal, so nothing of it has to be closed before a dump and all of it works on a
restored process as before. Invariant: nothing is written and nobody is signalled before the mailbox was seen to be ours,
of our version, and owned by that very process. Pids are the daemon's; those inside the mailbox are mapped by NSpid.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import GpuFailed, RankGone, SnapshotError, Timeout, Where
from snapshotd.inprocess import symbols
from snapshotd.proc import tree

_LOG = logging.getLogger(__name__)

LIBRARY = "libsnapshim.so"
#: A process has one of them: the second, unless `migrator run --device-memory driver` has started it.
LIBRARIES = (LIBRARY, "libsnapshim-offload.so")
ABI_VERSION = 4
RESERVED_SIGNAL = 61

_MAGIC = b"SNAPSHIM"
_PARK, _RELEASE, _EMPTY_CACHE = 1, 2, 3
#: struct snapshim_mailbox
_LAYOUT = struct.Struct("<8sII iii II I4Q II i I 4Q 512s 3Q 64i 2Q II 16Q II")
_COMMAND = struct.Struct("<I4Q")
_COMMAND_AT, _REQUEST_AT, _CANCEL_AT = 36, 72, 1064
_GIVE_UP_AT = 84  # `cancel`
#: How much longer than the process itself we wait for its answer: it has the better words for what went wrong.
_GRACE_S = 2.0
#: How often a control thread that has not answered is signalled.
SIGNAL_AGAIN_S = 0.25
#: A thread is called unparkable when it blocks the signal at every look: libc blocks all for moments.
_LOOKS, _LOOK_EVERY_S = 6, 0.03
_DRIVER_THREAD = re.compile(r"cuda-EvtHandlr|cuda[0-9]{11}")
_OURS = "start the rank with `migrator run`, and do not clear LD_PRELOAD from its environment"

_libc = ctypes.CDLL(None, use_errno=True)
_turns: weakref.WeakValueDictionary[tree.Process, threading.RLock] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


@dataclass(frozen=True)
class Parking:
    """What the mailbox says of a process: whether its threads are parked, and what it shares with others on the GPU."""

    parked: bool
    threads: int
    managed: int
    exports: int
    imports: int
    device_parked: bool = False  # its device memory is out: no thread of the job may run


@dataclass(frozen=True)
class DeviceMemory:
    """What the mailbox says of the device memory that the library backs."""

    bytes: int
    blocks: int
    parked: bool  # the content is in stripes, the physical memory released
    done: tuple[int, ...]  # of each stripe: bytes that are in its file, or back on the device
    busy: bool  # a command is under way, perhaps one of an earlier life of the daemon


@dataclass(frozen=True)
class Answer:
    """What a command came to: 0 or an errno, words for it, and two numbers that the command defines."""

    status: int
    words: str
    first: int
    second: int


@dataclass(frozen=True)
class _Box:
    """The mailbox as it was at one moment."""

    magic: bytes
    abi: int
    owner: int
    thread: int
    probe: int
    parked: int
    parked_threads: int
    command: int
    request: int
    answer: int
    status: int
    result: tuple[int, int]
    text: str
    managed: int
    exports: int
    imports: int
    exempt: frozenset[int]
    device_bytes: int
    device_blocks: int
    device_parked: int
    device_stripes: int
    device_done: tuple[int, ...]
    device_cancel: int

    @classmethod
    def unpack(cls, raw: bytes) -> _Box:
        field = _LAYOUT.unpack(raw)
        magic, abi, _bytes, owner, thread, probe, parked, parked_threads, command = field[:9]
        request, answer, status, _cancel = field[13:17]
        result = field[17:19]
        text = field[21].partition(b"\0")[0].decode(errors="replace")
        managed, exports, imports = field[22:25]
        return cls(
            *(magic, abi, owner, thread, probe, parked, parked_threads, command, request, answer, status, result, text),
            *(managed, exports, imports, frozenset(field[25:89]) - {0}),
            *(*field[89:93], field[93:109], field[109]),
        )


class InDriver(Timeout):
    """Threads cannot be parked, because some do not leave the CUDA driver."""

    remedy = (
        "try again when the work that was given to the GPU is shorter; a debugger in the process says what it waits for"
    )


@dataclass(frozen=True)
class Mailbox:
    """The mailbox of one process, found by `find`."""

    process: tree.Process
    address: int

    def speaks_our_version(self) -> bool:
        with self._memory(os.O_RDONLY) as memory:
            return os.pread(memory, 12, self.address) == struct.pack("<8sI", _MAGIC, ABI_VERSION)

    def serves(self) -> bool:
        """Whether the process has a control thread: a program with one thread has none."""
        return self._read().owner == _inner(self.process)

    def state(self) -> Parking:
        """`parked` is true as well while the process has been asked to park and has not answered: it may at any moment."""
        box = self._read()
        asked = box.request != box.answer and box.command == _PARK
        return Parking(
            parked=(bool(box.parked) or asked) and box.owner == _inner(self.process),
            threads=box.parked_threads,
            managed=box.managed,
            exports=box.exports,
            imports=box.imports,
            device_parked=bool(box.device_parked) and box.owner == _inner(self.process),
        )

    def device_memory(self) -> DeviceMemory:
        """A forked child's copy of the mailbox tells of its parent's memory: it has none."""
        box = self._read()
        if box.owner != _inner(self.process):
            return DeviceMemory(0, 0, False, (), False)
        done = box.device_done[: box.device_stripes]
        busy = box.request != box.answer
        return DeviceMemory(box.device_bytes, box.device_blocks, bool(box.device_parked), done, busy)

    def cancel_device(self, wanted: bool) -> None:
        """Whether a MEMORY_PARK or MEMORY_FILL, under way or to come, gives up."""
        self.write(self.address + _CANCEL_AT, struct.pack("<I", wanted))

    def wake(self) -> None:
        """The control thread looks into the mailbox. Also where there is nothing to see."""
        self._wake(self._read())

    def park(self, timeout_s: float, *, outside_driver: bool = False) -> None:
        """No thread of the job runs when this returns. When it raises, all of them run, or will as soon as they can.
        `outside_driver`: none is parked inside the CUDA driver, and in the first half of the time none that seems to sleep
        there; without, the driver is locked. InDriver: some do not leave it."""
        try:
            box = self._ask(_PARK, timeout_s, int(outside_driver))
        except Timeout:
            # It may still do it, when it is continued: then it is to let go at once.
            with contextlib.suppress(SnapshotError, OSError):
                self._write_request(_RELEASE, timeout_s)
            raise
        if box.status == errno.EBUSY:
            raise InDriver(f"process {self.process.pid}: {box.text}", where=Where.SOURCE_RUNNING)
        if box.status:
            raise self._failure("threads cannot be parked", box)

    def release(self, timeout_s: float) -> None:
        """Lets the job's threads go on; they have left when this returns. Not parked: nothing happens."""
        box = self._ask(_RELEASE, timeout_s)
        if box.status:
            raise self._failure("threads did not go on", box)

    def empty_cache(self, timeout_s: float) -> int | None:
        """Gives torch's unused device memory back, at the interpreter's safe point. How many bytes; None: skipped."""
        try:
            box = self._ask(_EMPTY_CACHE, timeout_s)
        except (GpuFailed, Timeout) as error:
            _LOG.warning("torch's cache in process %d is moved along: %s", self.process.pid, error)
            return None
        if box.status:
            reason = box.text or os.strerror(box.status)
            _LOG.info("torch's cache in process %d is moved along: %s", self.process.pid, reason)
            return None
        return box.result[0]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One conversation at a time: a mailbox has room for one request and one answer."""
        with _turns_lock:
            turn = _turns.setdefault(self.process, threading.RLock())
        with turn:
            yield

    def ask(self, command: int, timeout_s: float, *arguments: int, given_up: threading.Event | None = None) -> Answer:
        """Another part's command (ncclctl.py, devmem.py), with its arguments from the second on. One of
        NCCL's can be given up before its time: it is told so when `given_up` is set, by any thread, and answers as ever."""
        box = self._ask(command, timeout_s, *arguments, given_up=given_up)
        return Answer(box.status, box.text or (os.strerror(box.status) if box.status else ""), *box.result)

    def read(self, address: int, size: int) -> bytes:
        with self._memory(os.O_RDONLY) as memory:
            return os.pread(memory, size, address)

    def write(self, address: int, data: bytes) -> None:
        with self._memory(os.O_RDWR) as memory:
            os.pwrite(memory, data, address)

    def _failure(self, what: str, box: _Box) -> SnapshotError:
        words = f"process {self.process.pid} ({_name(self.process.pid)}): {what}: {box.text or os.strerror(box.status)}"
        if box.status == errno.ETIMEDOUT:
            return Timeout(
                words,
                remedy="`migrator check` names threads that can never be parked; else try again, when the node is less busy",
                where=Where.SOURCE_RUNNING,
            )
        return GpuFailed(words, where=Where.SOURCE_RUNNING)

    def _ask(self, command: int, timeout_s: float, *arguments: int, given_up: threading.Event | None = None) -> _Box:
        with self.turn():
            return self._converse(command, timeout_s, *arguments, given_up=given_up)

    def _converse(self, command: int, timeout_s: float, *arguments: int, given_up: threading.Event | None) -> _Box:
        number = self._write_request(command, timeout_s, *arguments)
        started = signalled = time.monotonic()
        pause_s = 0.0005
        while True:
            box = self._read()
            if box.answer == number:
                return box
            now = time.monotonic()
            if now > started + timeout_s + _GRACE_S:
                raise self._silence(timeout_s)
            if given_up is not None and given_up.is_set():
                self.write(self.address + _GIVE_UP_AT, struct.pack("<I", number))
            if now > signalled + SIGNAL_AGAIN_S:
                self._wake(box)
                signalled = now
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.01)

    def controlled(self) -> _Box:
        """The mailbox, once its control thread is there: it starts a moment after the process's second thread."""
        for look in range(_LOOKS):
            if look:
                time.sleep(_LOOK_EVERY_S)
            box = self._read()
            if box.owner == _inner(self.process) and any(
                inner == box.thread for _, inner in _threads(self.process.pid)
            ):
                return box
        raise GpuFailed(
            f"process {self.process.pid} ({_name(self.process.pid)}) has no control thread of {LIBRARY}",
            remedy="it has a single thread, or was forked from one that has more; neither holds a GPU: try again",
        )

    def _write_request(self, command: int, timeout_s: float, *arguments: int) -> int:
        box = self.controlled()
        number = box.request % 0xFFFFFFFE + 1
        if number == box.answer:
            number = number % 0xFFFFFFFE + 1
        with self._memory(os.O_RDWR) as memory:
            wanted = _COMMAND.pack(command, max(1, round(timeout_s * 1000)), *(*arguments, 0, 0, 0)[:3])
            os.pwrite(memory, wanted, self.address + _COMMAND_AT)
            os.pwrite(memory, struct.pack("<I", number), self.address + _REQUEST_AT)
        self._wake(box)
        return number

    def _wake(self, box: _Box) -> None:
        """A thread-directed signal: after an exec the thread is gone, and nobody is hit."""
        pid = self.process.pid
        tid = next((tid for tid, inner in _threads(pid) if inner == box.thread and tid != pid), 0)
        if not tid or not self.process.alive():
            raise self._gone()
        if _libc.tgkill(pid, tid, RESERVED_SIGNAL) == -1 and ctypes.get_errno() == errno.ESRCH:
            raise self._gone()

    def _read(self) -> _Box:
        with self._memory(os.O_RDONLY) as memory:
            raw = os.pread(memory, _LAYOUT.size, self.address)
        if len(raw) < _LAYOUT.size:
            raise self._gone()
        box = _Box.unpack(raw)
        if box.magic != _MAGIC or box.abi != ABI_VERSION:
            raise self._gone()
        return box

    @contextlib.contextmanager
    def _memory(self, flags: int) -> Iterator[int]:
        try:
            memory = os.open(f"/proc/{self.process.pid}/mem", flags | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise self._gone() from error
        try:
            if not self.process.alive():
                raise self._gone()
            yield memory
        except OSError as error:
            raise self._gone() from error
        finally:
            os.close(memory)

    def _gone(self) -> SnapshotError:
        pid = self.process.pid
        if self.process.alive():
            return GpuFailed(
                f"process {pid} ({_name(pid)}) has replaced its program, or lost {LIBRARY}, while it was being spoken to",
                remedy="a plain retry is safe",
            )
        return RankGone(f"process {pid} has ended", where=Where.ENDED)

    def _silence(self, timeout_s: float) -> Timeout:
        pid = self.process.pid
        letter = tree.state(pid)
        why = "it is stopped" if letter in "Tt" else f"its state is {letter or 'gone'}"
        return Timeout(
            f"the control thread of process {pid} ({_name(pid)}) did not answer in {timeout_s + _GRACE_S:.0f} s: {why}",
            remedy="continue the process if it was stopped by hand; else the node gives it no time to run",
            where=Where.SOURCE_RUNNING,
        )


def find(process: tree.Process) -> Mailbox | None:
    """The mailbox of a process, None where the library is not loaded.

    Raises GpuFailed when a library of another version is, RankGone when the process has ended.
    """
    try:
        places = (symbols.address(process.pid, library, b"snapshim_mailbox") for library in LIBRARIES)
        address = next((place for place in places if place is not None), None)
        if address is None and process.alive():
            return None
        mailbox = Mailbox(process, address) if address else None
        if mailbox and mailbox.speaks_our_version():
            return mailbox
    except (LookupError, ValueError, OverflowError, struct.error) as error:
        _LOG.debug("%s in process %d: %s", LIBRARY, process.pid, error)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise RankGone(f"process {process.pid} has ended", where=Where.ENDED) from error
    if not process.alive():
        raise RankGone(f"process {process.pid} has ended", where=Where.ENDED)
    raise GpuFailed(
        f"process {process.pid} ({_name(process.pid)}) has another version of {LIBRARY} than this daemon speaks to",
        remedy="restart the job after an upgrade; until then it stays where it is",
    )


def problems(pid: int) -> list[str]:
    """What would keep the threads of a process from being parked, in words. Nothing is changed."""
    who = f"process {pid} ({_name(pid)})"
    try:
        mailbox = find(tree.Process.of(pid))
        if mailbox is None:
            return [f"{who} runs without {LIBRARY}: {_OURS}"]
        box = mailbox.controlled()
        if box.parked:
            return []
        found = []
        if not _signal_bit(f"/proc/{pid}/status", "SigCgt"):
            found.append(f"{who} has taken the handler of signal {RESERVED_SIGNAL} away")
        found += [
            f"{who}: thread {tid} ({name}) blocks signal {RESERVED_SIGNAL} and cannot be parked"
            for tid, name in _blocking(pid, box)
        ]
        return found
    except GpuFailed as error:
        return [f"{error.message} ({error.advice})"]
    except (RankGone, FileNotFoundError, ProcessLookupError):
        return [f"process {pid} has ended"]


def _blocking(pid: int, box: _Box) -> list[tuple[int, str]]:
    """The threads that block the reserved signal at every look, by the daemon's thread id and their name."""
    always: set[int] | None = None
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_EVERY_S)
        blocking = set()
        for tid, inner in _threads(pid):
            if inner in {box.thread, box.probe} or inner in box.exempt or _DRIVER_THREAD.fullmatch(_name(tid)):
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if _signal_bit(f"/proc/{pid}/task/{tid}/status", "SigBlk") and tree.state(tid) not in "ZX":
                    blocking.add(tid)
        always = blocking if always is None else always & blocking
        if not always:
            return []
    return [(tid, _name(tid)) for tid in sorted(always or ())]


def _signal_bit(status: str, field: str) -> bool:
    for line in Path(status).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return bool(int(line.split()[1], 16) >> (RESERVED_SIGNAL - 1) & 1)
    return False


def _threads(pid: int) -> list[tuple[int, int]]:
    """The threads of a process: their ids here, and in its own pid namespace."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append((int(task), tree.inner_pid(int(task))))
    return found


def _inner(process: tree.Process) -> int:
    try:
        return tree.inner_pid(process.pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise RankGone(f"process {process.pid} has ended", where=Where.ENDED) from error


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
