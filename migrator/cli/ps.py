"""`migrator ps`: lists the ranks of all nodes."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from migrator import formatting, users
from migrator.cli import arguments, output
from migrator.find_rank import Found, all_ranks
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.cuda.pairing import short

HEADS: tuple[str, ...] = (
    "JOB",
    "RANK",
    "NODE",
    "HOME",
    "PID",
    "USER",
    "MEMORY",
    "UP",
    "MOVES",
    "STATE",
    "ID",
    "COMMAND",
)
GPU_HEAD = "GPU"
_PLACES = {pb.Rank.HERE: "here", pb.Rank.SUSPENDED: "suspended", pb.Rank.AWAY: "away"}
#: Which entry of a rank is shown: the home keeper of a suspended rank says only that it is away.
_PREFERRED = {place: number for number, place in enumerate(_PLACES)}


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "ps",
        act,
        "list the ranks on all nodes",
        more="A node that does not answer causes a warning; if no node answers, the command fails. GPU is the beginning of"
        " the UUID (`migrator nodes --json` has the whole) and the device memory in use.",
        examples="  migrator ps\n  migrator ps --job night --json",
    )
    parser.add_argument("--job", type=arguments.job, metavar="NAME", help="show only ranks of this job")
    parser.add_argument(
        "--rank",
        type=arguments.rank_or_id,
        metavar="N|ID",
        help="show only ranks with this number in their job, or the rank with this id",
    )
    parser.add_argument(
        "--user", type=arguments.user, metavar="NAME|UID", help="show only ranks that this user has started"
    )
    parser.add_argument(
        "--all", action="store_true", help="also show the home keepers of ranks that run on another node"
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    found, silent = asyncio.run(all_ranks(cluster))
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    shown = [
        entry
        for entry in visible(found, everything=options.all)
        if options.job in (None, entry.rank.job)
        and options.rank in (None, entry.rank.rank, entry.rank.uid)
        and options.user in (None, entry.rank.user_id)
    ]
    if as_json:
        output.json_object({"ranks": [to_json(entry) for entry in shown], "unreachable": output.silent_objects(silent)})
    elif shown:
        heads, rows = HEADS, [_row(entry) for entry in shown]
        if any(entry.rank.gpus for entry in shown):
            at = HEADS.index("MEMORY") + 1
            heads = (*HEADS[:at], GPU_HEAD, *HEADS[at:])
            rows = [(*row[:at], gpu_text(entry.rank), *row[at:]) for row, entry in zip(rows, shown, strict=True)]
        output.table(heads, rows, right=("RANK", "PID", "MEMORY", "UP", "MOVES"))
    else:
        print("no ranks are running; `migrator run -- CMD` starts one")
    return 0


def visible(found: list[Found], *, everything: bool) -> list[Found]:
    """One row per rank: its process, or its home keeper if no node that answers has the process.

    During a move, the target's copy is shown only with `everything`, because it does not run yet.
    """
    rows: dict[str, Found] = {}
    for entry in sorted(found, key=lambda entry: (_PREFERRED.get(entry.rank.place, 9), entry.rank.moves)):
        rows.setdefault(entry.rank.uid, entry)
    shown = found if everything else list(rows.values())
    return sorted(shown, key=_order)


def _order(entry: Found) -> tuple[str, int, int, int, str]:
    rank = entry.rank
    return rank.job, rank.user_id, rank.rank, rank.place, entry.node


def state(entry: Found) -> str:
    if entry.rank.moving:
        return f"moving ({entry.rank.moving})"
    if entry.rank.place == pb.Rank.SUSPENDED:
        return "suspended"
    return "running" if entry.rank.place == pb.Rank.HERE else f"away (on {entry.rank.at_node})"


def to_json(entry: Found) -> dict[str, Any]:
    rank = entry.rank
    return {
        "uid": rank.uid,
        "job": rank.job,
        "rank": rank.rank,
        "node": entry.node,
        "at_node": rank.at_node or entry.node,
        "home": rank.home_node,
        "pid": rank.process.pid,
        "user_id": rank.user_id,
        "memory_bytes": rank.memory_bytes,
        "gpus": list(rank.gpus),
        "device_bytes": rank.device_bytes,
        "started_unix_s": round(rank.started_unix_s, 3),
        "moves": rank.moves,
        "moving": rank.moving,
        "place": _PLACES.get(rank.place, "away"),
        "command": rank.command,
    }


def _row(entry: Found) -> tuple[str, ...]:
    rank = entry.rank
    here = rank.place == pb.Rank.HERE
    return (
        rank.job,
        str(rank.rank),
        entry.node if here else rank.at_node,
        rank.home_node,
        str(rank.process.pid) if here else "-",
        users.name_of(rank.user_id),
        formatting.size(rank.memory_bytes) if here else "-",
        formatting.span(time.time() - rank.started_unix_s),
        str(rank.moves),
        state(entry),
        rank.uid,
        rank.command,
    )


def gpu_text(rank: pb.Rank) -> str:
    """ "GPU-1a2b3c4d 1.3 GB"; several GPUs are separated by commas, followed by the memory on all of them."""
    if not rank.gpus:
        return "-"
    return f"{','.join(short(uuid) for uuid in rank.gpus)} {formatting.size(rank.device_bytes)}"
