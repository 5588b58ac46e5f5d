"""`migrator check`: could this rank move there? Preflight alone, nothing is paused."""

from __future__ import annotations

import argparse
import asyncio

from migrator import formatting
from migrator.cli import arguments, output
from migrator.results import CheckReport, MoveOptions
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused

_SIGNS = {pb.Check.PASS: ("✓", "green"), pb.Check.WARN: ("!", "yellow"), pb.Check.REFUSE: ("✗", "red")}


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "check",
        act,
        "say whether a rank could move to a node",
        more="Nothing is paused. ✓ passes, ! is worth knowing, ✗ refuses the move.",
        examples="  migrator check --rank 1 --to spare-1\n  migrator check --rank 0 --job night --to node-2 --json",
    )
    add_ask(parser)


def add_ask(parser: argparse.ArgumentParser) -> None:
    """Which rank, and where to: for `check` and `move`."""
    parser.add_argument("--rank", type=arguments.rank, required=True, metavar="R", help="the rank's number in its job")
    parser.add_argument("--to", type=arguments.node, required=True, metavar="NODE", help="the node it shall move to")
    parser.add_argument("--job", type=arguments.job, metavar="NAME", help="its job, where several have such a rank")
    parser.add_argument(
        "--gpu",
        type=arguments.gpu,
        metavar="UUID|INDEX",
        help="the GPU of that node to move to (default: a free one of the same chip with enough memory)",
    )


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    from migrator import driver  # after `enter`: it loads gRPC

    asked = MoveOptions(options.rank, options.to, options.job, gpu=options.gpu or "")
    report = asyncio.run(driver.Driver(cluster, lambda _: None).check(asked))
    if arguments.wants_json(options):
        output.json_object(report.to_json())
    else:
        _show(report)
    return Refused.exit_code if report.refused else 0


def _show(report: CheckReport) -> None:
    rank = report.rank
    print(f"rank {rank.rank} of job {formatting.plain(rank.job)}: {report.source} → {report.target}")
    width = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        sign, colour = _SIGNS[check.verdict]
        first, *rest = formatting.plain_lines(check.reason) or [""]
        print(f"  {output.styled(sign, colour)} {formatting.plain(check.name):<{width}}  {first}".rstrip())
        for line in rest:
            print(f"    {'':<{width}}  {line}")
        if check.remedy and check.verdict != pb.Check.PASS:
            print(f"    {'':<{width}}  remedy: {formatting.plain(check.remedy)}")
    refusals = sum(check.verdict == pb.Check.REFUSE for check in report.checks)
    if refusals:
        print(output.styled(f"it cannot move: {refusals} of {len(report.checks)} checks refuse", "red"))
    else:
        print(output.styled(f"it can move: {len(report.checks)} checks, none refuses", "green"))
