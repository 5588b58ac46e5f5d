"""`migrator job`: suspends a whole job to disk, resumes it, takes snapshots of it, lists these, and drops their images."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from migrator import formatting, users
from migrator.cli import arguments, output, protection
from migrator.cli.interrupts import Interrupts
from migrator.image_copies import nodes_of
from migrator.job_protocol import JobVerdict
from migrator.job_results import JobOptions, JobResult
from migrator.progress_display import show_on
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Undone, Usage, Where

if TYPE_CHECKING:
    from migrator.cluster import Cluster
    from migrator.jobs.finding import JobEntry
    from snapshotd.api.errors import SnapshotError

#: The bytes of images, by node and uid of the rank.
Sizes = Mapping[tuple[str, str], int]

_PLACES = ("COORDINATOR", "IMAGES ON", "ALSO VOTE")
HEADS = ("JOB", "USER", "RANKS", "STATE", "SINCE", "SIZE", *_PLACES, "RECORD", "WAITS FOR")


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "job",
        None,
        "suspend a whole job to disk, resume it, or take a snapshot of it while it runs",
        more="For jobs of CPU ranks that are connected with each other over TCP, and for single ranks.",
        examples="  migrator job suspend night\n  migrator job resume night --on 1=spare-1\n  migrator job list",
    )
    inner = arguments.Verbs(parser)
    suspending = inner.add(
        "suspend",
        _suspend,
        "stop all ranks at one moment, store their images, and end their processes",
        more="The processes end only when all images are whole. If anything fails before, all ranks go on where they are. The"
        " launcher and its `migrator run` stay, and notice nothing but a long step. The images are in the state directory of"
        " each rank's node.",
    )
    resuming = inner.add(
        "resume",
        _resume,
        "restore all ranks of a suspended job, and let them run together",
        more="Each rank is restored on the node that has its image, unless --on names another one. If a restore fails, all"
        " copies are dropped and the images stay, so that it can be tried again.",
    )
    resuming.add_argument(
        "--on",
        action="append",
        default=[],
        type=_rank_on_node,
        metavar="RANK=NODE",
        help="node for a rank; can be repeated (default: the node that has its image)",
    )
    snapshotting = inner.add(
        "snapshot",
        _snapshot,
        "take a consistent snapshot of all ranks, which go on",
        more="All ranks are stopped at one moment, and each goes on as soon as its image is complete. The images lie in the"
        " memory of the ranks' nodes, and copies of each on other nodes. The snapshot counts when all of that is done, and"
        " replaces the one before. It is removed when the job ends.",
    )
    rolling = inner.add(
        "rollback",
        _rollback,
        "end all ranks of a job, and bring them back from its last snapshot",
        more="For a job that has lost a rank or a node. Each rank goes on on its own node, a rank whose node does not answer"
        " on a spare, unless --on names another one. The ranks of a node that does not answer end themselves when it has been"
        " cut off for 15 seconds; --lost declares it dead, and does not wait for that. Later steps are repeated.",
    )
    rolling.add_argument(
        "--on",
        action="append",
        default=[],
        type=_rank_on_node,
        metavar="RANK=NODE",
        help="node for a rank; can be repeated",
    )
    add_copies(snapshotting)
    add_replayed_output(rolling)
    add_changed_files(rolling)
    for one in (suspending, resuming, snapshotting, rolling):
        arguments.add_limits(one, "it", "the daemons", JobOptions.lease_s)
    listing = inner.add("list", _list, "list suspended jobs, snapshots, and those that are being made or resumed")
    listing.add_argument("--all", action="store_true", help="also show suspensions and resumptions that have ended")
    dropping = inner.add(
        "drop",
        _drop,
        "drop the images of a suspended job, which then can never be resumed",
        more="Its `migrator run` processes, which wait for the ranks, end as if the ranks were killed. A job that was rolled"
        " back and not resumed can be dropped too, and a snapshot whose job has ended, if a node never comes back.",
    )
    dropping.add_argument("--yes", action="store_true", help="confirm that the job is given up")
    for one in (rolling, dropping):
        one.add_argument(
            "--lost",
            action="append",
            default=[],
            type=arguments.node,
            metavar="NODE",
            help="assert that no process runs on this node, and that none will (it is powered off); can be repeated",
        )
    for one in (suspending, resuming, snapshotting, rolling, dropping):
        named = "name of the job" if one is suspending else "name of the job, or the id of its record"
        one.add_argument("job", type=arguments.job, metavar="JOB", help=named)
        one.add_argument("--user", type=arguments.user, metavar="NAME|UID", help="user who has started it")


def add_copies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        protection.COPIES_OPTION,
        type=arguments.count,
        metavar="N",
        help="number of other nodes that keep a copy of each rank's image: with N copies the images outlive the loss of N"
        " nodes at once (default: what was given for this job before, else snapshot_copies in the cluster file, else 1)",
    )


def add_replayed_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        protection.REPLAYED_OPTION,
        choices=protection.REPLAYED,
        default="",
        help="what is done with output that the ranks print again: leave it out as long as it is identical, print it between"
        " two lines that say so, or print it (default: what `migrator run` was given, else suppress)",
    )


def add_changed_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        protection.CHANGED_OPTION,
        choices=protection.CHANGED,
        default=protection.CHANGED[0],
        help="what is done with files that ranks had open for writing at the snapshot, and that were deleted, renamed,"
        " replaced or shortened since: put them back as they were, and keep what is at their names beside them; leave what"
        " is there now; or do not resume the job (default: %(default)s)",
    )


def _rank_on_node(text: str) -> tuple[int, str]:
    rank, equals, node = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not RANK=NODE")
    return arguments.rank(rank), arguments.node(node)


# ---------------------------------------------------------------- suspend and resume


def _suspend(options: argparse.Namespace) -> int:
    return _act(options, "suspend", JobOptions(options.job, options.user, options.timeout, options.lease))


def _resume(options: argparse.Namespace) -> int:
    on = _one_each(options.on)
    return _act(options, "resume", JobOptions(options.job, options.user, options.timeout, options.lease, on))


def _snapshot(options: argparse.Namespace) -> int:
    asked = JobOptions(options.job, options.user, options.timeout, options.lease, copies=options.copies)
    return _act(options, "snapshot", asked)


def _rollback(options: argparse.Namespace) -> int:
    on = _one_each(options.on)
    asked = JobOptions(
        *(options.job, options.user, options.timeout, options.lease, on, frozenset(options.lost)),
        replayed_output=options.replayed_output,
        changed_files=options.changed_files,
    )
    return _act(options, "rollback", asked)


def _one_each(pairs: list[tuple[int, str]]) -> dict[int, str]:
    on = dict(pairs)
    if len(on) < len(pairs):
        raise Usage("--on names a rank twice", remedy="give one node for each rank")
    return on


def _act(options: argparse.Namespace, what: str, asked: JobOptions) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    result = asyncio.run(_run(cluster, what, asked, as_json=as_json))
    if as_json:
        output.json_object(result.to_json())
    elif result.exit_code == 0:
        _show(result)
    else:
        output.trouble(f"job {result.job}: {what}: {result.outcome}: {result.reason}", result.remedy, result.state)
    return result.exit_code


async def _run(cluster: Cluster, what: str, asked: JobOptions, *, as_json: bool) -> JobResult:
    from migrator import jobs  # after `enter`: it loads gRPC

    progress = show_on(sys.stderr, only_live=as_json)
    verbs = {"suspend": jobs.suspend, "resume": jobs.resume, "snapshot": jobs.snapshot, "rollback": jobs.rollback}
    work = verbs[what]
    task = asyncio.create_task(work(cluster, asked, progress))
    Interrupts(
        task,
        progress,
        "undoing it, or finishing it if it is committed",
        "exited: the daemons finish it, or undo it when the lease of this command expires; see `migrator job list`",
        as_json=as_json,
    ).listen()
    try:
        return await task
    except asyncio.CancelledError:
        raise Undone(
            "interrupted before any daemon was asked to change anything", remedy="try again", where=Where.UNTOUCHED
        ) from None
    finally:
        progress.close()


def _show(result: JobResult) -> None:
    for warning in result.warnings:
        print(f"{output.styled('warning:', 'yellow', sys.stderr)} {formatting.plain(warning)}", file=sys.stderr)
    for image in result.bad_images:
        print(f"{output.styled('warning:', 'yellow', sys.stderr)} {formatting.plain(image.text)}", file=sys.stderr)
    count = f"{len(result.ranks)} rank{'s' if len(result.ranks) != 1 else ''}"
    took = formatting.seconds(result.seconds)
    if result.outcome is JobVerdict.SNAPSHOTTED:
        took += f", paused {formatting.seconds(result.pause_s)}"
    print(f"{result.outcome} job {result.job}  {count}  {formatting.size(result.bytes)}  {took}")
    for one in result.ranks:
        moved = f"  (was on {one.came_from})" if one.came_from not in ("", one.node) else ""
        copied = f", {'copies' if len(one.copies) > 1 else 'copy'} on {', '.join(one.copies)}" if one.copies else ""
        print(f"  rank {one.rank}: {formatting.plain(one.node)}{formatting.plain(moved)}{formatting.plain(copied)}")
    for file in result.changed_files:
        print(f"  rank {file.rank}: {formatting.plain(file.text)}")
    if result.outcome is JobVerdict.SUSPENDED:
        print(f"resume it with: migrator job resume {result.job}")


# ---------------------------------------------------------------- list and drop


def _list(options: argparse.Namespace) -> int:
    cluster = arguments.the_cluster(options)
    as_json = arguments.wants_json(options)
    from migrator.jobs.finding import all_jobs, image_sizes  # after `enter`

    async def ask() -> tuple[list[JobEntry], dict[str, SnapshotError], Sizes]:
        (found, silent), sizes = await asyncio.gather(all_jobs(cluster), image_sizes(cluster))
        return found, silent, sizes

    found, silent, sizes = asyncio.run(ask())
    output.warn_silent(silent, len(cluster.nodes), as_json=as_json)
    shown = [
        entry for entry in found if options.all or entry.suspended or entry.is_snapshot or not entry.record.ended_unix_s
    ]
    if as_json:
        output.json_object(
            {"jobs": [_to_json(entry, sizes) for entry in shown], "unreachable": output.silent_objects(silent)}
        )
    elif shown:
        output.table(HEADS, [_row(entry, sizes) for entry in shown], right=("RANKS", "SINCE", "SIZE"))
    else:
        print("no jobs are suspended, and there are no snapshots; `migrator job suspend JOB` suspends one")
    return 0


def _state(entry: JobEntry) -> str:
    record = entry.record
    doing, done = ("suspending", "suspended") if not record.suspension else ("resuming", "resumed")
    if record.kind == "snapshot":
        doing, done = "snapshotting", "snapshot"
    if record.kind == "rollback" and not record.ended_unix_s:
        return "rolling back"
    if record.outcome == pb.ABORT:
        return "undone" if record.ended_unix_s else "undoing"
    if record.outcome != pb.COMMIT or (not record.ended_unix_s and record.suspension):
        return doing
    if record.ended_by.startswith("dropped"):
        return "dropped" if record.ended_unix_s else "dropping"
    if record.ended_by:
        return "resumed"
    if record.handed_to:
        return "handed over"
    return "cut off" if record.cut_off else done


def _size_bytes(record: pb.JobRecord, sizes: Sizes) -> int:
    """Of the job's images, as far as their nodes answer."""
    return sum(sizes.get((part.image_node or part.node, part.rank_uid), 0) for part in record.participants)


