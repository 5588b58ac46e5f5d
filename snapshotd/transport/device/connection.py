"""A child's connection: received from its daemon together with its keys (sealed.py), read to the last byte asked for."""

from __future__ import annotations

import socket
from typing import Any

from snapshotd.transport.device.records import REPLY_BYTES, Kind, StripeError, parse_error, parse_reply
from snapshotd.transport.keys import Keys
from snapshotd.transport.sealed import Connection, SealedConnection, Unauthentic


class SealedStripe(SealedConnection):
    def read_into(self, view: memoryview) -> None:
        """StripeError if authentication fails; the content of `view` is then meaningless."""
        try:
            super().read_into(view)
        except Unauthentic as error:
            raise StripeError("damaged", str(error), retry=True) from error


def taken_over(fd: int, message: dict[str, Any]) -> Connection:
    """The connection that the daemon passes with `message`."""
    connected = socket.socket(fileno=fd)
    keys = Keys.of(message)
    return Connection(connected) if keys is None else SealedStripe(connected, keys)


def read_reply(connection: Connection) -> tuple[Kind, int]:
    """HAVE or DONE and its value. ERROR is raised."""
    kind, value, text_bytes = parse_reply(connection.read(REPLY_BYTES))
    text = connection.read(text_bytes) if text_bytes else b""
    if kind is Kind.ERROR:
        raise parse_error(value, text)
    return kind, value
