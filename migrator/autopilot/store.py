"""What survives: the current state and the event log, in one database (database.py).

Invariant: every change of the state and the record of it are one change. An intended move is on disk before a daemon is
asked for anything. An event of a node is recorded once, by (epoch, sequence). Several processes of one machine may use the
database at a time (the autopilot and the verbs); only the holder of the actor's lock moves ranks (actor.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from sqlite3 import Row
from typing import Any, TypeVar

import msgspec

from migrator.autopilot.database import Transaction
from migrator.autopilot.model import OUT, Alarm, HealthReport, Move, MoveState, NodeState, Order, Proposal
from migrator.autopilot.outside_alarms import OutsideAlarms
from migrator.autopilot.proposals import Proposals
from migrator.autopilot.rollbacks import RollbackRecords
from migrator.autopilot.suspension_records import SuspensionRecords
from snapshotd.api.errors import WrongState

T = TypeVar("T", Alarm, Move)
_CURSOR = "SELECT epoch, sequence FROM cursors WHERE node = ?"
_ALARMS = "SELECT alarm, data FROM alarms WHERE node = ? AND source = ?"
_LAST_ORDERS = (  # about each node; those to move one rank do not count
    "SELECT max(id) FROM orders WHERE json_extract(data, '$.kind') IN ('drain', 'evacuate', 'return')"
    " GROUP BY json_extract(data, '$.node')"
)


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
    proposals: tuple[Proposal, ...] = ()  # those whose cause is still there, answered or not


class Store(Proposals, OutsideAlarms, RollbackRecords, SuspensionRecords):
    """The current state, with everything that changes it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._values: dict[type, dict[str, Any]] = {}  # by their text, of the last reading

    async def note(self, kind: str, text: str, *, node: str = "", **data: Any) -> None:
        """Records something that changes no state."""

        def change(tx: Transaction) -> None:
            tx.append(kind, text, node=node, data=data)

        await self._change(change)

    async def cursor(self, node: str) -> tuple[str, int]:
        """The last event of the node that was recorded."""
        return _cursor(await self._one(_CURSOR, node))

    async def take_in(self, report: HealthReport, *, with_events: bool = True) -> bool:
        """Records the events of a report that are new, and replaces the node's alarms. Returns whether anything changed."""
        rows, place = _rows(report.alarms), (report.epoch, report.sequence)
        nothing = not (report.events or report.pruned) and await self.cursor(report.node) == place
        if nothing and await self._known(report.node, "node") == rows:
            return False

        def change(tx: Transaction) -> bool:
            epoch, sequence = _cursor(tx.one(_CURSOR, report.node))
            after = sequence if epoch == report.epoch else 0
            if report.pruned and with_events:
                tx.append("gap", "the node dropped events before they could be read", node=report.node)
            if epoch not in ("", report.epoch) and with_events:
                tx.append("epoch", "the node's event log began anew", node=report.node)
            new = [event for event in report.events if event.sequence > after]
            for event in new:
                if event.kind != "repeated" and with_events:  # the alarm counts repeated ones
                    text = f"{event.kind}: {event.check} on {event.subject}: {event.text}"
                    data = {**asdict(event), "severity": event.severity.name, "epoch": report.epoch}
                    tx.append("signal", text, node=report.node, data=data)
            latest = max([after, report.sequence, *(event.sequence for event in new)])
            if (report.epoch, latest) != (epoch, sequence):
                tx.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", (report.node, report.epoch, latest))
            return _replace_alarms(tx, report.node, "node", rows) or bool(new)

        return await self._change(change)

    async def set_own_alarm(self, node: str, alarm: Alarm | None) -> bool:
        """Raises or clears the one alarm about a node that the autopilot itself raises: that its daemon is silent."""
        if alarm is None and not await self._known(node, "autopilot"):
            return False

        def change(tx: Transaction) -> bool:
            changed = _replace_alarms(tx, node, "autopilot", _rows(() if alarm is None else (alarm,)))
            if changed:
                text = f"raised: {alarm.check}: {alarm.text}" if alarm is not None else "cleared: it answers again"
                tx.append("signal", text, node=node, data={} if alarm is None else asdict(alarm))
            return changed

        return await self._change(change)

    async def set_job_alarms(self, alarms: Iterable[Alarm]) -> bool:
        """Replaces the alarms about jobs, which the autopilot itself raises. Only those that begin or end are recorded."""
        wanted = {(alarm.node, alarm.check, alarm.subject): alarm for alarm in alarms}
        rows = await self._all("SELECT data FROM alarms WHERE source = 'jobs'")
        known = [msgspec.json.decode(row["data"], type=Alarm) for row in rows]
        before = {(alarm.node, alarm.check, alarm.subject): alarm for alarm in known}
        if before == wanted:
            return False

        def change(tx: Transaction) -> bool:
            for node in {key[0] for key in before.keys() | wanted.keys()}:
                _replace_alarms(tx, node, "jobs", _rows(one for one in wanted.values() if one.node == node))
            for key in sorted(before.keys() ^ wanted.keys()):
                alarm, word = (wanted[key], "raised") if key in wanted else (before[key], "cleared")
                text = f"{word}: {alarm.check} on {alarm.subject}: {alarm.text}"
                tx.append("signal", text, node=alarm.node, data={**asdict(alarm), "kind": word})
            return True

        return await self._change(change)

    async def _known(self, node: str, source: str) -> dict[str, str]:
        return _texts(await self._all(_ALARMS, node, source))

    async def set_node(
        self,
        node: str,
        state: NodeState,
        reason: str,
        by: str = "autopilot",
        check: Callable[[NodeState], None] = lambda before: None,
    ) -> NodeState:
        """Returns the state before. `check` gets it first, and raises if it must not be changed."""

        def change(tx: Transaction) -> NodeState:
            before = _state(tx, node)
            check(before)
            self._set_node(tx, node, state, reason, by)
            return before

        return await self._change(change)

    async def use_again(self, node: str, by: str) -> tuple[NodeState, list[int], list[Alarm]]:
        """Makes a node healthy and ends the orders about it. Returns its state before, these orders, and its alarms."""

        def change(tx: Transaction) -> tuple[NodeState, list[int], list[Alarm]]:
            rows = tx.all("SELECT data FROM orders WHERE ended_unix_s = 0 ORDER BY id")
            orders = [one for row in rows if (one := msgspec.json.decode(row["data"], type=Order)).node == node]
            for order in orders:
                self._end_order(tx, order, f"ended by {by}")
            before = _state(tx, node)
            if before is not NodeState.HEALTHY:
                self._set_node(tx, node, NodeState.HEALTHY, "an operator ended it", by)
            alarms = tx.all("SELECT data FROM alarms WHERE node = ? ORDER BY alarm", node)
            found = [msgspec.json.decode(row["data"], type=Alarm) for row in alarms]
            return before, [order.id for order in orders], found

        return await self._change(change)

    async def set_nodes(self, changes: Mapping[str, tuple[NodeState, NodeState, str]]) -> None:
        """Changes states of nodes: from, to and the reason. What an operator has changed meanwhile stays as it is."""

        def change(tx: Transaction) -> None:
            known = {row["name"]: row["state"] for row in tx.all("SELECT name, state FROM nodes")}
            for node, (before, after, reason) in changes.items():
                if known.get(node, NodeState.HEALTHY) == before:
                    self._set_node(tx, node, after, reason, "autopilot")

        await self._change(change)

    def _set_node(self, tx: Transaction, node: str, state: NodeState, reason: str, by: str) -> None:
        was = _state(tx, node)
        if state is NodeState.HEALTHY and was in OUT:
            last = f"SELECT id, data FROM orders WHERE id IN ({_LAST_ORDERS}) AND json_extract(data, '$.node') = ?"
            for row in tx.all(last, node):
                order = replace(msgspec.json.decode(row["data"], type=Order), used_again=True)
                values = (msgspec.json.encode(order).decode(), row["id"])
                tx.execute("UPDATE orders SET data = ? WHERE id = ?", values)
        tx.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", (node, state.value, reason, self.now()))
        data = {"from": was.value, "to": state.value, "by": by, "reason": reason}
        tx.append("state", f"{was} → {state}: {reason}", node=node, data=data)

    async def intend(self, move: Move) -> None:
        """Records an intended move. Raises WrongState if one of this rank from that node is in progress: it is never moved
        twice. (Another node that claims the rank must not keep it from being moved; and only one node really has it.)"""

        def change(tx: Transaction) -> None:
            query = (
                "SELECT id FROM moves WHERE rank_uid = ? AND json_extract(data, '$.source') = ? AND state = 'intended'"
            )
            open_move = tx.one(query, move.rank_uid, move.source)
            if open_move is not None:
                raise WrongState(f"rank {move.rank_uid} is being moved already ({open_move['id']})")
            tx.execute(
                "INSERT INTO moves VALUES (?, ?, ?, 0, ?)",
                (move.id, move.rank_uid, move.state.value, msgspec.json.encode(move).decode()),
            )
            text = f"rank {move.rank} of {move.job_key}: {move.source} → {move.target}: {move.reason}"
            tx.append("intent", text, node=move.source, data=asdict(move))

        await self._change(change)

    async def finish(self, move: str, state: MoveState, result: str, pause_s: float = 0.0, **data: Any) -> bool:
        """Records how an intended move ended. Returns False if that is recorded already."""

        def change(tx: Transaction) -> bool:
            row = tx.one("SELECT data FROM moves WHERE id = ? AND state = 'intended'", move)
            if row is None:
                return False
            ended = replace(
                msgspec.json.decode(row["data"], type=Move),
                state=state,
                result=result,
                pause_s=round(pause_s, 4),
                ended_unix_s=self.now(),
            )
            tx.execute(
                "UPDATE moves SET state = ?, ended_unix_s = ?, data = ? WHERE id = ?",
                (state.value, ended.ended_unix_s, msgspec.json.encode(ended).decode(), move),
            )
            text = f"rank {ended.rank} of {ended.job_key}: {state}" + (f": {result}" if result else "")
            known = {"id": move, "state": state.value, "result": result, "pause_s": ended.pause_s}
            tx.append("result", text, node=ended.source, data=known | data)
            return True

        return await self._change(change)

    async def give_order(self, order: Order, state: NodeState | None) -> Order:
        """Records an operator's order and puts its node into `state` (None: it stays as it is).

        Raises WrongState if there is an open order about the node. One to move a single rank does not count, except for
        another one about the same rank.
        """

        def change(tx: Transaction) -> Order:
            for row in tx.all("SELECT id, data FROM orders WHERE ended_unix_s = 0"):
                other = msgspec.json.decode(row["data"], type=Order)
                if other.node == order.node and (other.kind != "move" or other.rank_uid == order.rank_uid):
                    raise WrongState(
                        f"{other.kind} of {other.subject} is in progress (order {row['id']})",
                        remedy="wait for it"
                        + (f", or end it with `migrator undrain {order.node}`" if order.node else ""),
                    )
            cursor = tx.execute("INSERT INTO orders (ended_unix_s, data) VALUES (0, '')")
            before = _state(tx, order.node).value
            given = replace(order, id=cursor.lastrowid or 0, since_unix_s=self.now(), before=before)
            tx.execute("UPDATE orders SET data = ? WHERE id = ?", (msgspec.json.encode(given).decode(), given.id))
            to = f" to {', '.join(given.targets)}" if given.targets else ""
            why = f": {given.reason}" if given.reason else ""
            text = f"{given.by} ordered to {given.kind} {given.subject}{to}{why}"
            tx.append("order", text, node=given.node, data=asdict(given))
            if state is not None:
                self._set_node(tx, given.node, state, given.reason or f"order {given.id}", given.by)
            return given

        return await self._change(change)

    async def end_order(self, order: int, summary: str) -> bool:

        def change(tx: Transaction) -> bool:
            row = tx.one("SELECT data FROM orders WHERE id = ? AND ended_unix_s = 0", order)
            if row is None:
                return False
            self._end_order(tx, msgspec.json.decode(row["data"], type=Order), summary)
            return True

        return await self._change(change)

    def _end_order(self, tx: Transaction, order: Order, summary: str) -> None:
        ended = replace(order, ended_unix_s=self.now(), summary=summary)
        tx.execute(
            "UPDATE orders SET ended_unix_s = ?, data = ? WHERE id = ?",
            (ended.ended_unix_s, msgspec.json.encode(ended).decode(), order.id),
        )
        data = {"id": order.id, "summary": summary}
        tx.append("order-ended", f"{ended.kind} of {ended.subject}: {summary}", node=ended.node, data=data)

    async def set_alerts(self, alerts: Mapping[str, str], data: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Replaces what a person must look at, by subject. Only changes are recorded, with the data of the subject."""
        known = await self.alerts()
        if {about: _stable(text) for about, text in alerts.items()} == {a: _stable(t) for a, t in known.items()}:
            return

        def change(tx: Transaction) -> None:
            for about in known.keys() - alerts.keys():
                tx.execute("DELETE FROM alerts WHERE about = ?", (about,))
                tx.append("alert-over", f"{about}: {known[about]}", data={"about": about})
            for about, text in alerts.items():
                if _stable(known.get(about, "")) != _stable(text):
                    tx.execute("INSERT OR REPLACE INTO alerts VALUES (?, ?, ?)", (about, text, self.now()))
                    more = (data or {}).get(about, {})
                    tx.append("alert", f"{about}: {text}", data={**more, "about": about})

        await self._change(change)

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
        return Stored(
            nodes,
            self._decoded(alarms, Alarm),
            self._decoded(moves, Move),
            tuple(msgspec.json.decode(data, type=Order) for data in orders),
            await self.alerts(),
            await self.proposals(),
        )

    def _decoded(self, texts: list[str], kind: type[T]) -> tuple[T, ...]:
        """Decodes what was not there at the last call: most of it was."""
        before: dict[str, Any] = self._values.get(kind, {})
        made = {text: before.get(text) or msgspec.json.decode(text, type=kind) for text in texts}
        self._values[kind] = made
        return tuple(made.values())

    async def intended(self) -> list[Move]:
        """The moves in progress."""
        rows = await self._all("SELECT data FROM moves WHERE state = 'intended' ORDER BY rowid")
        return [msgspec.json.decode(row["data"], type=Move) for row in rows]

    async def alerts(self) -> dict[str, str]:
        return {row["about"]: row["text"] for row in await self._all("SELECT about, text FROM alerts")}

    async def last_orders(self) -> dict[str, Order]:
        """The last order about each node that has one. Orders to move one rank do not count."""
        rows = await self._all(f"SELECT data FROM orders WHERE id IN ({_LAST_ORDERS})")
        found = [msgspec.json.decode(row["data"], type=Order) for row in rows]
        return {order.node: order for order in found}

    async def order(self, number: int) -> Order:
        row = await self._one("SELECT data FROM orders WHERE id = ?", number)
        assert row is not None
        return msgspec.json.decode(row["data"], type=Order)

    async def moves_of_order(self, number: int) -> list[Move]:
        rows = await self._all("SELECT data FROM moves ORDER BY rowid")
        moves = [msgspec.json.decode(row["data"], type=Move) for row in rows]
        return [move for move in moves if move.order == number]


def _cursor(row: Row | None) -> tuple[str, int]:
    return (row["epoch"], row["sequence"]) if row else ("", 0)


def _state(tx: Transaction, node: str) -> NodeState:
    row = tx.one("SELECT state FROM nodes WHERE name = ?", node)
    return NodeState(row["state"]) if row else NodeState.HEALTHY


def _texts(rows: Iterable[Row]) -> dict[str, str]:
    return {row["alarm"]: row["data"] for row in rows}


def _replace_alarms(tx: Transaction, node: str, source: str, rows: dict[str, str]) -> bool:
    known = _texts(tx.all(_ALARMS, node, source))
    if known == rows:
        return False
    gone = [(node, source, alarm) for alarm in known.keys() - rows.keys()]
    new = [(node, source, alarm, data) for alarm, data in rows.items() if known.get(alarm) != data]
    tx.executemany("DELETE FROM alarms WHERE node = ? AND source = ? AND alarm = ?", gone)
    tx.executemany("INSERT OR REPLACE INTO alarms VALUES (?, ?, ?, ?)", new)
    return True


def _rows(alarms: Iterable[Alarm]) -> dict[str, str]:
    """What is stored of the alarms of a node."""
    return {f"{alarm.check} {alarm.subject}": msgspec.json.encode(alarm).decode() for alarm in alarms}


def _stable(text: str) -> str:
    """An alert without its numbers, so that "moved 8 s ago" and "moved 9 s ago" are the same one."""
    return re.sub(r"\d+", "#", text)
