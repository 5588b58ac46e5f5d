"""Keeps the journal of moves: on disk, per daemon, what was begun, how far it came, and how it ended.

Invariant: an outcome is written once. It is written to a side file, fsync'd, and *linked* to its final name, so the first
writer wins permanently, also across a crash. A missing record means "not decided", never abort. If a record cannot be
written (fsync fails), the daemon exits at once: its memory might not match the disk, and the next start reads what is
really there. A full disk does not count as that: the journal then uses space that is kept for it (reserve.py).

The journal is read when it is opened, and answers from memory after that, except for the details of moves that have ended:
of those only a summary stays in memory. Every change is durable on disk before the memory changes, so an answer never
contains more than the disk.

Layout: STATE_DIR/moves/MOVE/{begin.json, marks, outcome.json, overruling.json}. `marks` has one JSON object per line.
overruling.json overrules outcome.json, see `overrule`; version 0.1 called it word.json. closed.json, where there is one,
lists closed files that the move took along or made (snapshotd/moves/closed_manifest.py). A folder removed-MOVE is what a
crash left of a move that was being removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, Unpack

import msgspec

from snapshotd.api.errors import Busy, Damaged, NotFound, Usage
from snapshotd.moves import record as records
from snapshotd.moves import summary
from snapshotd.moves.record import Begin, Fields, MoveRecord, OutcomeRecord
from snapshotd.moves.reserve import Reserve
from snapshotd.moves.rules import Mark, Outcome
from snapshotd.moves.summary import Summary
from snapshotd.proc import host
from snapshotd.runtime.spans import span

log = logging.getLogger(__name__)

MOVE_ID = re.compile(r"m-[0-9a-f]{12}")
_REMOVED = "removed-"
T = TypeVar("T")


def check_move_id(move: str) -> str:
    """Checks a move id from the wire before it is used in a path."""
    if not MOVE_ID.fullmatch(move):
        raise Usage(
            f"{move[:40]!r} is not a move id", remedy="move ids look like m-0123456789ab; see `migrator history`"
        )
    return move


class MoveLog:
    """One move in the journal. The lock orders changes inside one daemon; the link orders outcomes on disk."""

    __slots__ = ("_folder", "_reserve", "begin", "known", "lock", "outcome")  # there are thousands of them

    def __init__(
        self,
        folder: Path,
        begin: Begin,
        record: MoveRecord | None = None,
        outcome: OutcomeRecord | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self._folder = os.fspath(folder)
        self.begin = begin
        self.known: MoveRecord | Summary = record or MoveRecord()  # what is in memory
        self.outcome = outcome
        self._reserve = reserve
        self.lock = threading.Lock()

    @classmethod
    def read(cls, folder: Path, reserve: Reserve | None = None) -> MoveLog:
        """Raises Damaged when a file cannot be decoded."""
        begin = _decode(folder / "begin.json", Begin)
        outcome = _read_outcome(folder)
        return cls(folder, begin, _read_marks(folder / "marks"), outcome, reserve)

    @property
    def folder(self) -> Path:
        return Path(self._folder)

    @property
    def record(self) -> MoveRecord:
        """As `whole`, for a move that has not ended: it is in memory."""
        return self.whole()

    def whole(self) -> MoveRecord:
        """All that was journalled. Of a move that has ended it is read from the disk: blocking. Raises Damaged."""
        known = self.known
        return known if isinstance(known, MoveRecord) else _read_marks(self.folder / "marks")

    def fold(self) -> None:
        """Keeps only a summary in memory. For a move that has ended here: little is asked about it any more."""
        with self.lock:
            if isinstance(self.known, MoveRecord):
                self.known = Summary.of(self.known)
            self.begin = summary.begin_of(self.begin)
            self.outcome = summary.outcome_of(self.outcome) if self.outcome else None

    @property
    def move(self) -> str:
        return self.begin.move

    @property
    def nonce(self) -> bytes:
        return bytes.fromhex(self.begin.nonce)

    @property
    def last_mark(self) -> Mark:
        return self.known.mark or (Mark.BEGUN if self.begin.role in {"source", "job"} else Mark.PREPARED)

    @property
    def committed(self) -> bool:
        return self.outcome is not None and self.outcome.outcome is Outcome.COMMIT

    @property
    def aborted(self) -> bool:
        return self.outcome is not None and self.outcome.outcome is Outcome.ABORT

    @property
    def ended_unix_s(self) -> float:
        """When this daemon finished its part; 0 while it has not."""
        ended = self.known.mark in {Mark.SETTLED, Mark.DISCARDED, Mark.ACTIVATED}
        return self.known.marked_unix_s if ended else 0.0

    def copy_exists(self) -> bool:
        """Whether the rank's root process, or its restored copy, is still on this node."""
        return self.begin.boot_id == host.boot_id() and self.known.root.alive()

    def mark(self, mark: Mark, **fields: Unpack[Fields]) -> None:
        """Appends a mark, durably. `fields` are what a restarted daemon needs to continue from here. Blocking."""
        now = time.time()
        line = records.encode_fields({"mark": mark, "marked_unix_s": now, **fields}) + b"\n"
        with span(f"journal {mark}"), self.lock:
            _append_durably(self.folder / "marks", line, self._reserve)
            changed = {"mark": mark, "marked_unix_s": now, **fields}
            kept = {name: value for name, value in changed.items() if name in self.known.__struct_fields__}
            self.known = msgspec.structs.replace(self.known, **kept)

    def decide(self, outcome: Outcome, reason: str, decided_by: str) -> OutcomeRecord:
        """Writes the outcome unless there is one; returns the one that stands. Blocking."""
        with span(f"journal {outcome}"), self.lock:
            if self.outcome is not None:
                return self.outcome
            decided = OutcomeRecord(outcome, reason, decided_by, time.time())
            side = self.folder / f"outcome.{secrets.token_hex(4)}.new"
            _write_durably(side, records.encode(decided), self._reserve)
            with contextlib.suppress(FileExistsError):
                _durably(side, lambda: os.link(side, self.folder / "outcome.json"), self._reserve)
            os.unlink(side)
            _sync_folder(self.folder)
            standing = self.outcome = _read_outcome(self.folder)  # another writer may have been first
            assert standing is not None
            log.info("outcome of %s: %s (%s, by %s)", self.move, standing.outcome, standing.reason, standing.decided_by)
            return standing

    def overrule(self, outcome: Outcome, reason: str, decided_by: str) -> OutcomeRecord:
        """Replaces the outcome; both records are kept. Blocking.

        Only two things may: an operator's declaration (`recover --target-is-dead`), and the target's report that its copy
        died before it ever ran.
        """
        decided = OutcomeRecord(outcome, reason, decided_by, time.time())
        with self.lock:
            side, final = self.folder / "overruling.new", self.folder / "overruling.json"
            _write_durably(side, records.encode(decided), self._reserve)
            _durably(final, lambda: os.rename(side, final), self._reserve)
            _sync_folder(self.folder)
            self.outcome = decided
        log.warning("outcome of %s overruled: %s, by %s", self.move, outcome, decided_by)
        return decided


