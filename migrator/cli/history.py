"""`migrator history`: lists moves that have ended, newest first."""

from __future__ import annotations

import argparse
import asyncio

from migrator import formatting
from migrator.cli import arguments, output
from migrator.cli.status import stamp
from migrator.journals import Move, all_moves

HEADS = ("MOVE", "ENDED", "JOB", "RANK", "FROM", "TO", "OUTCOME", "PAUSE", "PREDICTED", "BYTES", "REASON")


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "history",
        act,
        "list moves that have ended, newest first",
        more=(
            "PREDICTED is the pause that was predicted before the move, as `migrator check --estimate` does, and by how "
            "much that was wrong."
        ),
        examples="  migrator history\n  migrator history --limit 5 --json\n  migrator history --job night --rank 3",
    )
    parser.add_argument("--job", type=arguments.job, metavar="NAME", help="show only moves of ranks of this job")
    parser.add_argument(
        "--rank",
        type=arguments.rank_or_id,
        metavar="N|ID",
        help="show only moves of ranks with this number in their job, or of the rank with this id",
    )
    parser.add_argument(
        "--limit", type=arguments.count, default=20, metavar="N", help="maximum number of moves to show (default: 20)"
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    moves, silent = asyncio.run(all_moves(cluster))
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    asked = [
        move for move in moves if options.job in (None, move.job) and options.rank in (None, move.rank, move.rank_uid)
    ]
    ended = sorted((move for move in asked if move.ended), key=lambda move: move.ended_unix_s, reverse=True)
    shown = ended[: options.limit]
    if as_json:
        output.json_object({"moves": [move.to_json() for move in shown], "unreachable": output.silent_objects(silent)})
    elif shown:
        output.table(HEADS, [_row(move) for move in shown], right=("RANK", "PAUSE", "PREDICTED", "BYTES"))
        if len(ended) > len(shown):
            print(output.styled(f"{len(ended) - len(shown)} older moves not shown (--limit)", "dim"))
    else:
        print("no move has ended yet")
    return 0


def predicted(move: Move) -> str:
    """The pause that was predicted, and by how much that was wrong: "1.2 s (-8 %)"."""
    if not move.predicted_s or not move.pause_s:
        return "-"
    wrong = (move.predicted_s - move.pause_s) / move.pause_s
    return f"{formatting.seconds(move.predicted_s)} ({100 * wrong:+.0f} %)"


def _row(move: Move) -> tuple[str, ...]:
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
        move.reason,
    )
