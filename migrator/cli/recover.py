"""`migrator recover`: finishes or undoes what a crash left, or passes on a person's word that a node is dead."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import sys

from migrator import formatting, recover
from migrator.cli import arguments, output
from migrator.cluster import Cluster
from migrator.protocol import Verdict
from snapshotd.api.errors import Usage


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "recover",
        act,
        "finish or undo what a crash left",
        more=(
            "The daemons settle moves alone; this makes them do it now. A committed move is finished: the source's "
            "token is carried to a target that the source cannot reach. An undecided one is undone: at once if it is "
            "named (or with --abort), else when the lease of its driver is over, because that driver may be alive "
            "and well."
        ),
        examples=(
            "  migrator recover\n"
            "  migrator recover m-0123456789ab\n"
            "  migrator recover m-0123456789ab --source-is-dead     the node left is gone for good"
        ),
    )
    parser.add_argument("move", nargs="?", type=arguments.move, metavar="MOVE", help="one move (default: all)")
    parser.add_argument("--abort", action="store_true", help="undo undecided moves at once, whoever drives them")
    dead = parser.add_mutually_exclusive_group()
    dead.add_argument(
        "--source-is-dead", action="store_true", help="my word: it never runs again, so the target may go on"
    )
    dead.add_argument(
        "--target-is-dead", action="store_true", help="my word: it never runs again, so the source goes on"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask whether I am sure")


def act(options: argparse.Namespace) -> int:
    declares = options.source_is_dead or options.target_is_dead
    if declares and options.move is None:
        raise Usage("a node is declared dead for one move", remedy="name the move; `migrator status` lists them")
    if declares and options.abort:
        raise Usage("--abort asks the source, and says nothing about a dead node", remedy="leave it out")
    if declares and not options.yes:
        _be_sure(options)
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
    if options.source_is_dead:
        return recover.Report([await recover.declare_source_dead(cluster, options.move, _who())], {})
    if options.target_is_dead:
        return recover.Report([await recover.declare_target_dead(cluster, options.move, _who())], {})
    abort = options.abort or options.move is not None
    return await recover.recover(cluster, options.move, abort=abort, by=_who(), note=_note)


def _be_sure(options: argparse.Namespace) -> None:
    """A word that is wrong can make two copies run: it is asked for twice."""
    who = "source" if options.source_is_dead else "target"
    if not sys.stdin.isatty():
        raise Usage(
            f"nobody is here to confirm that the {who} is dead",
            remedy="if it is certain that it never runs again (fenced, powered off), add --yes",
        )
    print(
        f"If the {who} of {options.move} is alive after all, two copies of the rank will run.\n"
        "Say yes only if it is powered off, fenced or destroyed: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() != "yes":
        raise Usage("not confirmed, nothing was done", remedy="answer yes")


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
        print("nothing to recover: every move has ended")
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
            print(f"  remedy: {one.remedy}")
