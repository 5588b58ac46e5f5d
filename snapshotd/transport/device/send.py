"""The process that sends one stripe while it grows: `python -m snapshotd.transport.device.send`.

The daemon says how far the file has grown (by an eventfd, so that saying it never waits), hands over a connection, and
another one when that breaks; the receiver says from where to go on. One thread: it sleeps in poll.
"""

from __future__ import annotations

import os
import select
from typing import Any

from snapshotd.transport.device.connection import CONNECT_S, Connection, read_reply, taken_over
from snapshotd.transport.device.control import Control, serve
from snapshotd.transport.device.records import (
    MAX_STRIPE_BYTES,
    RECORD_BYTES,
    Buffer,
    Kind,
    Record,
    Trouble,
    digest_of,
)

#: How many records a later one may turn out to repeat: of a stripe of 32 GiB, any.
_MAX_TWINS = 1 << 15
_PROGRESS_BYTES = 32 << 20


class Sender:
    def __init__(self, control: Control, path: str, grown: int) -> None:
        self._control, self._path, self._grown = control, path, grown
        self._file = -1
        self._available = 0
        self._final: int | None = None
        self._offset = self._furthest = self._told = 0
        self._end_sent = False  # over this connection
        self._ways = {Kind.DATA: 0, Kind.ZERO: 0, Kind.SAME: 0}
        self._twins: dict[bytes, int] = {}  # the digest of a full record -> its offset
        self._buffer, self._other, self._zeros = Buffer(), Buffer(), Buffer()
        self._connections: list[Connection] = []
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(grown, select.POLLIN)

    def run(self) -> None:
        """Until the receiver has all of it, or nothing helps any more."""
        while True:
            while not self._connections:
                self._listen(None, wait=True)
            try:
                with self._connections.pop() as connection:
                    self._talk(connection)
                self._control.say(done=self._final, **self._progress())
                return
            except OSError as error:
                self._control.say(lost=str(error), code="unreachable")
            except Trouble as trouble:
                if not trouble.again:
                    raise
                self._control.say(lost=trouble.message, code=trouble.code)

    def _talk(self, connection: Connection) -> None:
        connection.settimeout(CONNECT_S)
        kind, have = read_reply(connection)
        connection.settimeout(None)
        if kind is not Kind.HAVE or have > self._furthest:
            raise Trouble("damaged", f"the target has {have} bytes of a stripe of which {self._furthest} were sent")
        self._offset, self._end_sent = have, False
        self._twins = {digest: at for digest, at in self._twins.items() if at + RECORD_BYTES <= have}
        self._control.say(connected=have)
        self._poll.register(connection, select.POLLIN)
        try:
            while True:
                length = self._due_bytes()
                end = self._offset == self._final and not self._end_sent
                if self._listen(connection, wait=not (length or end)):
                    return
                if length:
                    self._send_record(connection, length)
                elif end:
                    connection.send(Record(Kind.END, 0, self._offset).header())
                    self._end_sent = True
        finally:
            self._poll.unregister(connection)

    def _due_bytes(self) -> int:
        """Of the next record; 0: it has not grown so far, or there is none any more."""
        length = min(self._available - self._offset, RECORD_BYTES)
        return length if length == RECORD_BYTES or self._final is not None else 0

    # ------------------------------------------------------------ news

    def _listen(self, connection: Connection | None, *, wait: bool) -> bool:
        """What the daemon and the receiver have to say. True: the receiver has all of it."""
        for fd, _ in self._poll.poll(None if wait else 0):
            if fd == self._control.fileno():
                self._obey(*self._control.hear())
            elif fd == self._grown:
                grown_bytes = os.eventfd_read(self._grown)
                self._available += grown_bytes if self._final is None else 0
            elif connection is not None:
                kind, value = read_reply(connection)
                if kind is not Kind.DONE or not self._end_sent or value != self._final:
                    raise Trouble("damaged", f"the target says {kind.name} {value} in the middle of a stripe")
                return True
        return False

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            self._connections = [taken_over(fd, message)]
        if "final" in message:
            final = int(message["final"])
            if not self._furthest <= final <= MAX_STRIPE_BYTES:
                raise Trouble(
                    "damaged", f"{self._path} is said to end at {final}, {self._furthest} bytes of it were sent"
                )
            self._final = self._available = final

    def _progress(self) -> dict[str, int]:
        ways = self._ways
        return {"at": self._offset, "sent": ways[Kind.DATA], "zero": ways[Kind.ZERO], "same": ways[Kind.SAME]}

    # ------------------------------------------------------------ records

    def _send_record(self, connection: Connection, length: int) -> None:
        record = self._record(length)
        self._furthest = max(self._furthest, self._offset + length)  # before: it may arrive although sending it fails
        if record.kind is Kind.DATA:
            # From the buffer, without encryption too: sendfile takes the receiver as much as it saves here, and what is
            # sent is what was digested.
            connection.send(record.header(), self._buffer.payload[:length])
        else:
            connection.send(record.header())
        self._offset += length
        self._ways[record.kind] += length
        if self._offset - self._told >= _PROGRESS_BYTES or self._offset < self._told:
            self._told = self._offset
            self._control.mention(**self._progress())

    def _record(self, length: int) -> Record:
        """The next one; its bytes are in the buffer."""
        self._read(self._buffer, self._offset, length)
        digest = digest_of(self._buffer.payload[:length])
        if self._buffer.equals(self._zeros, length):
            return Record(Kind.ZERO, length, self._offset, 0, digest)
        if length != RECORD_BYTES:
            return Record(Kind.DATA, length, self._offset, 0, digest)
        twin = self._twins.get(digest)
        if twin is not None:
            self._read(self._other, twin, length)  # equal digests are no proof
            if self._buffer.equals(self._other, length):
                return Record(Kind.SAME, length, self._offset, twin, digest)
        elif len(self._twins) < _MAX_TWINS:
            self._twins[digest] = self._offset
        return Record(Kind.DATA, length, self._offset, 0, digest)

    def _read(self, buffer: Buffer, offset: int, length: int) -> None:
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            count = os.preadv(self._file, [buffer.payload[:length]], offset)
        except OSError as error:
            raise Trouble("internal", f"reading {self._path}: {error.strerror}") from error
        if count != length:
            raise Trouble("damaged", f"{self._path} is shorter than {offset + length} bytes, which it was said to have")


def send(control: Control, settings: dict[str, Any], fds: list[int]) -> None:
    sender = Sender(control, settings["path"], fds[0])
    control.say(ready=True)
    sender.run()


if __name__ == "__main__":
    serve(send)