def _to_json(entry: JobEntry, sizes: Sizes) -> dict[str, Any]:
    record = entry.record
    return {
        "image_bytes": _size_bytes(record, sizes),
        "record": record.record,
        "job": record.job,
        "user_id": record.user_id,
        "state": _state(entry),
        "suspended": entry.suspended,
        "coordinator": entry.node,
        "voters": entry.voters,
        "suspension": record.suspension,
        "ended_by": record.ended_by,
        "rank_count": record.ranks or len(record.participants),
        "kind": record.kind or ("resumption" if record.suspension else "suspension"),
        "ranks": [
            {
                "rank": part.rank,
                "uid": part.rank_uid,
                "node": part.node,
                "copy": part.copy_node,
                "copies": nodes_of(part),
            }
            for part in record.participants
        ],
        "outcome": formatting.name_of(pb.OutcomeKind, record.outcome),
        "reason": record.reason,
        "begun_unix_s": round(record.begun_unix_s, 3),
        "ended_unix_s": round(record.ended_unix_s, 3),
        "waiting_for": record.waiting_for,
    }


def _row(entry: JobEntry, sizes: Sizes) -> tuple[str, ...]:
    record = entry.record
    size_bytes = _size_bytes(record, sizes)
    return (
        record.job,
        users.name_of(record.user_id),
        str(record.ranks or len(record.participants)),
        _state(entry),
        formatting.span(time.time() - record.begun_unix_s),
        formatting.size(size_bytes) if size_bytes else "-",
        entry.node,
        ",".join(entry.keepers) or "-",
        ",".join(entry.witnesses) or "-",
        record.record,
        record.cut_off or (record.waiting_for or "-" if not record.ended_unix_s else "-"),
    )


