"""Logs on stderr, as text or JSON, or in systemd's journal. Every record of a move carries its id, its rank and its phase.

Invariant: records that are logged inside `move_context` carry these fields, also from tasks and threads that are started
there. A record begins with its time. Continuation lines are indented and control characters are escaped, so that text
from another node cannot imitate a record.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from snapshotd.runtime import systemd_journal

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_fields: ContextVar[dict[str, str | int]] = ContextVar("move_fields")


@contextmanager
def move_context(*, move: str | None = None, rank: str | int | None = None, phase: str | None = None) -> Iterator[None]:
    """Adds these fields to records that are logged inside, in addition to those of the enclosing contexts."""
    given: dict[str, str | int | None] = {"move": move, "rank": rank, "phase": phase}
    token = _fields.set(move_fields() | {name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _fields.reset(token)


def move_fields() -> dict[str, str | int]:
    """The fields of the contexts that enclose the caller."""
    return _fields.get({})


def set_up(
    log_format: str = "text", log_level: str = "info", stream: TextIO | None = None, *, node: str | None = None
) -> None:
    """Configures the logging of this process and replaces all existing handlers.

    With `node`, text for the journal goes there as entries with fields; `node` is in each of them."""
    handler: logging.Handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    if node is not None and log_format == "text" and stream is None and systemd_journal.is_stderr(os.environ):
        always = {"NODE": node, "SYSLOG_IDENTIFIER": "snapshotd"}
        handler = systemd_journal.JournalHandler(MessageFormatter(), _record_fields, always, handler)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.captureWarnings(True)


class Throttle:
    """Limits the log records that one user or caller can cause: `most` in a minute. A record says how many were left out."""

    PERIOD_S = 60.0
    _MAX_CAUSES = 4096

    def __init__(self, log: logging.Logger, most: int, cause: str = "user %s") -> None:
        """`cause` describes the keys."""
        self._log, self._most, self._cause = log, most, cause
        self._counts: dict[Hashable, tuple[float, int]] = {}  # by key: when the period began, records since

    def warning(self, key: Hashable, text: str, *args: object, **options: Any) -> None:
        self.record(logging.WARNING, key, text, *args, **options)

    def info(self, key: Hashable, text: str, *args: object, **options: Any) -> None:
        self.record(logging.INFO, key, text, *args, **options)

    def record(self, level: int, key: Hashable, text: str, *args: object, **options: Any) -> None:
        now = time.monotonic()
        began, count = self._counts.get(key, (now, 0))
        left_out = max(0, count - self._most)
        if now - began > self.PERIOD_S:
            began, count = now, 0
            if left_out:
                self._log.warning(f"%d records about {self._cause} were left out", left_out, key)
        if key not in self._counts and len(self._counts) >= self._MAX_CAUSES:
            self._counts.clear()
        self._counts[key] = began, count + 1
        if count < self._most:
            self._log.log(level, text, *args, **options)
        elif count == self._most:
            self._log.warning(f"more than %d records about {self._cause} in a minute: leaving out the rest", count, key)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


class MessageFormatter(logging.Formatter):
    """`moves    m-0123456789ab rank 3 freeze: stopped 4 processes`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = _record_fields(record)
        about = [str(fields["move"])] if "move" in fields else []
        if "rank" in fields:
            about.append(f"rank {fields['rank']}")
        if "phase" in fields:
            about.append(str(fields["phase"]))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        name = record.name.removeprefix("snapshotd.")
        message = (" ".join(about) + ": " if about else "") + text
        return f"{name:<8} {_one_record(message)}"


class TextFormatter(MessageFormatter):
    """`2026-11-15T03:12:09.481Z INFO    moves    m-0123456789ab rank 3 freeze: stopped 4 processes`"""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname:<7} {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object for each line: time, level, logger, message; move, rank, phase and traceback if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_record_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _record_fields(record: logging.LogRecord) -> dict[str, str | int]:
    """The handler runs in the context of the caller that logs, so the enclosing fields are those of the record."""
    own = {name: vars(record)[name] for name in ("move", "rank", "phase") if name in vars(record)}
    return move_fields() | own


def _one_record(text: str) -> str:
    lines = ("".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n    ".join(lines)