class Journal:
    """All moves this daemon took part in."""

    def __init__(self, state_dir: Path, reserve: Reserve | None = None) -> None:
        self._reserve = reserve
        self.folder = state_dir / "moves"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open: dict[str, MoveLog] = {}
        for entry in sorted(self.folder.iterdir()):
            if MOVE_ID.fullmatch(entry.name) and (entry / "begin.json").exists():
                move_log = MoveLog.read(entry, reserve)
                if move_log.ended_unix_s:
                    move_log.fold()
                self._open[move_log.move] = move_log

    def begin(self, begin: Begin) -> MoveLog:
        """Journals a move. A repeated call with the same content returns the same log. Raises Busy for other content, or if
        the disk has no room for the rest of the move. Blocking."""
        if (known := self._open.get(check_move_id(begin.move))) is not None:
            if not known.begin.same_request(begin):
                raise Busy(f"move {begin.move} is already journalled here for something else")
            return known
        if self._reserve is not None:
            self._reserve.must_be_held()
        folder = self.folder / begin.move
        _durably(folder, lambda: folder.mkdir(mode=0o700, exist_ok=True), self._reserve)
        _write_durably(folder / "begin.new", records.encode(begin), self._reserve)
        os.rename(folder / "begin.new", folder / "begin.json")
        _sync_folder(folder)
        _sync_folder(self.folder)
        self._open[begin.move] = MoveLog(folder, begin, reserve=self._reserve)
        return self._open[begin.move]

    def remove(self, move: str) -> None:
        """Forgets a move. The rename is atomic: after a crash the move is still there, complete, or gone. Blocking."""
        move_log = self.get(move)
        os.rename(move_log.folder, self.folder / f"{_REMOVED}{move}")
        _sync_folder(self.folder)
        del self._open[move]
        self.sweep_removed()

    def sweep_removed(self) -> None:
        """Deletes the files of removed moves, also those that a crash left. Blocking."""
        for folder in self.folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(folder)

    def find(self, move: str) -> MoveLog | None:
        return self._open.get(check_move_id(move))

    def get(self, move: str) -> MoveLog:
        found = self.find(move)
        if found is None:
            raise NotFound(f"move {move} is not known on this node")
        return found

    def all(self) -> list[MoveLog]:
        return sorted(self._open.values(), key=lambda entry: entry.begin.begun_unix_s)


