"""The database of the autopilot: one SQLite file (WAL), its transactions, and the event log.

Invariant: a change is on disk when its call returns, with all its records, or nothing of it ever is. Records have numbers
without gaps, and each has the digest of the one before it (chain.py), also if several processes write.

With several autopilots the database is a copy of what they share (shared.py): a change is made there before it is made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sqlite3 import Connection, Cursor, DatabaseError, Row
from typing import Any, Self, TypeVar

import aiosqlite

from migrator.autopilot import chain, membership, shared
from migrator.autopilot.chain import Record
from migrator.autopilot.etcd import Etcd
from snapshotd.api.errors import BadConfig, SnapshotError

T = TypeVar("T")
FILE = "autopilot.sqlite"
SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind TEXT NOT NULL, node TEXT NOT NULL, text TEXT NOT NULL,
  data TEXT NOT NULL, previous TEXT NOT NULL, digest TEXT NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS events_are_not_changed BEFORE UPDATE ON events
  BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
CREATE TRIGGER IF NOT EXISTS events_are_not_removed BEFORE DELETE ON events
  BEGIN SELECT RAISE(ABORT, 'events are never removed'); END;
CREATE TABLE IF NOT EXISTS nodes (
  name TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT NOT NULL, since_unix_s REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS cursors (node TEXT PRIMARY KEY, epoch TEXT NOT NULL, sequence INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS alarms (
  node TEXT NOT NULL, source TEXT NOT NULL, alarm TEXT NOT NULL, data TEXT NOT NULL,
  PRIMARY KEY (node, source, alarm)) STRICT;
CREATE TABLE IF NOT EXISTS moves (
  id TEXT PRIMARY KEY, rank_uid TEXT NOT NULL, state TEXT NOT NULL, ended_unix_s REAL NOT NULL,
  data TEXT NOT NULL) STRICT;
DROP INDEX IF EXISTS one_move_of_a_rank;
CREATE UNIQUE INDEX IF NOT EXISTS one_move_of_a_rank_from_a_node
  ON moves (rank_uid, json_extract(data, '$.source')) WHERE state = 'intended';
CREATE TABLE IF NOT EXISTS orders (
  id INTEGER PRIMARY KEY AUTOINCREMENT, ended_unix_s REAL NOT NULL, data TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS proposals (id INTEGER PRIMARY KEY, ended_unix_s REAL NOT NULL, data TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS alerts (about TEXT PRIMARY KEY, text TEXT NOT NULL, since_unix_s REAL NOT NULL) STRICT;
"""
_TABLES += """
CREATE TABLE IF NOT EXISTS rollbacks (node TEXT NOT NULL, record TEXT NOT NULL, PRIMARY KEY (node, record)) STRICT;
"""
_TABLES += """
CREATE TABLE IF NOT EXISTS suspensions (id TEXT PRIMARY KEY, ended_unix_s REAL NOT NULL, data TEXT NOT NULL) STRICT;
"""
_TABLES += shared.TABLE


