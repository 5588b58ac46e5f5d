"""Merges the journals of all nodes: each move with its source's and its target's record, and the ranks that wait for it.

Invariant: nothing is concluded from a missing answer. A move counts as ended only when every daemon that returned a record of
it reports the end. The source's record decides how it ended; the target's counts only if the source's has no outcome. No node
can speak for another one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from migrator import formatting
from migrator.cluster import Cluster
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from migrator.protocol import Verdict
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import NotFound, SnapshotError, Where


@dataclass(frozen=True)
class View:
    """One daemon's record, and the node that returned it, by its name in the cluster file."""

    node: str
    record: pb.MoveRecord

    @property
    def ended(self) -> bool:
        return self.record.ended_unix_s > 0


@dataclass(frozen=True)
class Move:
    """One move. At least one of the two views is present."""

    id: str
    source: View | None
    target: View | None

    @property
    def views(self) -> list[View]:
        return [view for view in (self.source, self.target) if view is not None]

    @property
    def first(self) -> pb.MoveRecord:
        return self.views[0].record

    @property
    def job(self) -> str:
        return self.first.job

    @property
    def user_id(self) -> int | None:
        """Whose job it is; None if the records are of an older version."""
        known = [view.record.user_id for view in self.views if view.record.HasField("user_id")]
        return known[0] if known else None

    @property
    def rank(self) -> int:
        return self.first.rank

    @property
    def rank_uid(self) -> str:
        return self.first.rank_uid

    @property
    def source_node(self) -> str:
        return self.first.source_node

    @property
    def target_node(self) -> str:
        return self.first.target_node

    @property
    def ended(self) -> bool:
        return all(view.ended for view in self.views)

    @property
    def begun_unix_s(self) -> float:
        return min(view.record.begun_unix_s for view in self.views)

    @property
    def ended_unix_s(self) -> float:
        """0 while the move has not ended."""
        return max(view.record.ended_unix_s for view in self.views) if self.ended else 0.0

    @property
    def outcome(self) -> pb.OutcomeKind.ValueType:
        return self._decided.outcome

    @property
    def reason(self) -> str:
        return self._decided.reason

    @property
    def decided_by(self) -> str:
        return self._decided.decided_by

    @property
    def _decided(self) -> pb.MoveRecord:
        decided = [view.record for view in self.views if view.record.outcome != pb.UNDECIDED]
        return decided[0] if decided else self.first

    @property
    def runs_on_target(self) -> bool:
        return self.target is not None and self.target.record.mark == "activated"

    @property
    def verdict(self) -> Verdict:
        """The outcome, as far as it is certain now. Clean-up may still be in progress."""
        if self.outcome == pb.COMMIT and (self.ended or self.runs_on_target):
            return Verdict.MOVED
        if self.outcome == pb.ABORT and (self.source is None or self.source.ended):
            return Verdict.UNDONE
        return Verdict.UNKNOWN

    @property
    def where(self) -> Where:
        """Where the rank is, or was when the move ended."""
        if self.runs_on_target:
            return Where.TARGET_RUNNING
        for view in self.views:
            try:
                return Where(view.record.where)
            except ValueError:
                continue
        return Where.UNKNOWN

    @property
    def waiting_for(self) -> str:
        reasons = [f"{view.node}: {view.record.waiting_for}" for view in self.views if not view.ended]
        return "; ".join(text for text in reasons if not text.endswith(": "))

    @property
    def step(self) -> str:
        """The last step that source and target have done."""
        return " / ".join(view.record.mark for view in self.views)

    @property
    def bytes(self) -> int:
        return max(view.record.bytes for view in self.views)

    @property
    def pause_s(self) -> float:
        return max(view.record.pause_s for view in self.views)

    @property
    def predicted_s(self) -> float:
        """The pause that was predicted; 0: none was."""
        return max(view.record.predicted_s for view in self.views)

    @property
    def handed_over_bytes(self) -> int:
        """Device memory that was not sent, because source and target use the same GPU."""
        return max(view.record.handed_over_bytes for view in self.views)

    def to_json(self) -> dict[str, Any]:
        return {
            "move": self.id,
            "job": self.job,
            "user_id": self.user_id,
            "rank": self.rank,
            "uid": self.rank_uid,
            "source": self.source_node,
            "target": self.target_node,
            "outcome": self.verdict.value,
            "ended": self.ended,
            "where": self.where.value,
            "reason": self.reason,
            "decided_by": self.decided_by,
            "waiting_for": self.waiting_for,
            "begun_unix_s": round(self.begun_unix_s, 3),
            "ended_unix_s": round(self.ended_unix_s, 3),
            "pause_s": round(self.pause_s, 4),
            "predicted_s": round(self.predicted_s, 4),
            "bytes": self.bytes,
            "handed_over_bytes": self.handed_over_bytes,
            "views": [
                {
                    "node": view.node,
                    "role": view.record.role,
                    "mark": view.record.mark,
                    "outcome": formatting.name_of(pb.OutcomeKind, view.record.outcome),
                    "ended": view.ended,
                    "where": view.record.where,
                    "waiting_for": view.record.waiting_for,
                }
                for view in self.views
            ],
        }


