"""Log records as entries of systemd's journal, with fields: `journalctl MOVE_ID=m-0123456789ab` shows one move.

systemd says in $JOURNAL_STREAM that stderr leads to the journal. Records then go to the journal's own socket, in its native
protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/.

Invariant: no record is lost because of this. One that the socket does not take (it is too long, or the journal is busy or
restarts) goes to stderr as text.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")
#: The fields of a move's records, by their names in snapshotd/runtime/logs.py.
FIELDS = {"move": "MOVE_ID", "rank": "RANK", "phase": "PHASE"}
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_LENGTH = struct.Struct("<Q")


def is_stderr(environment: Mapping[str, str]) -> bool:
    """Whether stderr leads to the journal: $JOURNAL_STREAM has its device and inode."""
    try:
        about = os.fstat(2)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"


def entry(fields: Mapping[str, str | int]) -> bytes:
    """One entry. Every value has its length, so that it may contain any text, also such as imitates a field."""
    encoded = bytearray()
    for name, value in fields.items():
        content = str(value).encode(errors="backslashreplace")
        encoded += name.encode() + b"\n" + _LENGTH.pack(len(content)) + content + b"\n"
    return bytes(encoded)


class JournalHandler(logging.Handler):
    def __init__(
        self,
        message: logging.Formatter,
        fields_of: Callable[[logging.LogRecord], Mapping[str, str | int]],
        always: Mapping[str, str],
        otherwise: logging.Handler,
    ) -> None:
        """`message` formats what people read, without the time. `fields_of` gives the fields of a record's move, `always` has
        those of every entry. `otherwise` takes what the journal's socket does not."""
        super().__init__()
        self.setFormatter(message)
        self._fields_of, self._always, self._otherwise = fields_of, dict(always), otherwise
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, str | int] = {
                "MESSAGE": self.format(record),
                "PRIORITY": next((level for least, level in _PRIORITIES if record.levelno >= least), 7),
                "LOGGER": record.name,
                **self._always,
                **{FIELDS[name]: value for name, value in self._fields_of(record).items()},
            }
            self._socket.sendto(entry(fields), str(SOCKET))
        except OSError:
            self._otherwise.emit(record)
        except Exception:  # noqa: BLE001  (as logging's own handlers: a record never fails its caller)
            self.handleError(record)

    def close(self) -> None:
        self._socket.close()
        super().close()
