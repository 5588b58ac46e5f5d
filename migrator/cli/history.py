"""`migrator history`: lists moves and rollbacks that have ended, newest first."""

from __future__ import annotations

import argparse
import asyncio

from migrator import formatting
from migrator.cli import arguments, output
from migrator.cli.status import stamp
from migrator.cluster import Cluster
from migrator.journals import Move, all_moves
from migrator.rollbacks import Rollback, all_rollbacks
from snapshotd.api.errors import SnapshotError

HEADS = ("MOVE", "ENDED", "JOB", "RANK", "FROM", "TO", "OUTCOME", "PAUSE", "PREDICTED", "BYTES", "REASON")


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "history",
        act,
        "list moves and rollbacks that have ended, newest first",
        more=(
            "PREDICTED is the pause that was predicted before the move, as `migrator check --estimate` does, and by how "
            "much that was wrong. Of a rollback, PAUSE is the time for which the job did not run, and REASON says how much "
            "of its work was lost."
        ),
        examples="  migrator history\n  migrator history --limit 5 --json\n  migrator history --job night --rank 3",
    )
    parser.add_argument("--job", type=arguments.job, metavar="NAME", help="show only moves and rollbacks of this job")
    parser.add_argument(
        "--rank",
        type=arguments.rank_or_id,
        metavar="N|ID",
        help="show only moves of ranks with this number in their job, or of the rank with this id, and rollbacks of a job"
        " with that number of a rank",
    )
    parser.add_argument(
        "--limit", type=arguments.count, default=20, metavar="N", help="maximum number of lines to show (default: 20)"
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    moves, rollbacks, silent = asyncio.run(_asked(cluster))
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    asked = [
        move for move in moves if options.job in (None, move.job) and options.rank in (None, move.rank, move.rank_uid)
    ]
    of_job = [one for one in rollbacks if options.job in (None, one.job) and _concerns(one, options.rank)]
    ended: list[Move | Rollback] = [*(move for move in asked if move.ended), *of_job]
    ended.sort(key=lambda one: one.ended_unix_s, reverse=True)
    shown = ended[: options.limit]
    if as_json:
        output.json_object(
            {
                "moves": [one.to_json() for one in shown if isinstance(one, Move)],
                "rollbacks": [one.to_json() for one in shown if isinstance(one, Rollback)],
                "unreachable": output.silent_objects(silent),
            }
        )
    elif shown:
        output.table(HEADS, [_row(one) for one in shown], right=("RANK", "PAUSE", "PREDICTED", "BYTES"))
        if len(ended) > len(shown):
            print(output.styled(f"{len(ended) - len(shown)} older lines not shown (--limit)", "dim"))
    else:
        print("no move or rollback has ended yet")
    return 0


async def _asked(cluster: Cluster) -> tuple[list[Move], list[Rollback], dict[str, SnapshotError]]:
    (moves, silent), (rollbacks, _) = await asyncio.gather(all_moves(cluster), all_rollbacks(cluster))
    return moves, rollbacks, silent


def _concerns(rollback: Rollback, rank: int | str | None) -> bool:
    """Whether a rank with this number was rolled back. The record of a rollback that has ended has no ids of ranks."""
    return rank is None or (isinstance(rank, int) and rank < rollback.ranks)


def predicted(move: Move) -> str:
    """The pause that was predicted, and by how much that was wrong: "1.2 s (-8 %)"."""
    if not move.predicted_s or not move.pause_s:
        return "-"
    wrong = (move.predicted_s - move.pause_s) / move.pause_s
    return f"{formatting.seconds(move.predicted_s)} ({100 * wrong:+.0f} %)"


def _row(move: Move | Rollback) -> tuple[str, ...]:
    if isinstance(move, Rollback):
        down = formatting.seconds(move.down_s) if move.resumed else "-"
        when = stamp(move.ended_unix_s)
        return (move.record, when, move.job, "all", "-", "-", "rolled back", down, "-", "-", move.words)
    return (
        move.id,
        stamp(move.ended_unix_s),
        move.job,
        str(move.rank),
        move.source_node,
        move.target_node,
        move.verdict.value,
        formatting.seconds(move.pause_s) if move.pause_s else "-",
        predicted(move),
        formatting.size(move.bytes) if move.bytes else "-",
        _remark(move),
    )


def _remark(move: Move) -> str:
    """Why it ended as it did; of a move without a transfer, that there was none."""
    if move.handed_over_bytes and not move.reason:
        return f"{formatting.size(move.handed_over_bytes)} of device memory handed over on the same GPU, not sent"
    return move.reason
