"""The journal of moves: on disk, per daemon, what was begun, how far it came, and how it ended.

Invariant: an outcome is written once. It is written to a side file, fsync'd, and *linked* to its final name, so the first
writer wins, for ever, also against a crash in between. A missing record means "not decided", never abort. If the
disk does not take a record (fsync fails) the daemon ends at once: what it would say from memory could be a lie, and the
next start reads again what is really there.

Layout: STATE_DIR/moves/MOVE/{begin.json, marks, outcome.json, word.json}; the last is a word that
stands above the outcome, see `overrule`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snapshotd.api.errors import Busy, NotFound, Usage
from snapshotd.moves.rules import Mark, Outcome

log = logging.getLogger(__name__)

MOVE_ID = re.compile(r"m-[0-9a-f]{12}")


def check_move_id(move: str) -> str:
    """A move id from the wire, before it touches a path."""
    if not MOVE_ID.fullmatch(move):
        raise Usage(
            f"{move[:40]!r} is not a move id", remedy="move ids look like m-0123456789ab; see `migrator history`"
        )
    return move


@dataclass(frozen=True)
class Begin:
    """What a daemon must know about a move for as long as it may have to be settled."""

    move: str
    role: str  # "source" | "target"
    rank_uid: str
    job: str
    rank: int
    source_node: str
    source_endpoint: str
    target_node: str
    target_endpoint: str
    nonce: str  # hex
    boot_id: str
    begun_unix_s: float
    lease_s: float = 0.0


@dataclass(frozen=True)
class OutcomeRecord:
    outcome: Outcome
    reason: str
    decided_by: str
    unix_s: float


class MoveLog:
    """One move in the journal. The lock orders decisions inside one daemon; the link orders them on disk."""

    def __init__(self, folder: Path, begin: Begin) -> None:
        self.folder = folder
        self.begin = begin
        self.lock = threading.Lock()

    @property
    def move(self) -> str:
        return self.begin.move

    @property
    def nonce(self) -> bytes:
        return bytes.fromhex(self.begin.nonce)

    def mark(self, mark: Mark, **notes: Any) -> None:
        """Appends a mark, durably. `notes` is what a restart needs to carry on from here."""
        line = json.dumps({"mark": mark, "unix_s": time.time(), **notes}) + "\n"
        with self.lock:
            _append_durably(self.folder / "marks", line.encode())

    def marks(self) -> list[dict[str, Any]]:
        """All marks in order; a last line that a crash cut short does not count."""
        try:
            text = (self.folder / "marks").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    @property
    def last_mark(self) -> Mark:
        marks = self.marks()
        return Mark(marks[-1]["mark"]) if marks else (Mark.BEGUN if self.begin.role == "source" else Mark.PREPARED)

    def note(self, key: str, default: Any = None) -> Any:
        """The newest note of that name in any mark."""
        for entry in reversed(self.marks()):
            if key in entry:
                return entry[key]
        return default

    @property
    def outcome(self) -> OutcomeRecord | None:
        for name in ("word.json", "outcome.json"):
            try:
                fields = json.loads((self.folder / name).read_text())
            except FileNotFoundError:
                continue
            return OutcomeRecord(Outcome(fields["outcome"]), fields["reason"], fields["decided_by"], fields["unix_s"])
        return None

    def decide(self, outcome: Outcome, reason: str, decided_by: str) -> OutcomeRecord:
        """Writes the outcome unless there is one; returns the one that stands."""
        with self.lock:
            if (standing := self.outcome) is not None:
                return standing
            record = OutcomeRecord(outcome, reason, decided_by, time.time())
            side = self.folder / f"outcome.{secrets.token_hex(4)}.new"
            _write_durably(side, json.dumps(asdict(record)).encode())
            with contextlib.suppress(FileExistsError):
                os.link(side, self.folder / "outcome.json")
            os.unlink(side)
            _sync_folder(self.folder)
            standing = self.outcome
            assert standing is not None
            log.info("outcome of %s: %s (%s, by %s)", self.move, standing.outcome, standing.reason, standing.decided_by)
            return standing

    def overrule(self, outcome: Outcome, reason: str, decided_by: str) -> OutcomeRecord:
        """The only words that ever stand above an outcome: a person's (`recover --target-is-dead`), or the target's that
        its copy died before it ever ran. Both records are kept."""
        record = OutcomeRecord(outcome, reason, decided_by, time.time())
        with self.lock:
            _write_durably(self.folder / "word.new", json.dumps(asdict(record)).encode())
            os.rename(self.folder / "word.new", self.folder / "word.json")
            _sync_folder(self.folder)
        log.warning("outcome of %s overruled: %s, by %s", self.move, outcome, decided_by)
        return record


class Journal:
    """All moves this daemon ever took part in."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "moves"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open: dict[str, MoveLog] = {}
        for entry in sorted(self.folder.iterdir()):
            if (entry / "begin.json").exists():
                begin = Begin(**json.loads((entry / "begin.json").read_text()))
                self._open[begin.move] = MoveLog(entry, begin)

    def begin(self, begin: Begin) -> MoveLog:
        """Journals a move. Again with the same content: the same log. With other content: Busy."""
        if (known := self._open.get(check_move_id(begin.move))) is not None:
            same = _identity(asdict(known.begin)) == _identity(asdict(begin))
            if not same:
                raise Busy(f"move {begin.move} is already journalled here for something else")
            return known
        folder = self.folder / begin.move
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_durably(folder / "begin.new", json.dumps(asdict(begin)).encode())
        os.rename(folder / "begin.new", folder / "begin.json")
        _sync_folder(folder)
        _sync_folder(self.folder)
        self._open[begin.move] = MoveLog(folder, begin)
        return self._open[begin.move]

    def find(self, move: str) -> MoveLog | None:
        return self._open.get(check_move_id(move))

    def get(self, move: str) -> MoveLog:
        found = self.find(move)
        if found is None:
            raise NotFound(f"move {move} is not known on this node")
        return found

    def all(self) -> list[MoveLog]:
        return sorted(self._open.values(), key=lambda entry: entry.begin.begun_unix_s)


def _identity(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two Begins the same request: not when, and not the nonce a target makes anew."""
    return {key: value for key, value in fields.items() if key not in {"begun_unix_s", "nonce", "boot_id", "lease_s"}}


def _crash(what: str, error: OSError) -> None:
    log.critical(
        "the journal does not take %s (%s): ending now, the next start reads what is really there", what, error
    )
    logging.shutdown()
    os._exit(74)


def _write_durably(path: Path, content: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _crash(str(path), error)


def _append_durably(path: Path, content: bytes) -> None:
    try:
        with open(path, "r+b" if path.exists() else "w+b") as file:
            whole = file.read().rfind(b"\n") + 1  # a line cut short by a crash is overwritten, not continued
            file.seek(whole)
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _crash(str(path), error)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        _crash(str(folder), error)
    finally:
        os.close(fd)
