"""`migrator status`: lists moves that have not ended, what they wait for and where the rank is; or shows one move in detail.

Ranks that wait at a closed NCCL gate are listed as well, even if the move itself has ended or its nodes do not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from migrator import formatting, users
from migrator.cli import arguments, output
from migrator.cluster import Cluster
from migrator.journals import Gate, Move, move_of, moves_and_gates
from migrator.recover import unknown_move
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import SnapshotError

HEADS = ("MOVE", "JOB", "RANK", "FROM", "TO", "SINCE", "STEP", "OUTCOME", "THE RANK IS", "WAITS FOR")
GATE_HEADS = ("GATE CLOSED FOR", "JOB", "RANK", "NODE", "SINCE", "WAITS FOR")


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "status",
        act,
        "show moves in progress and the ranks that wait for them, or one move in detail",
        more="STEP is the last step that source and target have done. A rank whose NCCL gate is closed launches no NCCL"
        " operation until the move has ended.",
        examples="  migrator status\n  migrator status m-0123456789ab\n  migrator status train-0-1a2b3c4d",
    )
    parser.add_argument(
        "move",
        nargs="?",
        type=arguments.move_or_rank_id,
        metavar="MOVE|ID",
        help="move to show, ended or not; or the id of a rank, for its latest move",
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    move, moves, gates, silent = asyncio.run(_ask(cluster, options.move))
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    if move:
        if not moves and not gates:
            raise unknown_move(move, silent)
        if as_json:
            output.json_object((moves[0].to_json() if moves else {"move": move}) | _others(gates, silent))
        elif moves:
            _detail(moves[0], gates)
        else:  # neither its source nor its target answers
            _gates(gates)
        return 0
    unfinished = [move for move in moves if not move.ended]
    if as_json:
        output.json_object({"moves": [move.to_json() for move in unfinished]} | _others(gates, silent))
        return 0
    if unfinished:
        output.table(HEADS, [_row(move) for move in unfinished], right=("RANK", "SINCE"))
    else:
        print("no moves in progress; `migrator history` lists those that have ended")
    if gates:
        print()
        _gates(gates)
    return 0


async def _ask(cluster: Cluster, name: str | None) -> tuple[str, list[Move], list[Gate], dict[str, SnapshotError]]:
    move = await move_of(cluster, name) if name is not None else ""
    return (move, *await moves_and_gates(cluster, move))


def _others(gates: Sequence[Gate], silent: Mapping[str, SnapshotError]) -> dict[str, Any]:
    return {"gates": [gate.to_json() for gate in gates], "unreachable": output.silent_objects(silent)}


def _outcome(move: Move) -> str:
    return formatting.name_of(pb.OutcomeKind, move.outcome).lower()


def _row(move: Move) -> tuple[str, ...]:
    return (
        move.id,
        move.job,
        str(move.rank),
        move.source_node,
        move.target_node,
        formatting.span(time.time() - move.begun_unix_s),
        move.step,
        _outcome(move),
        str(move.where),
        move.waiting_for or "-",
    )


def _gates(gates: Sequence[Gate]) -> None:
    output.table(GATE_HEADS, [_gate_row(gate) for gate in gates], right=("RANK", "SINCE"))


def _gate_row(gate: Gate) -> tuple[str, ...]:
    return (gate.move, gate.job, str(gate.rank), gate.node, _since(gate), gate.waiting_for or "-")


def _since(gate: Gate) -> str:
    return formatting.span(time.time() - gate.since_unix_s)


def _detail(move: Move, gates: Sequence[Gate]) -> None:
    state = f"ended: {move.verdict}" if move.ended else f"not ended: {_outcome(move)}"
    facts = {
        "move": f"{move.id}  rank {move.rank} of job {move.job}{_whose(move)}  {move.source_node} → {move.target_node}",
        "state": state,
        "the rank is": output.where_words(move.where, move.source_node, move.target_node),
        "waits for": move.waiting_for,
        "reason": move.reason,
        "decided by": move.decided_by,
        "begun": stamp(move.begun_unix_s),
        "ended": stamp(move.ended_unix_s) if move.ended else "",
        "pause": formatting.seconds(move.pause_s) if move.pause_s else "",
        "bytes": formatting.size(move.bytes) if move.bytes else "",
    }
    for view in move.views:
        record = view.record
        outcome = formatting.name_of(pb.OutcomeKind, record.outcome).lower()
        state = f"{record.mark}, {outcome}{', ended' if view.ended else ''}"
        facts[f"{record.role}'s view"] = f"{view.node}: {state}"
    for gate in gates:
        why = f": {gate.waiting_for}" if gate.waiting_for else ""
        facts[f"gate of rank {gate.rank}"] = f"closed on {gate.node} for {_since(gate)}{why}"
    for name, text in facts.items():
        if text:
            print(f"{name + ':':<15} {formatting.plain(text)}")


def _whose(move: Move) -> str:
    return f" of {users.described(move.user_id)}" if move.user_id is not None else ""


def stamp(unix_s: float) -> str:
    return formatting.moment(unix_s)
