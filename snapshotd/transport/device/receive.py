"""The process that receives one stripe: `python -m snapshotd.transport.device.receive`.

Invariant: the file's size is the number of bytes that are verified and stored, so a reader may follow its growth. It only
grows: a file of unexpected size has another writer, and is left alone. The newest connection wins: the daemon passes on only
connections from the move's source, and a sender that connects again has given up its previous connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import queue
import threading
from pathlib import Path
from typing import Any

from snapshotd.proc.memory import OwnRoom
from snapshotd.proc.room import FLOOR_BYTES, mib
from snapshotd.transport.device.connection import taken_over
from snapshotd.transport.device.control_socket import Control, Ended, restrict, serve
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    Buffer,
    Kind,
    Record,
    StripeError,
    digest_of,
    digest_of_zeros,
    error_reply,
    parse_header,
    reply,
)
from snapshotd.transport.sealed import Connection
from snapshotd.transport.sockets import CONNECT_S

_PROGRESS_BYTES = 32 << 20
#: How long a sender may take to close its connection after an error.
_HANG_UP_S = 5.0
_FALLOC_FL_KEEP_SIZE = 1
#: Reserved in one call, during which nothing can be written.
_RESERVE_BYTES = 64 << 20
#: Written between two looks at the memory that is left. The processes of the other stripes write as well.
_LOOK_BYTES = 8 << 20
#: Nothing is allocated ahead if less is left: that is only for speed.
_AHEAD_BYTES = 1 << 30


class Receiver:
    def __init__(self, control: Control, path: str, room: OwnRoom, ahead_bytes: int = 0) -> None:
        """`ahead_bytes`: the file is a window, which another process empties from its beginning; 0: all of it stays."""
        self._control, self._path, self._room, self._ahead_bytes = control, Path(path), room, ahead_bytes
        self._consumed = 0
        self._emptied = threading.Condition()
        self._have = self._reported = self._looked = 0
        self._done = self._reported_done = self._over = False
        self._buffer = Buffer()
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._current: Connection | None = None
        try:
            for left in (self._done_path, self._path):  # not truncated: a file of an earlier attempt may still be read
                left.unlink(missing_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _translated(error, f"creating {path}") from error

    @property
    def _done_path(self) -> Path:
        return self._path.with_name(self._path.name + ".done")

    def run(self, expected_bytes: int) -> None:
        """Until a final error. After DONE too: a sender that did not receive it connects again."""
        threading.Thread(target=self._listen, daemon=True).start()
        # Not before a connection: if none can be made, the same bytes arrive with the image, and need the memory.
        reserving = threading.Thread(target=self.reserve, args=(expected_bytes,), daemon=True)
        while not self._over:
            with self._arrived.get() as connection:
                if reserving.ident is None:
                    reserving.start()
                self._serve(connection)

    def _listen(self) -> None:
        """In a thread: the main thread may be blocked in a dead connection."""
        with contextlib.suppress(Ended):
            while True:
                message, fds = self._control.hear()
                with self._emptied:
                    self._consumed = max(self._consumed, int(message.get("consumed", 0)))
                    self._emptied.notify_all()
                for fd in fds:
                    connection = taken_over(fd, message)
                    with self._lock:
                        self._arrived.put(connection)
                        if self._current is not None:
                            self._current.hang_up()
        os._exit(0)

    # ------------------------------------------------------------ a connection

    def _serve(self, connection: Connection) -> None:
        """Until it ends. What has arrived stays."""
        try:
            self._take(connection)
            self._receive(connection)
        except StripeError as error:
            self._refuse(connection, error)
        except OSError as error:
            self._report(StripeError("unreachable", str(error), retry=True))
        finally:
            with self._lock:
                self._current = None

    def _report(self, error: StripeError) -> None:
        """To the daemon."""
        if not error.retry:
            self._over = True
            self._control.say(error=error.message, code=error.code)
        elif not self._reported_done:
            self._control.say(lost=error.message, code=error.code)

    def _take(self, connection: Connection) -> None:
        """From now on a newer connection ends this one."""
        with self._lock:
            if not self._arrived.empty():
                raise ConnectionAbortedError("there is a newer connection")
            self._current = connection

    def _refuse(self, connection: Connection, error: StripeError) -> None:
        """Sends the reason, then reports it: the daemon may end this process when it knows.

        Then waits until the sender closes, because a reset for unread data would overtake the reason.
        """
        with contextlib.suppress(OSError):
            connection.settimeout(_HANG_UP_S)
            connection.send(*error_reply(error))
        self._report(error)
        with contextlib.suppress(OSError):
            connection.drain(_HANG_UP_S)

    def _receive(self, connection: Connection) -> None:
        connection.settimeout(CONNECT_S)
        connection.send(reply(Kind.HAVE, self._have))
        self._control.say(connected=self._have)
        connection.settimeout(None)  # with a time limit every read would cost a poll
        while True:
            connection.read_into(self._header)
            record = parse_header(self._header, self._have)
            if self._done and record.kind is not Kind.END:
                raise StripeError("damaged", f"a record at {record.offset}, after the end")
            if record.kind is Kind.DATA:
                connection.read_into(self._buffer.payload[: record.length])
            if record.kind is Kind.END:
                self._finish()
                connection.send(reply(Kind.DONE, self._have))
                self._report_done()  # only now: the daemon then kills this process
            else:
                self._store(record, verified=connection.sealed and record.kind is Kind.DATA)

    # ------------------------------------------------------------ the file

    def _store(self, record: Record, *, verified: bool) -> None:
        data = self._buffer.payload[: record.length]
        self._await_window()
        try:
            if record.kind is Kind.SAME:
                os.preadv(self._file, [data], record.twin)
            zero = record.kind is Kind.ZERO
            if not verified and (digest_of_zeros(record.length) if zero else digest_of(data)) != record.digest:
                raise StripeError("damaged", f"the record at {record.offset} arrived damaged", retry=True)
            self._check_size()
            if zero:
                os.ftruncate(self._file, self._have + record.length)
            else:
                self._write(data)
        except OSError as error:
            raise _translated(error, f"writing {self._path}") from error
        self._have += record.length
        if self._have - self._reported >= _PROGRESS_BYTES:
            self._reported = self._have
            self._control.mention(at=self._have)

    def _await_window(self) -> None:
        """Waits until the file has room, after it was said how much is in it."""
        if self._ahead_bytes and self._have - self._consumed > self._ahead_bytes:
            self._reported = self._have
            self._control.say(at=self._have)
            with self._emptied:
                self._emptied.wait_for(lambda: self._have - self._consumed <= self._ahead_bytes)

    def _check_size(self) -> None:
        found = os.fstat(self._file).st_size
        if found != self._have:
            raise StripeError(
                "internal", f"another process writes {self._path}: it has {found} bytes, {self._have} were stored here"
            )

    def _write(self, data: memoryview) -> None:
        self._look()
        done = 0
        while done < len(data):  # a file system that is nearly full takes part of it
            done += os.pwritev(self._file, [data[done:]], self._have + done)

    def _look(self) -> None:
        """Raises before the kernel would kill processes to find memory for the file: none of them has that memory."""
        if self._have < self._looked:
            return
        limited_by, left = self._room.tightest()
        if left < FLOOR_BYTES:
            raise StripeError(
                "full",
                f"memory has run out: {limited_by} has {mib(left)} left, less than the {mib(FLOOR_BYTES)} that must stay"
                f" free, and {mib(self._have)} of {self._path.name} have arrived",
            )
        self._looked = self._have + _LOOK_BYTES

    def _finish(self) -> None:
        """The stripe is complete. Idempotent."""
        if self._done:
            return
        try:
            with self._lock:
                self._done = True  # nothing more is reserved
            self._check_size()
            os.ftruncate(self._file, self._have)  # releases what is still reserved
            if self._ahead_bytes:
                return  # a daemon that restarts must not take the rest of a window for the stripe
            fresh = self._path.with_name(self._path.name + ".fresh")
            fresh.write_text(json.dumps({"size": self._have}))
            fresh.rename(self._done_path)
        except OSError as error:
            raise _translated(error, f"finishing {self._path}") from error

    def _report_done(self) -> None:
        """To the daemon, which expects one message. Idempotent."""
        if not self._reported_done:
            self._reported_done = True
            self._control.say(done=True, at=self._have)

    def reserve(self, expected_bytes: int) -> None:
        """Allocates pages ahead of the writes. In a thread; only a hint, so it never fails."""
        at = 0
        while at < expected_bytes:
            at = max(at, self._have)
            if self._room.tightest()[1] < _AHEAD_BYTES + FLOOR_BYTES:
                return
            with self._lock:
                if self._done or self._over or _fallocate(self._file, _FALLOC_FL_KEEP_SIZE, at, _RESERVE_BYTES):
                    return
            at += _RESERVE_BYTES


def _translated(error: OSError, what: str) -> StripeError:
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    return StripeError("full" if no_room else "internal", f"{what}: {error.strerror}")


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


def receive(control: Control, settings: dict[str, Any], _fds: list[int]) -> None:
    room = OwnRoom()
    restrict(settings["path"])
    receiver = Receiver(control, settings["path"], room, int(settings.get("ahead_bytes", 0)))
    control.say(ready=True)
    receiver.run(int(settings["expected_bytes"]))


if __name__ == "__main__":
    serve(receive)
