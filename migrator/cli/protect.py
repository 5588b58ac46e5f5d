"""`migrator protect`: takes snapshots of a job at intervals, and rolls it back when it has lost a rank."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from migrator import formatting
from migrator.cli import arguments
from migrator.job_results import JobOptions
from migrator.jobs.interval import NODE_MTBF_S

EVERY_S = 300.0
TRIES = 3


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "protect",
        _protect,
        "take snapshots of a job at intervals, and roll it back when it has lost a rank or a node",
        more="Runs until the job has ended. While the job has a snapshot, the keepers hold a failure of a rank back for up to"
        " 60 seconds, so that its launcher does not see it if the job is rolled back. A failure that comes back after a"
        " rollback, before the next snapshot, is passed on after some tries. It can be ended and started again at any time.",
        examples="  migrator protect night --every 300\n  migrator protect night --every auto --mtbf 4000",
    )
    parser.add_argument("job", type=arguments.job, metavar="JOB", help="name of the job")
    parser.add_argument("--user", type=arguments.user, metavar="NAME|UID", help="user who has started it")
    parser.add_argument(
        "--every",
        type=_every,
        default=EVERY_S,
        metavar="S|auto",
        help="seconds between two snapshots (default: %(default)s); auto: what costs least, computed from the measured"
        " pause and how often nodes fail",
    )
    parser.add_argument(
        "--mtbf",
        type=arguments.positive_seconds,
        default=NODE_MTBF_S / 3600,
        metavar="H",
        help="with --every auto: hours between two failures of one node, on average (default: %(default).0f)",
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=TRIES,
        metavar="N",
        help="number of rollbacks to the same snapshot before a failure is passed on (default: %(default)s)",
    )


def _protect(options: argparse.Namespace) -> int:
    from migrator.jobs.protect import Protection  # after `enter`: it loads gRPC

    cluster = arguments.the_cluster(options)
    asked = JobOptions(options.job, options.user)
    protection = Protection(cluster, asked, options.every, options.tries, _say, node_mtbf_s=options.mtbf * 3600)
    return asyncio.run(protection.run())


def _every(text: str) -> float | None:
    return None if text == "auto" else arguments.positive_seconds(text)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {formatting.plain(text)}", flush=True, file=sys.stdout)