class Transaction:
    """What a change may do. It runs in the thread of the database, one after the other."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self._connection, self._now = connection, clock
        self.records: list[Record] = []  # that were appended
        self.statements: list[shared.Statement] = []  # what was changed
        self._last: tuple[int, str] | None = None  # number and digest of the newest record; None: not read yet

    def execute(self, query: str, values: Sequence[Any] = ()) -> Cursor:
        """Changes something. All values are given, none is computed by SQLite: copies must come to the same state."""
        self.statements.append((query, False, values))
        return self._connection.execute(query, values)

    def executemany(self, query: str, values: Sequence[Sequence[Any]]) -> None:
        if values:
            self.statements.append((query, True, values))
            self._connection.executemany(query, values)

    def all(self, query: str, *values: Any) -> list[Row]:
        return self._connection.execute(query, values).fetchall()

    def one(self, query: str, *values: Any) -> Row | None:
        rows = self.all(query, *values)
        return rows[0] if rows else None

    def append(self, kind: str, text: str, *, node: str = "", data: dict[str, Any] | None = None) -> None:
        """Adds a record to the event log."""
        if self._last is None:
            row = self.one("SELECT id, digest FROM events ORDER BY id DESC LIMIT 1")
            self._last = (row["id"], row["digest"]) if row else (0, chain.START)
        number, previous = self._last
        made = chain.record(number + 1, round(self._now(), 3), kind, node, text, data or {}, previous)
        values = (made.id, made.unix_s, kind, node, text, json.dumps(made.data), previous, made.digest)
        self.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        self.records.append(made)
        self._last = made.id, made.digest

    def attempt(self, act: Callable[[Transaction], Any]) -> Any:
        """The result of one change. If it raises, it is taken back alone, and the exception is the result."""
        count, last, made = len(self.records), self._last, len(self.statements)
        self._connection.execute("SAVEPOINT change")
        try:
            result = act(self)
        except Exception as error:  # noqa: BLE001 - its caller gets it
            del self.records[count:], self.statements[made:]
            self._last, result = last, error
            self._connection.execute("ROLLBACK TO change")
        self._connection.execute("RELEASE change")
        return result


class Database:
    """One database. `clock` is replaced by tests of windows."""

    def __init__(
        self,
        writer: Connection,
        thread: ThreadPoolExecutor,
        reader: aiosqlite.Connection,
        folder: Path,
        clock: Callable[[], float],
        history: shared.Shared | None,
    ) -> None:
        self._writer, self._thread, self._reader, self.folder, self.now = writer, thread, reader, folder, clock
        self.history = history  # None: this database is the only one
        self._waiting: list[tuple[Callable[[Transaction], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.on_record: Callable[[Record], None] = lambda record: None  # called after the transaction

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, clock: Callable[[], float] = time.time, *, fence: int = 0) -> AsyncIterator[Self]:
        """Opens the database of a folder; both are made if they do not exist.

        With a `fence` (leader.py) it is changed only as long as this process leads, else shared.TermOver is raised.
        """
        async with contextlib.AsyncExitStack() as stack:
            # Changes are functions that read and write, so they are made in one thread of their own. Readers have
            # another one, because this one waits for the disk in each commit.
            thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="autopilot-state"))
            loop = asyncio.get_running_loop()
            try:
                await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
                writer = await loop.run_in_executor(thread, connect, folder)
                stack.push_async_callback(loop.run_in_executor, thread, writer.close)
                reader = await stack.enter_async_context(
                    aiosqlite.connect(folder / FILE, timeout=30.0, isolation_level=None)
                )
                reader.row_factory = Row
                await reader.execute("PRAGMA query_only = ON")
            except (OSError, DatabaseError) as error:
                raise _unusable(folder, error) from error
            settings, history = membership.of_folder(folder), None
            if settings is not None:
                etcd = Etcd(settings)
                stack.callback(etcd.close)
                history = shared.Shared(etcd, SCHEMA, fence)
            made = cls(writer, thread, reader, folder, clock, history)
            try:
                yield made
            finally:
                if made._writing is not None:  # for a task that was cancelled
                    await made._writing

    # ---------------------------------------------------------------- writing

    async def _change(self, act: Callable[[Transaction], T]) -> T:
        """Makes a change, which is on disk when this returns. If it raises, nothing was changed.

        A commit waits for the disk, and a thousand nodes can have something to record at a time. So all changes that wait
        are made in one transaction, and in one trip to the thread of the database.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((act, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await asyncio.shield(done)

    async def _write(self) -> None:
        while self._waiting:
            changes, self._waiting = self._waiting, []
            try:
                acts = [act for act, _ in changes]
                loop = asyncio.get_running_loop()
                results, records = await loop.run_in_executor(self._thread, self._commit, acts)
                for record in records:
                    self.on_record(record)
            except Exception as error:  # noqa: BLE001 - their callers get it
                results = [error] * len(changes)
            for (_, done), result in zip(changes, results, strict=True):
                if done.cancelled():
                    continue
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)

    def _commit(self, acts: list[Callable[[Transaction], Any]]) -> tuple[list[Any], list[Record]]:
        """The results of changes, made in one transaction, and their records. In the thread of the database."""
        if self.history is None:
            if shared.local(self._writer) is not None:
                raise membership.lost(self.folder)
            return self._transaction(acts)
        try:
            self.history.refresh(self._writer)
            while True:
                try:
                    return self._transaction(acts)
                except shared.Behind:
                    self.history.catch_up(self._writer)
        except shared.TooLarge:
            return self._commit_parts(acts)
        except SnapshotError as error:
            if self.history.fence:
                raise shared.TermOver(error.message) from error
            raise

    def _commit_parts(self, acts: list[Callable[[Transaction], Any]]) -> tuple[list[Any], list[Record]]:
        """For changes that are too many for one entry of the history."""
        if len(acts) == 1:
            return [shared.too_large()], []
        results, records = self._commit(acts[: len(acts) // 2])
        try:
            more, later = self._commit(acts[len(acts) // 2 :])
        except Exception as error:  # noqa: BLE001 - its callers get it; the first half is made
            more, later = [error] * (len(acts) - len(results)), []
        return results + more, records + later

    def _transaction(self, acts: list[Callable[[Transaction], Any]]) -> tuple[list[Any], list[Record]]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            made = Transaction(self._writer, self.now)
            results = [made.attempt(act) for act in acts]
            if self.history is not None and made.statements:
                self.history.publish(self._writer, made.statements)
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:  # after some errors SQLite has ended it already
                self._writer.execute("ROLLBACK")
            raise
        return results, made.records

    async def follow(self) -> bool:
        """Makes the changes of other autopilots here too. Returns whether there were any."""
        if self.history is None:
            return False
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.history.catch_up, self._writer)

    # ---------------------------------------------------------------- reading

    async def events(self, after: int = 0, limit: int = -1) -> list[Record]:
        """The records after that one, in order."""
        rows = await self._all("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", after, limit)
        return [Record(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]

    async def last_event(self) -> int:
        """The number of the newest record; 0 if there is none. The numbers have no gaps."""
        row = await self._one("SELECT max(id) AS id FROM events")
        return int(row["id"] or 0) if row else 0

    async def _one(self, query: str, *values: Any) -> Row | None:
        rows = await self._all(query, *values)
        return rows[0] if rows else None

    async def _all(self, query: str, *values: Any) -> list[Row]:
        return list(await self._reader.execute_fetchall(query, values))


def connect(folder: Path) -> Connection:
    """A connection for changes."""
    connection = sqlite3.connect(folder / FILE, timeout=30.0, isolation_level=None)
    try:
        connection.row_factory = Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an intent must survive a power failure
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA):
            raise BadConfig(
                f"{folder / FILE} was written by another version (format {version}, this program knows {SCHEMA})",
                remedy="use the version of migrator that wrote it",
            )
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except BaseException:
        connection.close()
        raise
    return connection


def _unusable(folder: Path, error: Exception) -> BadConfig:
    return BadConfig(
        f"the autopilot's state in {folder} cannot be used: {error}",
        remedy="name another folder with --state, or run this as the autopilot's user or as root",
    )
