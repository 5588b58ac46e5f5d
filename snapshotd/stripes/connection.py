"""A child's connection: taken over from its daemon, encrypted where that is wanted, read to the last byte asked for.

The daemon has opened it, tuned it (images/wire.py) and seen the lane's key; here the certificates are shown. Not wire.py's
own functions, because that file brings gRPC along, most of what a child would weigh.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from snapshotd.stripes.records import REPLY_BYTES, Kind, Trouble, parse_reply, parse_trouble

#: How long the other end may take to show its certificate, and for its first word.
CONNECT_S = 3.0


@dataclass(frozen=True)
class Identity:
    """The three PEM files, and who must be at the other end: a node's name here, a certificate's common name there."""

    ca: str
    cert: str
    key: str
    peer: str

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if server_side:
            context.num_tickets = 0  # nobody resumes, and a ticket would look like a reply
        try:
            context.load_cert_chain(self.cert, self.key)
            context.load_verify_locations(self.ca)
        except OSError as error:  # ssl.SSLError is one
            raise Trouble("bad-config", f"{self.cert}, {self.key} or {self.ca} cannot be used: {error}") from error
        return context


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fills `view`. An end without a word is a ConnectionError."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    done = 0
    # TLS hands over a record of its own at a time, 16 KiB at most. Large reads into an ssl.MemoryBIO save system calls and
    # spend as much on copying; at the sending end they cost a quarter more.
    while done < len(view):
        count = connection.recv_into(view[done:], 0, flags)
        if not count:
            raise ConnectionResetError("the connection ended without a word")
        done += count


def read_reply(connection: socket.socket) -> tuple[Kind, int]:
    """HAVE or DONE and its value; TROUBLE is raised."""
    kind, value, text_bytes = parse_reply(_read(connection, REPLY_BYTES))
    text = _read(connection, text_bytes)
    if kind is Kind.TROUBLE:
        raise parse_trouble(value, text)
    return kind, value


def _read(connection: socket.socket, count_bytes: int) -> bytes:
    blob = bytearray(count_bytes)
    read_into(connection, memoryview(blob))
    return bytes(blob)


def common_name(connection: ssl.SSLSocket) -> str:
    subject: Any = (connection.getpeercert() or {}).get("subject", ())  # a tuple of tuples of pairs
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else f"{names!r}"


def hang_up(connection: socket.socket) -> None:
    """Ends a connection under the hands of the thread that reads it. Not SSLSocket.shutdown: it takes the encryption off."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
