"""`migrator check`: runs the preflight checks of a move. Nothing is paused."""

from __future__ import annotations

import argparse
import asyncio

from migrator import formatting
from migrator.cli import arguments, output
from migrator.estimate import Estimate
from migrator.results import CheckReport, MoveOptions
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused

_SIGNS = {pb.Check.PASS: ("✓", "green"), pb.Check.WARN: ("!", "yellow"), pb.Check.REFUSE: ("✗", "red")}


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "check",
        act,
        "check whether a rank can move to a node",
        more="Nothing is paused. Each check passes (✓), warns (!) or refuses the move (✗).",
        examples="  migrator check --rank 1 --to spare-1\n  migrator check --rank 0 --job night --to node-2 --json\n"
        "  migrator check --rank 1 --to spare-1 --estimate",
    )
    add_ask(parser)
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="also predict the pause of the move, from the rank's memory and earlier moves of these nodes",
    )


def add_ask(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the rank and the target, which `check` and `move` share."""
    parser.add_argument(
        "--rank",
        type=arguments.rank_or_id,
        required=True,
        metavar="R|ID",
        help="rank to move, by its number in the job, or by its id (`migrator ps` lists them)",
    )
    parser.add_argument("--to", type=arguments.node, required=True, metavar="NODE", help="node to move it to")
    parser.add_argument(
        "--from",
        dest="source",
        type=arguments.node,
        metavar="NODE",
        help="node that has the rank (default: the one that says so; needed if another one says so, too)",
    )
    parser.add_argument(
        "--job", type=arguments.job, metavar="NAME", help="job of the rank, if several jobs have such a rank"
    )
    parser.add_argument(
        "--user",
        type=arguments.user,
        metavar="NAME|UID",
        help="user whose job it is, if several users have a job of that name",
    )
    parser.add_argument(
        "--gpu",
        type=arguments.gpu,
        metavar="UUID|INDEX",
        help="GPU of that node to use (default: a free one of the same model with enough memory)",
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    from migrator import driver  # after `enter`: it loads gRPC

    asked = MoveOptions(
        options.rank, options.to, options.job, gpu=options.gpu or "", user_id=options.user, source=options.source or ""
    )
    report = asyncio.run(driver.Driver(cluster, lambda _: None).check(asked, estimate=options.estimate))
    if arguments.wants_json(options):
        output.json_object(report.to_json())
    else:
        _show(report)
    return Refused.exit_code if report.refused else 0


def _show(report: CheckReport) -> None:
    rank = report.rank
    print(f"rank {rank.rank} of job {formatting.plain(rank.job)}: {report.source} → {report.target}")
    rows: list[list[str | tuple[str, str]]] = []
    for check in report.checks:
        remedy = f"\nremedy: {check.remedy}" if check.remedy and check.verdict != pb.Check.PASS else ""
        rows.append([("", ""), _SIGNS.get(check.verdict, ("?", "yellow")), f"{check.name} ", check.reason + remedy])
    output.grid(rows)
    refusals = sum(check.verdict == pb.Check.REFUSE for check in report.checks)
    if refusals:
        print(output.styled(f"the rank cannot move: {refusals} of {len(report.checks)} checks refuse", "red"))
    else:
        print(output.styled(f"the rank can move: none of {len(report.checks)} checks refuses", "green"))
    if report.estimate is not None:
        _show_estimate(report.estimate)


def _show_estimate(estimate: Estimate) -> None:
    print(f"predicted pause: {formatting.seconds(estimate.pause_s)} ({estimate.basis})")
    rows = [
        (part.name, f"{part.seconds:.2f} s", formatting.size(part.bytes) if part.bytes else "")
        for part in estimate.parts
    ]
    output.table(("PART", "TIME", "SIZE"), rows, right=("TIME", "SIZE"), indent=2, style="dim")