@dataclass(frozen=True)
class Gate:
    """One rank on `node` that waits at its closed NCCL gate for the move of a rank of its job, possibly its own."""

    node: str
    move: str
    job: str
    rank: int
    since_unix_s: float
    waiting_for: str
    user_id: int | None = None  # whose job it is; None: an older version closed it

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"since_unix_s": round(self.since_unix_s, 3)}


async def all_moves(cluster: Cluster, move: str = "") -> tuple[list[Move], dict[str, SnapshotError]]:
    """Every move that any node knows (or only `move`), newest first, and the nodes that did not answer."""
    moves, _, silent = await moves_and_gates(cluster, move)
    return moves, silent


async def move_of(cluster: Cluster, name: str) -> str:
    """The id of a move. `name` is that id, or the id of a rank: then the rank's unfinished move, or else its latest one.
    Raises NotFound if no node that answers knows a move of that rank."""
    if name.startswith("m-"):
        return name
    moves, silent = await all_moves(cluster)
    mine = sorted(
        (move for move in moves if move.rank_uid == name), key=lambda move: (not move.ended, move.begun_unix_s)
    )
    if not mine:
        lost = f", and these do not answer: {', '.join(silent)}" if silent else ""
        raise NotFound(f"no node knows a move of rank {name}{lost}", remedy="`migrator ps` lists the ranks")
    return mine[-1].id


async def moves_and_gates(cluster: Cluster, move: str = "") -> tuple[list[Move], list[Gate], dict[str, SnapshotError]]:
    """Like `all_moves`, and also every gate that is closed for a move, sorted by job and rank."""

    async def ask(client: DaemonClient) -> pb.ListMovesReply:
        try:
            return await client.node.ListMoves(pb.ListMovesRequest(move=move), timeout_s=ASK_TIMEOUT_S)
        except NotFound:
            return pb.ListMovesReply()

    answers, silent = await ask_all(cluster, ask)
    gates = [
        Gate(
            node,
            closed.move,
            closed.job,
            rank,
            closed.since_unix_s,
            closed.waiting_for,
            closed.user_id if closed.HasField("user_id") else None,
        )
        for node, answer in answers.items()
        for closed in answer.gates
        for rank in closed.ranks
    ]
    gates.sort(key=lambda gate: (gate.job, gate.rank, gate.node))
    return merge({node: list(answer.moves) for node, answer in answers.items()}), gates, silent


def merge(answers: dict[str, list[pb.MoveRecord]]) -> list[Move]:
    """Groups the records of all nodes by move, newest first.

    A node speaks for itself only: its record counts if it names this node in its role. Records with the same id that name
    different nodes are different moves, of which at most one is real."""
    views: dict[tuple[str, str, str], dict[str, View]] = {}
    for node, records in answers.items():
        for record in records:
            if record.coordinator:
                continue  # a rank of a job that is suspended or resumed: `migrator job list` has those
            if node == {"source": record.source_node, "target": record.target_node}.get(record.role):
                key = record.move, record.source_node, record.target_node
                views.setdefault(key, {})[record.role] = View(node, record)
    moves = [Move(move, found.get("source"), found.get("target")) for (move, _, _), found in views.items()]
    return sorted((move for move in moves if move.views), key=lambda move: move.begun_unix_s, reverse=True)
