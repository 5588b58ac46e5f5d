"""`migrator recover`: finishes or undoes moves that a crash left unfinished, also by declaring a node dead."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import sys

from migrator import formatting, recover
from migrator.cli import arguments, output
from migrator.cluster import Cluster
from migrator.journals import move_of
from migrator.protocol import Verdict
from snapshotd.api.errors import Usage


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "recover",
        act,
        "finish or undo moves that a crash left unfinished",
        more=(
            "The daemons settle moves by themselves; this command makes them do it now. A committed move is finished: "
            "the source's token is passed to a target that the source cannot reach. An undecided move is undone: at once "
            "if it is named (or with --abort), otherwise when its lease expires, because its driver may still be running."
        ),
        examples=(
            "  migrator recover\n"
            "  migrator recover m-0123456789ab\n"
            "  migrator recover m-0123456789ab --source-is-dead     the source node is permanently down\n"
            "  migrator recover m-0123456789ab --member-is-dead node-7     node-7, which has another rank of the NCCL job, is"
            " permanently down"
        ),
    )
    parser.add_argument(
        "move",
        nargs="?",
        type=arguments.move_or_rank_id,
        metavar="MOVE|ID",
        help="move to recover, or the id of the rank that is moved (default: all unfinished moves)",
    )
    parser.add_argument(
        "--abort", action="store_true", help="undo undecided moves at once, even if their driver is running"
    )
    dead = parser.add_mutually_exclusive_group()
    dead.add_argument(
        "--source-is-dead",
        action="store_true",
        help="assert that the source node is permanently down, so that the target may run the rank",
    )
    dead.add_argument(
        "--target-is-dead",
        action="store_true",
        help="assert that the target node is permanently down, so that the source may run the rank",
    )
    dead.add_argument(
        "--member-is-dead",
        metavar="NODE",
        default="",
        help="assert that a node with another rank of the NCCL job is permanently down, so that the undo does not wait for "
        "it: the job's ranks get an NCCL error",
    )
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")


def act(options: argparse.Namespace) -> int:
    declares = options.source_is_dead or options.target_is_dead or options.member_is_dead
    if declares and options.move is None:
        raise Usage(
            "--source-is-dead, --target-is-dead and --member-is-dead need a move",
            remedy="name the move; `migrator status` lists them",
        )
    if declares and options.abort:
        raise Usage("--abort cannot be combined with an assertion that a node is dead", remedy="leave it out")
    if declares and not options.yes:
        _must_be_asked(options)
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    report = asyncio.run(_recover(cluster, options))
    output.warn_silent(report.silent, len(cluster.nodes), as_json=as_json)
    if as_json:
        output.json_object(
            {
                "moves": [one.to_json() for one in report.recovered],
                "unreachable": output.silent_objects(report.silent),
            }
        )
    else:
        _show(report)
    return report.exit_code


async def _recover(cluster: Cluster, options: argparse.Namespace) -> recover.Report:
    move = await move_of(cluster, options.move) if options.move is not None else None
    if move is not None and (options.source_is_dead or options.target_is_dead):
        declare = recover.declare_source_dead if options.source_is_dead else recover.declare_target_dead
        return recover.Report([await declare(cluster, move, _who(), _note, lambda: _be_sure(options))], {})
    if move is not None and options.member_is_dead:
        node, sure = options.member_is_dead, lambda: _be_sure(options)
        return recover.Report([await recover.declare_member_dead(cluster, move, node, _who(), _note, sure)], {})
    abort = options.abort or move is not None
    return await recover.recover(cluster, move, abort=abort, by=_who(), note=_note)


def _must_be_asked(options: argparse.Namespace) -> None:
    if not sys.stdin.isatty():
        raise Usage(
            f"there is no terminal to confirm that the {_dead_end(options)} is dead",
            remedy="if the node is certainly down for good (fenced, powered off), add --yes",
        )


def _dead_end(options: argparse.Namespace) -> str:
    if options.member_is_dead:
        return f"node {options.member_is_dead}"
    return "source" if options.source_is_dead else "target"


def _be_sure(options: argparse.Namespace) -> None:
    """Asks for confirmation, because a false declaration can make two copies run, or ends a job that could continue."""
    if options.yes:
        return
    who = _dead_end(options)
    price = (
        "The other ranks of the job get an NCCL error, after which most jobs end."
        if options.member_is_dead
        else f"If the {who} of {options.move} is still alive, two copies of the rank will run."
    )
    print(
        f"{price}\nType yes only if it is powered off, fenced or destroyed: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() != "yes":
        raise Usage("not confirmed; nothing was done", remedy="answer yes")


def _who() -> str:
    try:
        name = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def _note(text: str) -> None:
    print(f"  {formatting.plain(text)}", file=sys.stderr, flush=True)


def _show(report: recover.Report) -> None:
    if not report.recovered:
        print("nothing to recover: all moves have ended")
    for one in report.recovered:
        move = one.move
        state = one.verdict.value if one.verdict is not Verdict.UNKNOWN else "still open"
        where = output.where_words(move.where, move.source_node, move.target_node)
        print(f"{move.id}  rank {move.rank} of job {formatting.plain(move.job)}: {state}; the rank is {where}")
        facts = [*one.did, f"waits for {move.waiting_for}" if move.waiting_for else "", move.reason]
        for fact in facts:
            if fact:
                print(f"  {formatting.plain(fact)}")
        if one.remedy:
            print(f"  remedy: {formatting.plain(one.remedy)}")