def _drop(options: argparse.Namespace) -> int:
    if not options.yes:
        raise Usage(
            f"the images of job {options.job} are all that is left of it", remedy="add --yes to give the job up"
        )
    cluster = arguments.the_cluster(options)
    record, left = asyncio.run(_dropped(cluster, options.job, options.user, options.lost))
    if arguments.wants_json(options):
        output.json_object({"record": record.record, "job": record.job, "dropped": True, "waiting_for": left})
    elif left:
        print(f"gave up job {record.job} ({record.record}); these images are not dropped yet:")
        for one in left:
            print(f"  {formatting.plain(one)}")
        print("the coordinator drops them when it reaches them; see `migrator job list`")
    else:
        print(f"dropped the images of job {record.job} ({record.record})")
    return 0


async def _dropped(
    cluster: Cluster, job: str, user_id: int | None, lost: Collection[str]
) -> tuple[pb.JobRecord, list[str]]:
    """The record, and what is not dropped yet."""
    from migrator.find_rank import find_node
    from migrator.jobs.finding import find_droppable

    for one in lost:
        find_node(cluster, one)
    node, record = await find_droppable(cluster, job, user_id, lost)
    async with cluster.client(node) as client:
        request = pb.DropJobRequest(
            move=record.record, reason="given up with `migrator job drop`", lost_nodes=sorted(lost)
        )
        reply = await client.job.Drop(request, timeout_s=60)
    return record, list(reply.waiting_for)