def _read_marks(path: Path) -> MoveRecord:
    """All marks, merged in order; a last line that a crash cut short does not count."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return MoveRecord()
    merged: dict[str, Any] = {}
    try:
        for line in filter(None, lines):
            merged = {**merged, **json.loads(line)}
        return records.decode_record(merged)
    except (ValueError, TypeError) as error:
        raise _unreadable(path, error) from error


def _read_outcome(folder: Path) -> OutcomeRecord | None:
    for name in ("overruling.json", "word.json", "outcome.json"):
        with contextlib.suppress(FileNotFoundError):
            return _decode(folder / name, OutcomeRecord)
    return None


def _decode(path: Path, wanted: type[T]) -> T:
    try:
        return records.decode(path.read_bytes(), wanted)
    except (ValueError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> Damaged:
    return Damaged(
        f"the journal cannot be read: {path}: {error}. The rank of this move may be frozen on this node.",
        remedy=f"repair the file; move {path.parent} away only if `migrator ps` shows the rank running",
    )


def _crash(what: str, error: OSError) -> None:
    log.critical("the journal cannot write %s (%s): exiting; the next start reads what is on the disk", what, error)
    logging.shutdown()
    os._exit(74)


def _durably(path: Path, write: Callable[[], T], reserve: Reserve | None) -> T:
    """Runs `write`, which must be repeatable, with the reserve if the disk is full. Any other failure ends the daemon."""
    try:
        return write() if reserve is None else reserve.within(write)
    except FileExistsError:
        raise
    except OSError as error:
        _crash(str(path), error)
        raise


def _write_durably(path: Path, content: bytes, reserve: Reserve | None) -> None:
    def write() -> None:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    _durably(path, write, reserve)


def _append_durably(path: Path, content: bytes, reserve: Reserve | None) -> None:
    def write() -> None:
        with open(path, "r+b" if path.exists() else "w+b") as file:
            complete = file.read().rfind(b"\n") + 1  # a line that a crash cut short is overwritten, not continued
            file.seek(complete)
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    _durably(path, write, reserve)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        _crash(str(folder), error)
    finally:
        os.close(fd)
