"""The process that sends one stripe while it grows: `python -m snapshotd.transport.device.send`.

The daemon reports how far the file has grown (through an eventfd, so that reporting never blocks), and passes a connection,
and another one when that breaks. A ring says itself how much it has, once anything was reported. The receiver tells where to
continue. One thread, which sleeps in poll.
"""

from __future__ import annotations

import os
import select
from typing import Any

from snapshotd.transport.device.connection import read_reply, taken_over
from snapshotd.transport.device.control_socket import Control, restrict, serve
from snapshotd.transport.device.records import (
    MAX_STRIPE_BYTES,
    RECORD_BYTES,
    Buffer,
    Kind,
    Record,
    StripeError,
    digest_of,
    digest_of_zeros,
    equal,
)
from snapshotd.transport.device.sources import GrowingFile, SentRing, Source
from snapshotd.transport.sealed import Connection
from snapshotd.transport.sockets import CONNECT_S

#: How many records are remembered to find repetitions: all of a stripe of 32 GiB.
_MAX_TWINS = 1 << 16
_PROGRESS_BYTES = 32 << 20
#: How many records are sent between two looks for messages. An error of the receiver ends the connection at once.
_LISTEN_RECORDS = 16
#: How often to look whether a ring has more, where it had nothing.
_LOOK_MS = 1


class Sender:
    def __init__(self, control: Control, path: str, grown: int, source: Source) -> None:
        self._control, self._path, self._grown, self._source = control, path, grown, source
        self._announced = 0
        self._final: int | None = None
        self._offset = self._furthest = self._reported = 0
        self._end_sent = False  # over this connection
        self._unheard = 0  # records that were sent since the last look for messages
        self._ways = {Kind.DATA: 0, Kind.ZERO: 0, Kind.SAME: 0}
        self._twins: dict[bytes, int] = {}  # digest of a full record -> its offset
        self._buffer, self._other, self._zeros = Buffer(), Buffer(), Buffer()
        self._connections: list[Connection] = []
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(grown, select.POLLIN)

    def run(self) -> None:
        """Until the receiver has everything, or a final error."""
        while True:
            while not self._connections:
                self._listen(None, None)
            try:
                with self._connections.pop() as connection:
                    self._talk(connection)
                self._control.say(done=self._final, **self._progress())
                return
            except OSError as error:
                self._control.say(lost=str(error), code="unreachable")
            except StripeError as error:
                if not error.retry:
                    raise
                self._control.say(lost=error.message, code=error.code)

    def _talk(self, connection: Connection) -> None:
        connection.settimeout(CONNECT_S)
        kind, have = read_reply(connection)
        connection.settimeout(None)
        self._source.must_have(have)
        if kind is not Kind.HAVE or have > self._furthest:
            raise StripeError("damaged", f"the target has {have} bytes of a stripe of which {self._furthest} were sent")
        self._offset, self._end_sent = have, False
        self._twins = {digest: at for digest, at in self._twins.items() if at + RECORD_BYTES <= have}
        self._control.say(connected=have)
        self._poll.register(connection, select.POLLIN)
        try:
            while True:
                length = self._due_bytes()
                end = self._offset == self._final and not self._end_sent
                if self._unheard >= _LISTEN_RECORDS or not length:
                    self._unheard = 0
                    if self._listen(connection, 0 if length or end else self._patience_ms()):
                        return
                if length:
                    self._unheard += 1
                    self._send_record(connection, length)
                elif end:
                    connection.send(Record(Kind.END, 0, self._offset).header())
                    self._end_sent = True
        finally:
            self._poll.unregister(connection)

    def _due_bytes(self) -> int:
        """Length of the next record; 0 if there is not enough for one yet, or there is none any more."""
        available = self._source.available(self._announced)
        if self._final is not None:
            return min(self._final - self._offset, available - self._offset, RECORD_BYTES)
        return RECORD_BYTES if available - self._offset >= RECORD_BYTES else 0

    def _patience_ms(self) -> int | None:
        """How long to wait for a message. A ring has more without one, once it is there."""
        waits_for_ring = self._source.window_bytes and self._announced and self._offset != self._final
        return _LOOK_MS if waits_for_ring else None

    # ------------------------------------------------------------ messages

    def _listen(self, connection: Connection | None, wait_ms: int | None) -> bool:
        """Handles messages of the daemon and the receiver. True when the receiver has everything. None: waits for one."""
        for fd, _ in self._poll.poll(wait_ms):
            if fd == self._control.fileno():
                self._dispatch(*self._control.hear())
            elif fd == self._grown:
                grown_bytes = os.eventfd_read(self._grown)
                self._announced += grown_bytes if self._final is None else 0
            elif connection is not None:
                kind, value = read_reply(connection)
                if kind is not Kind.DONE or not self._end_sent or value != self._final:
                    raise StripeError("damaged", f"the target sent {kind.name} {value} in the middle of a stripe")
                return True
        return False

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            self._connections = [taken_over(fd, message)]
        if "final" in message:
            final = int(message["final"])
            if not self._furthest <= final <= MAX_STRIPE_BYTES:
                raise StripeError(
                    "damaged", f"{self._path} should end at {final}, but {self._furthest} bytes of it were sent"
                )
            self._final = self._announced = final

    def _progress(self) -> dict[str, int]:
        ways = self._ways
        return {"at": self._offset, "sent": ways[Kind.DATA], "zero": ways[Kind.ZERO], "same": ways[Kind.SAME]}

    # ------------------------------------------------------------ records

    def _send_record(self, connection: Connection, length: int) -> None:
        record, data = self._record(length)
        self._furthest = max(
            self._furthest, self._offset + length
        )  # before sending: it may arrive although the call fails
        if record.kind is Kind.DATA:
            # From memory, also without encryption: sendfile costs the receiver as much as it saves here, and the bytes
            # that are sent must be those that were digested.
            connection.send(record.header(), data)
        else:
            connection.send(record.header())
        self._source.must_have(self._offset)  # else the target has something else, and this is a defect
        self._offset += length
        self._source.sent(self._offset)
        self._ways[record.kind] += length
        if self._offset - self._reported >= _PROGRESS_BYTES or self._offset < self._reported:
            self._reported = self._offset
            self._control.mention(**self._progress())

    def _record(self, length: int) -> tuple[Record, memoryview]:
        """The next record, and its bytes."""
        data = self._source.read(self._buffer, self._offset, length)
        digest = digest_of(data)
        if digest == digest_of_zeros(length) and equal(data, self._zeros.payload[:length]):
            return Record(Kind.ZERO, length, self._offset, 0, digest), data
        if length != RECORD_BYTES:
            return Record(Kind.DATA, length, self._offset, 0, digest), data
        twin, window_bytes = self._twins.get(digest), self._source.window_bytes
        if twin is not None and window_bytes and self._offset - twin > window_bytes:
            self._twins[digest] = self._offset  # the target may have removed the other one
        elif twin is not None:  # equal digests prove nothing
            if equal(data, self._source.read(self._other, twin, length)):
                return Record(Kind.SAME, length, self._offset, twin, digest), data
        elif len(self._twins) < _MAX_TWINS:
            self._twins[digest] = self._offset
        return Record(Kind.DATA, length, self._offset, 0, digest), data


def send(control: Control, settings: dict[str, Any], fds: list[int]) -> None:
    restrict(settings["path"])
    path = settings["path"]
    sender = Sender(control, path, fds[0], SentRing(path) if settings["ring"] else GrowingFile(path))
    control.say(ready=True)
    sender.run()


if __name__ == "__main__":
    serve(send)
