"""The process that receives one stripe: `python -m snapshotd.transport.device.receive`.

Invariant: the file's size is the number of bytes that are verified and stored, so whoever reads it behind us may follow its
growth. It only grows: one whose size is not ours has another writer, and is left to it. The newest connection counts: the
daemon hands one over only to who knows the lane's key, and who connects again has given up the one before.
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
from time import monotonic
from typing import Any

from snapshotd.transport.device.connection import CONNECT_S, Connection, taken_over
from snapshotd.transport.device.control import Control, Ended, serve
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    Buffer,
    Kind,
    Record,
    Trouble,
    digest_of,
    digest_of_zeros,
    parse_header,
    reply,
    trouble_reply,
)

_PROGRESS_BYTES = 32 << 20
#: How long a sender may take to notice that its connection is over.
_HANG_UP_S = 5.0
_FALLOC_FL_KEEP_SIZE = 1
#: At a time, because nobody can write meanwhile.
_ROOM_BYTES = 64 << 20


class Receiver:
    def __init__(self, control: Control, path: str) -> None:
        self._control, self._path = control, Path(path)
        self._have = self._told = 0
        self._done = self._told_done = self._over = False
        self._buffer = Buffer()
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._current: Connection | None = None
        try:
            for left in (self._done_path, self._path):  # not truncated: an earlier try may still be read
                left.unlink(missing_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _translated(error, f"making {path}") from error

    @property
    def _done_path(self) -> Path:
        return self._path.with_name(self._path.name + ".done")

    def run(self, expected_bytes: int) -> None:
        """Until something cannot be got over: a sender that missed the last word connects again to hear it."""
        threading.Thread(target=self._listen, daemon=True).start()
        # Not before somebody has come: where nobody can, the same bytes follow with the image, and need the room.
        room = threading.Thread(target=self.take_room, args=(expected_bytes,), daemon=True)
        while not self._over:
            with self._arrived.get() as connection:
                if room.ident is None:
                    room.start()
                self._serve(connection)

    def _listen(self) -> None:
        """In a thread: the other one may hang in a connection that is dead and does not know it."""
        with contextlib.suppress(Ended):
            while True:
                message, fds = self._control.hear()
                for fd in fds:
                    connection = taken_over(fd, message)
                    with self._lock:
                        self._arrived.put(connection)
                        if self._current is not None:
                            self._current.hang_up()
        os._exit(0)

    # ------------------------------------------------------------ a connection

    def _serve(self, connection: Connection) -> None:
        """Until it ends; what has arrived stays."""
        try:
            self._take(connection)
            self._receive(connection)
        except Trouble as trouble:
            self._report(trouble)
            self._refuse(connection, trouble)
        except OSError as error:
            self._report(Trouble("unreachable", str(error), again=True))
        finally:
            with self._lock:
                self._current = None

    def _report(self, trouble: Trouble) -> None:
        """To the daemon."""
        if not trouble.again:
            self._over = True
            self._control.say(error=trouble.message, code=trouble.code)
        elif not self._told_done:
            self._control.say(lost=trouble.message, code=trouble.code)

    def _take(self, connection: Connection) -> None:
        """From now on a newer connection ends this one."""
        with self._lock:
            if not self._arrived.empty():
                raise ConnectionAbortedError("there is a newer connection")
            self._current = connection

    def _refuse(self, connection: Connection, trouble: Trouble) -> None:
        """Says why, and lets the sender hang up first: data that nobody reads would destroy what was said."""
        ends_s = monotonic() + _HANG_UP_S
        with contextlib.suppress(OSError):
            connection.settimeout(_HANG_UP_S)
            connection.send(*trouble_reply(trouble))
            while (left_s := ends_s - monotonic()) > 0:
                connection.settimeout(left_s)
                if not connection.skip(self._buffer.payload):
                    break

    def _receive(self, connection: Connection) -> None:
        connection.settimeout(CONNECT_S)
        connection.send(reply(Kind.HAVE, self._have))
        self._control.say(connected=self._have)
        connection.settimeout(None)  # with a time limit every read would cost a poll
        while True:
            connection.read_into(self._header)
            record = parse_header(self._header, self._have)
            if self._done and record.kind is not Kind.END:
                raise Trouble("damaged", f"a record at {record.offset}, after the end")
            if record.kind is Kind.DATA:
                connection.read_into(self._buffer.payload[: record.length])
            if record.kind is Kind.END:
                self._finish()
                connection.send(reply(Kind.DONE, self._have))
                self._tell_done()  # only now: the daemon ends who is done
            else:
                self._store(record, verified=connection.sealed and record.kind is Kind.DATA)

    # ------------------------------------------------------------ the file

    def _store(self, record: Record, *, verified: bool) -> None:
        data = self._buffer.payload[: record.length]
        try:
            if record.kind is Kind.SAME:
                os.preadv(self._file, [data], record.twin)
            zero = record.kind is Kind.ZERO
            if not verified and (digest_of_zeros(record.length) if zero else digest_of(data)) != record.digest:
                raise Trouble("damaged", f"the record at {record.offset} arrived damaged", again=True)
            self._check_size()
            if zero:
                os.ftruncate(self._file, self._have + record.length)
            else:
                self._write(data)
        except OSError as error:
            raise _translated(error, f"writing {self._path}") from error
        self._have += record.length
        if self._have - self._told >= _PROGRESS_BYTES:
            self._told = self._have
            self._control.mention(at=self._have)

    def _check_size(self) -> None:
        found = os.fstat(self._file).st_size
        if found != self._have:
            raise Trouble(
                "internal", f"somebody else writes {self._path}: it has {found} bytes, {self._have} came here"
            )

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):  # a disk that is nearly full takes some of it
            done += os.pwritev(self._file, [data[done:]], self._have + done)

    def _finish(self) -> None:
        """The stripe is whole. Twice is once."""
        if self._done:
            return
        try:
            with self._lock:
                self._done = True  # no more room is taken
            self._check_size()
            os.ftruncate(self._file, self._have)  # and what is left of it is given back
            fresh = self._path.with_name(self._path.name + ".fresh")
            fresh.write_text(json.dumps({"size": self._have}))
            fresh.rename(self._done_path)
        except OSError as error:
            raise _translated(error, f"finishing {self._path}") from error

    def _tell_done(self) -> None:
        """To the daemon, which waits for one word. Twice is once."""
        if not self._told_done:
            self._told_done = True
            self._control.say(done=True, at=self._have)

    def take_room(self, expected_bytes: int) -> None:
        """Ahead of the bytes, so that writing them finds its pages. In a thread; only a hint, so it never fails."""
        at = 0
        while at < expected_bytes:
            at = max(at, self._have)
            with self._lock:
                if self._done or self._over or _fallocate(self._file, _FALLOC_FL_KEEP_SIZE, at, _ROOM_BYTES):
                    return
            at += _ROOM_BYTES


def _translated(error: OSError, what: str) -> Trouble:
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    return Trouble("full" if no_room else "internal", f"{what}: {error.strerror}")


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


def receive(control: Control, settings: dict[str, Any], _fds: list[int]) -> None:
    receiver = Receiver(control, settings["path"])
    control.say(ready=True)
    receiver.run(int(settings["expected_bytes"]))


if __name__ == "__main__":
    serve(receive)
