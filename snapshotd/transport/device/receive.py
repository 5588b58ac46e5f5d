"""The process that receives one stripe: `python -m snapshotd.transport.device.receive`.

Invariant: what is stored was verified, and a connection continues where the stored bytes end. The newest connection wins: the
daemon passes on only connections from the move's source, and a sender that connects again has given up its previous
connection.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import Any

from snapshotd.proc.memory import OwnRoom
from snapshotd.transport.device.connection import taken_over
from snapshotd.transport.device.control_socket import Control, Ended, restrict, serve
from snapshotd.transport.device.places import FilledRing, KeptFile, Place
from snapshotd.transport.device.records import (
    HEADER_BYTES,
    Kind,
    Record,
    StripeError,
    digest_of,
    digest_of_zeros,
    error_reply,
    parse_header,
    reply,
)
from snapshotd.transport.device.ring import LOOK_S
from snapshotd.transport.sealed import Connection
from snapshotd.transport.sockets import CONNECT_S

_PROGRESS_BYTES = 32 << 20
#: How long a sender may take to close its connection after an error.
_HANG_UP_S = 5.0


class Receiver:
    def __init__(self, control: Control, place: Place) -> None:
        self._control, self._place = control, place
        self._reported = 0
        self._done = self._reported_done = self._over = False
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._current: Connection | None = None

    def run(self, expected_bytes: int) -> None:
        """Until a final error. After DONE too: a sender that did not receive it connects again."""
        threading.Thread(target=self._listen, daemon=True).start()
        # Not before a connection: if none can be made, the same bytes arrive with the image, and need the memory.
        reserving = threading.Thread(target=self._place.reserve, args=(expected_bytes,), daemon=True)
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
        connection.send(reply(Kind.HAVE, self._place.have))
        self._control.say(connected=self._place.have)
        connection.settimeout(None)  # with a time limit every read would cost a poll
        while True:
            connection.read_into(self._header)
            record = parse_header(self._header, self._place.have)
            if self._done and record.kind is not Kind.END:
                raise StripeError("damaged", f"a record at {record.offset}, after the end")
            if record.kind is Kind.END:
                self._finish()
                connection.send(reply(Kind.DONE, self._place.have))
                self._report_done()  # only now: the daemon then kills this process
            else:
                self._take_record(connection, record)

    def _take_record(self, connection: Connection, record: Record) -> None:
        while not self._place.has_room(record.length):
            if not self._arrived.empty():  # it gets an answer at once, and not only when there is room
                raise ConnectionAbortedError("there is a newer connection")
            time.sleep(LOOK_S)
        data = self._place.memory(record.length)
        if record.kind is Kind.DATA:
            connection.read_into(data)
        elif record.kind is Kind.SAME:
            self._place.repeat(record.twin, data)
        zero = record.kind is Kind.ZERO
        verified = connection.sealed and record.kind is Kind.DATA
        if not verified and (digest_of_zeros(record.length) if zero else digest_of(data)) != record.digest:
            raise StripeError("damaged", f"the record at {record.offset} arrived damaged", retry=True)
        self._place.store(record.length, zero=zero)
        if self._place.have - self._reported >= _PROGRESS_BYTES:
            self._reported = self._place.have
            self._control.mention(at=self._reported)

    def _finish(self) -> None:
        """The stripe is complete. Idempotent."""
        if not self._done:
            self._done = True
            self._place.finish()

    def _report_done(self) -> None:
        """To the daemon, which expects one message. Idempotent."""
        if not self._reported_done:
            self._reported_done = True
            self._control.say(done=True, at=self._place.have)


def receive(control: Control, settings: dict[str, Any], _fds: list[int]) -> None:
    room = OwnRoom()
    restrict(settings["path"])
    path, ring_bytes = settings["path"], settings["ring_bytes"]
    receiver = Receiver(control, FilledRing(path, ring_bytes, room) if ring_bytes else KeptFile(path, room))
    control.say(ready=True)
    receiver.run(int(settings["expected_bytes"]))


if __name__ == "__main__":
    serve(receive)
