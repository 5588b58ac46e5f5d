"""`migrator move`: moves one rank, shows the progress, and reports where the rank is in the end.

The first Ctrl-C (or SIGTERM) goes to the driver, which undoes the move before COMMIT and finishes it after COMMIT. The second
one exits at once, and the daemons settle the move without a driver.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from migrator import formatting
from migrator.cli import arguments, output
from migrator.cli.check import add_ask
from migrator.cli.interrupts import Interrupts
from migrator.cli.trace_file import TraceFile
from migrator.cluster import Cluster
from migrator.progress_display import show_on
from migrator.protocol import Verdict
from migrator.results import MoveOptions, MoveResult
from snapshotd.api.errors import SnapshotError, Undone, Where


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "move",
        act,
        "move a rank to another node",
        more=(
            "The move is checked first, and refused before anything is paused if it cannot work. A move that fails "
            "before COMMIT is undone: the job continues on the source. Ctrl-C undoes the move before COMMIT; after COMMIT "
            "the move is finished."
        ),
        examples=(
            "  migrator move --rank 1 --to spare-1\n"
            "  migrator move --rank 0 --job night --to node-2 --timeout 60 --json\n"
            "  migrator move --rank 3 --to node-2 --gpu 5\n"
            "  migrator move --rank 1 --to spare-1 --trace move.json"
        ),
    )
    add_ask(parser)
    arguments.add_limits(parser, "the move", "the source", MoveOptions.lease_s)
    parser.add_argument(
        "--quiesce-timeout",
        type=arguments.positive_seconds,
        metavar="S",
        default=MoveOptions.quiesce_timeout_s,
        help="undo the move if the ranks of an NCCL job reach no common point within S seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--precopy-limit",
        type=_percent,
        metavar="PERCENT",
        default=MoveOptions.precopy_percent,
        help="send memory before the pause, so that the job loses about PERCENT of its time at most by waiting for processors"
        " and by page faults; 0: send all of it in the pause (default: %(default)g)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write where the time went, on every node, in Chrome's trace format (chrome://tracing, ui.perfetto.dev)",
    )


def _percent(text: str) -> float:
    value = float(text)  # argparse shows a ValueError
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100")
    return value


def act(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    trace = TraceFile(options.trace) if options.trace else None
    asked = MoveOptions(
        options.rank,
        options.to,
        options.job,
        options.timeout,
        options.gpu or "",
        options.lease,
        options.quiesce_timeout,
        options.user,
        source=options.source or "",
        precopy_percent=options.precopy_limit,
    )
    as_json = arguments.wants_json(options)
    try:
        result = asyncio.run(_move(cluster, asked, trace, as_json=as_json))
        if trace is not None:
            trace.write(result.to_json())
    except SnapshotError as error:
        if trace is not None:
            trace.write(output.error_object(error))
        raise
    finally:
        if trace is not None:
            trace.close()
    if as_json:
        output.json_object(result.to_json())
    elif result.outcome is Verdict.MOVED:
        _show_moved(result)
    else:
        what = f"rank {result.rank} was not moved" if result.outcome is not Verdict.UNKNOWN else f"move {result.move}"
        where = output.where_words(result.where, result.source, result.target)
        output.trouble(f"{what}: {result.outcome}: {result.reason}", result.remedy, where)
    return result.exit_code


async def _move(cluster: Cluster, asked: MoveOptions, trace: TraceFile | None, *, as_json: bool) -> MoveResult:
    from migrator import driver  # after `enter`: it loads gRPC

    progress = show_on(sys.stderr, only_live=as_json)
    made = driver.Driver(cluster, progress, None if trace is None else trace.trace)
    task = asyncio.create_task(made.move(asked))
    Interrupts(
        task,
        progress,
        "undoing the move, or finishing it if it is committed",
        "exited during a move: the daemons finish it, or undo it when the lease of this command expires",
        as_json=as_json,
        on_leave=None if trace is None else trace.write,
    ).listen()
    try:
        return await task
    except asyncio.CancelledError:
        raise Undone(
            "interrupted before any daemon was asked to change anything", remedy="try again", where=Where.UNTOUCHED
        ) from None
    finally:
        progress.close()


def _show_moved(result: MoveResult) -> None:
    route = f"{formatting.plain(result.source)} → {formatting.plain(result.target)}"
    print(f"moved rank {result.rank}  {route}  pause {formatting.seconds(result.pause_s)}")
    if not result.phases:
        return
    longest = max(result.phases, key=lambda phase: phase.seconds)
    each = "  ".join(f"{phase.name} {phase.seconds:.2f}" for phase in result.phases)
    print(output.styled(f"  {each}  (seconds)", "dim"))
    if result.device_bytes:
        left = (
            f", {formatting.size(result.device_bytes_left)} of free blocks left behind"
            if result.device_bytes_left
            else ""
        )
        _show_parts(result)
        handed = ", handed over on the same GPU and not sent" if result.handed_over_bytes else ""
        size = formatting.size(result.device_bytes)
        print(output.styled(f"  device memory: {size}{handed}{left}{_onto(result)}", "dim"))
    if result.device_bytes and result.longest_part is not None:
        longest = result.longest_part
    speed = formatting.rate(longest.bytes, longest.seconds)
    print(
        output.styled(
            f"  longest: {longest.name} {formatting.seconds(longest.seconds)}{f' at {speed}' if speed else ''}; "
            f"{formatting.size(result.bytes)} sent",
            "dim",
        )
    )


def _show_parts(result: MoveResult) -> None:
    """Where the time went, one line per part; parts can overlap."""
    rows = [
        (
            part.name,
            f"{part.seconds:.2f} s",
            formatting.size(part.bytes) if part.bytes else "",
            formatting.rate(part.bytes, part.seconds) if part.bytes else "",
        )
        for part in result.parts
    ]
    output.table(("PART", "TIME", "SIZE", "RATE"), rows, right=("TIME", "SIZE", "RATE"), indent=4, style="dim")


def _onto(result: MoveResult) -> str:
    """The GPUs that changed, if any did."""
    changed = [f"{old} → {new}" for old, new in result.gpu_pairs if old != new]
    return f"; {', '.join(changed)}" if changed else ""
