"""`migrator protect`: takes snapshots of a job at intervals, and rolls it back when it has lost a rank."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from migrator import formatting
from migrator.cli import arguments, intervals, job
from migrator.job_results import JobOptions
from migrator.jobs.interval import NODE_MTBF_S

if TYPE_CHECKING:
    from migrator.jobs.protect import Protection

TRIES = 3
#: Defaults of the options. A home keeper passes its environment on to the protection that it starts.
MAX_PAUSE, UNLESS_FILE = "MIGRATOR_MAX_PAUSE", "MIGRATOR_UNLESS_FILE"
#: Until the first snapshot of a job that was just started, which is still importing its libraries.
FIRST_S = 30.0


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "protect",
        _protect,
        "take snapshots of a job at intervals, and roll it back when it has lost a rank or a node",
        more="Runs until the job has ended. While the job has a snapshot, the keepers hold a failure of a rank back for up to"
        " 60 seconds, so that its launcher does not see it if the job is rolled back. A failure that comes back after a"
        " rollback, before the next snapshot, is passed on after some tries. It can be ended and started again at any time.",
        examples="  migrator protect night --every 5m\n  migrator protect night --every auto --mtbf 4000\n"
        "  migrator run --protect 5m --job night -- python train.py     starts the job and protects it",
    )
    parser.add_argument("job", type=arguments.job, metavar="JOB", help="name of the job")
    parser.add_argument("--user", type=arguments.user, metavar="NAME|UID", help="user who has started it")
    parser.add_argument(
        "--every",
        type=intervals.argument,
        default=intervals.DEFAULT,
        metavar="5m|auto",
        help="time between two snapshots: 300, 90s, 5m, 2h (default: %(default)s); auto: what costs least, computed from the"
        " measured pause and how often nodes fail",
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
    parser.add_argument(
        "--max-pause",
        type=arguments.positive_seconds,
        default=os.environ.get(MAX_PAUSE) or None,
        metavar="S",
        help="put a snapshot off if it would pause the job for longer, judged by the last ones and the job's memory; the"
        f" first one is taken, and one each hour (default: ${MAX_PAUSE}, else no limit)",
    )
    parser.add_argument(
        "--unless-file",
        type=lambda text: Path(text).absolute(),
        default=os.environ.get(UNLESS_FILE) or None,
        metavar="PATH",
        help="take no snapshot while this file exists: the job creates it while it initialises or evaluates"
        f" (default: ${UNLESS_FILE})",
    )
    job.add_copies(parser)
    job.add_replayed_output(parser)
    job.add_changed_files(parser)
    parser.add_argument("--for-keeper", type=_keeper, help=argparse.SUPPRESS)  # from `migrator run --protect`


def _protect(options: argparse.Namespace) -> int:
    from migrator.jobs.postponing import Postponing  # after `enter`: it loads gRPC
    from migrator.jobs.protect import Protection

    cluster = arguments.the_cluster(options)
    asked = JobOptions(
        *(options.job, options.user),
        replayed_output=options.replayed_output,
        changed_files=options.changed_files,
        copies=options.copies,
    )
    keeper, rank = options.for_keeper or (0, 0)
    say = _say_beside_rank if keeper else _say
    first_s = min(options.every or FIRST_S, FIRST_S) if keeper else 0.0
    protection = Protection(
        *(cluster, asked, options.every, options.tries, say, options.mtbf * 3600),
        stands_by=rank > 0,
        first_s=first_s,
        postponing=Postponing(options.unless_file, options.max_pause),
    )
    return asyncio.run(_until_keeper_ends(protection, keeper) if keeper else protection.run())


async def _until_keeper_ends(protection: Protection, keeper: int) -> int:
    """The protection that a home keeper has started ends with it. The job may be left as it is: its launcher has ended."""
    work = asyncio.create_task(protection.run())
    while not work.done() and os.getppid() == keeper:
        await asyncio.wait([work], timeout=1.0)
    # If the job's own failure was passed on, it is not protected again: its keepers are about to end.
    while work.done() and work.result() != 0 and os.getppid() == keeper:  # noqa: ASYNC110 - a process's end is no event
        await asyncio.sleep(1.0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return 0


def _keeper(text: str) -> tuple[int, int]:
    """The process id of the home keeper, and the number of its rank."""
    process, _, number = text.partition(":")
    return arguments.count(process), arguments.rank(number)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {formatting.plain(text)}", flush=True, file=sys.stdout)


def _say_beside_rank(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader of this output has ended, but the job has not
        print(f"migrator protect: {formatting.plain(text)}", flush=True, file=sys.stderr)
