"""What survives: the current state and the event log, in one SQLite database (WAL).

Invariant: every change of the state and the record of it are one transaction. An intended move is on disk before a daemon is
asked for anything. An event of a node is recorded once, by (epoch, sequence). Several processes of one machine may use the
database at a time (the autopilot and the verbs); only the holder of the actor's lock moves ranks (actor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from sqlite3 import DatabaseError, OperationalError, Row
from typing import Any

import aiosqlite
import msgspec

from migrator.autopilot import chain
from migrator.autopilot.chain import Record
from migrator.autopilot.model import Alarm, HealthReport, Move, MoveState, NodeState, Order
from snapshotd.api.errors import BadConfig, WrongState

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
CREATE TABLE IF NOT EXISTS alerts (about TEXT PRIMARY KEY, text TEXT NOT NULL, since_unix_s REAL NOT NULL) STRICT;
"""


@dataclass(frozen=True)
class NodeRecord:
    state: NodeState
    reason: str
    since_unix_s: float


@dataclass(frozen=True)
class Stored:
    """The current state."""

    nodes: dict[str, NodeRecord]
    alarms: tuple[Alarm, ...]
    moves: tuple[Move, ...]
    orders: tuple[Order, ...]
    alerts: dict[str, str]


class Store:
    """One database. `clock` is replaced by tests of windows."""

    def __init__(self, connection: aiosqlite.Connection, folder: Path, clock: Callable[[], float]) -> None:
        self._db, self.folder, self.now = connection, folder, clock
        self._writes = asyncio.Lock()
        self._pending: list[Record] = []
        self.on_record: Callable[[Record], None] = lambda record: None  # called after the transaction

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Store]:
        """Opens the database of a folder; both are made if they do not exist."""
        try:
            await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            connection = await aiosqlite.connect(folder / FILE, timeout=30.0, isolation_level=None)
        except (OSError, DatabaseError) as error:
            raise _unusable(folder, error) from error
        try:
            connection.row_factory = Row
            try:
                await connection.execute("PRAGMA journal_mode = WAL")
                await connection.execute("PRAGMA synchronous = FULL")  # an intent must survive a power failure
                await _prepare(connection, folder)
            except DatabaseError as error:
                raise _unusable(folder, error) from error
            yield cls(connection, folder, clock)
        finally:
            await connection.close()

    # ---------------------------------------------------------------- writing

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        async with self._writes:
            try:
                await self._db.execute("BEGIN IMMEDIATE")
            except OperationalError:
                # A task was cancelled between the beginning of its transaction and its first statement.
                await self._db.execute("ROLLBACK")
                await self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._pending.clear()
                await self._db.execute("ROLLBACK")
                raise
            await self._db.execute("COMMIT")
            written, self._pending = self._pending, []
        for one in written:
            self.on_record(one)

    async def _append(self, kind: str, text: str, *, node: str = "", data: dict[str, Any] | None = None) -> None:
        last = await self._one("SELECT id, digest FROM events ORDER BY id DESC LIMIT 1")
        number, previous = (last["id"], last["digest"]) if last else (0, chain.START)
        made = chain.record(number + 1, round(self.now(), 3), kind, node, text, data or {}, previous)
        values = (made.id, made.unix_s, kind, node, text, json.dumps(made.data), previous, made.digest)
        await self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._pending.append(made)

    async def note(self, kind: str, text: str, *, node: str = "", **data: Any) -> None:
        """Records something that changes no state."""
        async with self._writing():
            await self._append(kind, text, node=node, data=data)

    async def cursor(self, node: str) -> tuple[str, int]:
        """The last event of the node that was recorded."""
        row = await self._one("SELECT epoch, sequence FROM cursors WHERE node = ?", node)
        return (row["epoch"], row["sequence"]) if row else ("", 0)

    async def take_in(self, report: HealthReport, *, with_events: bool = True) -> bool:
        """Records the events of a report that are new, and replaces the node's alarms. Returns whether anything changed."""
        async with self._writing():
            epoch, sequence = await self.cursor(report.node)
            after = sequence if epoch == report.epoch else 0
            if report.pruned and with_events:
                await self._append("gap", "the node dropped events before they could be read", node=report.node)
            if epoch not in ("", report.epoch) and with_events:
                await self._append("epoch", "the node's event log began anew", node=report.node)
            new = [event for event in report.events if event.sequence > after]
            for event in new:
                if event.kind != "repeated" and with_events:  # the alarm counts repeated ones
                    text = f"{event.kind}: {event.check} on {event.subject}: {event.text}"
                    data = {**asdict(event), "severity": event.severity.name, "epoch": report.epoch}
                    await self._append("signal", text, node=report.node, data=data)
            latest = max([after, report.sequence, *(event.sequence for event in new)])
            if (report.epoch, latest) != (epoch, sequence):
                await self._db.execute(
                    "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", (report.node, report.epoch, latest)
                )
            return await self._replace_alarms(report.node, "node", report.alarms) or bool(new)

    async def set_own_alarm(self, node: str, alarm: Alarm | None) -> bool:
        """Raises or clears the one alarm about a node that the autopilot itself raises: that its daemon is silent."""
        async with self._writing():
            changed = await self._replace_alarms(node, "autopilot", () if alarm is None else (alarm,))
            if changed:
                text = f"raised: {alarm.check}: {alarm.text}" if alarm is not None else "cleared: it answers again"
                await self._append("signal", text, node=node, data={} if alarm is None else asdict(alarm))
            return changed

    async def set_job_alarms(self, alarms: Iterable[Alarm]) -> bool:
        """Replaces the alarms about jobs, which the autopilot itself raises. Only those that begin or end are recorded."""
        wanted = {(alarm.node, alarm.check, alarm.subject): alarm for alarm in alarms}
        rows = await self._all("SELECT data FROM alarms WHERE source = 'jobs'")
        known = [msgspec.json.decode(row["data"], type=Alarm) for row in rows]
        before = {(alarm.node, alarm.check, alarm.subject): alarm for alarm in known}
        if before == wanted:
            return False
        async with self._writing():
            for node in {key[0] for key in before.keys() | wanted.keys()}:
                await self._replace_alarms(node, "jobs", [one for one in wanted.values() if one.node == node])
            for key in sorted(before.keys() ^ wanted.keys()):
                alarm, word = (wanted[key], "raised") if key in wanted else (before[key], "cleared")
                text = f"{word}: {alarm.check} on {alarm.subject}: {alarm.text}"
                await self._append("signal", text, node=alarm.node, data={**asdict(alarm), "kind": word})
        return True

    async def _replace_alarms(self, node: str, source: str, alarms: Iterable[Alarm]) -> bool:
        rows = {f"{alarm.check} {alarm.subject}": msgspec.json.encode(alarm).decode() for alarm in alarms}
        query = "SELECT alarm, data FROM alarms WHERE node = ? AND source = ?"
        known = {row["alarm"]: row["data"] for row in await self._all(query, node, source)}
        if known == rows:
            return False
        await self._db.execute("DELETE FROM alarms WHERE node = ? AND source = ?", (node, source))
        await self._db.executemany(
            "INSERT INTO alarms VALUES (?, ?, ?, ?)", [(node, source, alarm, data) for alarm, data in rows.items()]
        )
        return True

    async def set_node(self, node: str, state: NodeState, reason: str, by: str = "autopilot") -> None:
        async with self._writing():
            await self._set_node(node, state, reason, by)

    async def _set_node(self, node: str, state: NodeState, reason: str, by: str) -> None:
        before = await self._one("SELECT state FROM nodes WHERE name = ?", node)
        was = before["state"] if before else NodeState.HEALTHY.value
        values = (node, state.value, reason, self.now())
        await self._db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", values)
        data = {"from": was, "to": state.value, "by": by, "reason": reason}
        await self._append("state", f"{was} → {state}: {reason}", node=node, data=data)

    async def intend(self, move: Move) -> None:
        """Records an intended move. Raises WrongState if one of this rank from that node is in progress: it is never moved
        twice. (Another node that claims the rank must not keep it from being moved; and only one node really has it.)"""
        async with self._writing():
            query = (
                "SELECT id FROM moves WHERE rank_uid = ? AND json_extract(data, '$.source') = ? AND state = 'intended'"
            )
            open_move = await self._one(query, move.rank_uid, move.source)
            if open_move is not None:
                raise WrongState(f"rank {move.rank_uid} is being moved already ({open_move['id']})")
            await self._db.execute(
                "INSERT INTO moves VALUES (?, ?, ?, 0, ?)",
                (move.id, move.rank_uid, move.state.value, msgspec.json.encode(move).decode()),
            )
            text = f"rank {move.rank} of {move.job_key}: {move.source} → {move.target}: {move.reason}"
            await self._append("intent", text, node=move.source, data=asdict(move))

    async def finish(self, move: str, state: MoveState, result: str, pause_s: float = 0.0, **data: Any) -> bool:
        """Records how an intended move ended. Returns False if that is recorded already."""
        async with self._writing():
            row = await self._one("SELECT data FROM moves WHERE id = ? AND state = 'intended'", move)
            if row is None:
                return False
            ended = replace(
                msgspec.json.decode(row["data"], type=Move),
                state=state,
                result=result,
                pause_s=round(pause_s, 4),
                ended_unix_s=self.now(),
            )
            await self._db.execute(
                "UPDATE moves SET state = ?, ended_unix_s = ?, data = ? WHERE id = ?",
                (state.value, ended.ended_unix_s, msgspec.json.encode(ended).decode(), move),
            )
            text = f"rank {ended.rank} of {ended.job_key}: {state}" + (f": {result}" if result else "")
            known = {"id": move, "state": state.value, "result": result, "pause_s": ended.pause_s}
            await self._append("result", text, node=ended.source, data=known | data)
            return True

    async def give_order(self, order: Order, state: NodeState) -> Order:
        """Records an operator's order and puts its node into `state`. Raises WrongState if the node has an open order."""
        async with self._writing():
            for row in await self._all("SELECT id, data FROM orders WHERE ended_unix_s = 0"):
                other = msgspec.json.decode(row["data"], type=Order)
                if other.node == order.node:
                    raise WrongState(
                        f"{other.kind} of {order.node} is in progress (order {row['id']})",
                        remedy=f"wait for it, or end it with `migrator undrain {order.node}`",
                    )
            cursor = await self._db.execute("INSERT INTO orders (ended_unix_s, data) VALUES (0, '')")
            given = replace(order, id=cursor.lastrowid or 0, since_unix_s=self.now())
            await self._db.execute(
                "UPDATE orders SET data = ? WHERE id = ?", (msgspec.json.encode(given).decode(), given.id)
            )
            text = f"{given.by} ordered to {given.kind} {given.node}" + (f": {given.reason}" if given.reason else "")
            await self._append("order", text, node=given.node, data=asdict(given))
            await self._set_node(given.node, state, given.reason or f"order {given.id}", given.by)
            return given

    async def end_order(self, order: int, summary: str) -> bool:
        async with self._writing():
            row = await self._one("SELECT data FROM orders WHERE id = ? AND ended_unix_s = 0", order)
            if row is None:
                return False
            known = msgspec.json.decode(row["data"], type=Order)
            ended = replace(known, ended_unix_s=self.now(), summary=summary)
            await self._db.execute(
                "UPDATE orders SET ended_unix_s = ?, data = ? WHERE id = ?",
                (ended.ended_unix_s, msgspec.json.encode(ended).decode(), order),
            )
            data = {"id": order, "summary": summary}
            await self._append("order-ended", f"{ended.kind} of {ended.node}: {summary}", node=ended.node, data=data)
            return True

    async def set_alerts(self, alerts: Mapping[str, str], data: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Replaces what a person must look at, by subject. Only changes are recorded, with the data of the subject."""
        known = {row["about"]: row["text"] for row in await self._all("SELECT about, text FROM alerts")}
        if {about: _stable(text) for about, text in alerts.items()} == {a: _stable(t) for a, t in known.items()}:
            return
        async with self._writing():
            for about in known.keys() - alerts.keys():
                await self._db.execute("DELETE FROM alerts WHERE about = ?", (about,))
                await self._append("alert-over", f"{about}: {known[about]}", data={"about": about})
            for about, text in alerts.items():
                if _stable(known.get(about, "")) != _stable(text):
                    await self._db.execute("INSERT OR REPLACE INTO alerts VALUES (?, ?, ?)", (about, text, self.now()))
                    more = (data or {}).get(about, {})
                    await self._append("alert", f"{about}: {text}", data={**more, "about": about})

    # ---------------------------------------------------------------- reading

    async def load(self, since_unix_s: float = 0.0) -> Stored:
        """The current state, with the moves that are in progress or ended since then."""
        nodes = {
            row["name"]: NodeRecord(NodeState(row["state"]), row["reason"], row["since_unix_s"])
            for row in await self._all("SELECT * FROM nodes")
        }
        alarms = [row["data"] for row in await self._all("SELECT data FROM alarms ORDER BY node, alarm")]
        # Of a rank that the others wait for, all moves: one that was slow on two nodes is not moved a third time.
        query = (
            "SELECT data FROM moves WHERE state = 'intended' OR ended_unix_s >= ? OR 'job-straggler rank:' || rank_uid IN"
            " (SELECT alarm FROM alarms WHERE source = 'jobs') ORDER BY rowid"
        )
        moves = [row["data"] for row in await self._all(query, since_unix_s)]
        orders = [row["data"] for row in await self._all("SELECT data FROM orders WHERE ended_unix_s = 0 ORDER BY id")]
        alerts = {row["about"]: row["text"] for row in await self._all("SELECT about, text FROM alerts")}
        return Stored(
            nodes,
            tuple(msgspec.json.decode(data, type=Alarm) for data in alarms),
            tuple(msgspec.json.decode(data, type=Move) for data in moves),
            tuple(msgspec.json.decode(data, type=Order) for data in orders),
            alerts,
        )

    async def order(self, number: int) -> Order:
        row = await self._one("SELECT data FROM orders WHERE id = ?", number)
        assert row is not None
        return msgspec.json.decode(row["data"], type=Order)

    async def moves_of_order(self, number: int) -> list[Move]:
        rows = await self._all("SELECT data FROM moves ORDER BY rowid")
        moves = [msgspec.json.decode(row["data"], type=Move) for row in rows]
        return [move for move in moves if move.order == number]

    async def events(self, after: int = 0, limit: int = -1) -> list[Record]:
        """The records after that one, in order."""
        rows = await self._all("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", after, limit)
        return [Record(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]

    async def last_event(self) -> int:
        """The number of the newest record; 0 if there is none. The numbers have no gaps."""
        row = await self._one("SELECT max(id) AS id FROM events")
        return int(row["id"] or 0) if row else 0

    async def _one(self, query: str, *values: Any) -> Row | None:
        async with self._db.execute(query, values) as cursor:
            return await cursor.fetchone()

    async def _all(self, query: str, *values: Any) -> list[Row]:
        async with self._db.execute(query, values) as cursor:
            return list(await cursor.fetchall())


async def _prepare(connection: aiosqlite.Connection, folder: Path) -> None:
    async with connection.execute("PRAGMA user_version") as cursor:
        row = await cursor.fetchone()
    version = int(row[0]) if row else 0
    if version not in (0, SCHEMA):
        raise BadConfig(
            f"{folder / FILE} was written by another version (format {version}, this program knows {SCHEMA})",
            remedy="use the version of migrator that wrote it",
        )
    await connection.executescript(_TABLES)
    await connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _stable(text: str) -> str:
    """An alert without its numbers, so that "moved 8 s ago" and "moved 9 s ago" are the same one."""
    return re.sub(r"\d+", "#", text)


def _unusable(folder: Path, error: Exception) -> BadConfig:
    return BadConfig(
        f"the autopilot's state in {folder} cannot be used: {error}",
        remedy="name another folder with --state, or run this as the autopilot's user or as root",
    )
