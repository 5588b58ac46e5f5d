"""What the coordinator asks of the participants of its records: how far they are, and to end copies that were taken back.

Invariant: the absence of an answer is never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, SnapshotError
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Part
from snapshotd.moves.jobs import records
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.record_parts import JobPart
from snapshotd.moves.rules import CopyState
from snapshotd.runtime.blocking import in_thread

ASK_S = 10.0
END_S = 60.0


async def end_copies(node: Node, move_log: MoveLog) -> None:
    """Ends the copies of a resumption that was taken back. Those that were never let run drop themselves.

    Asks all nodes, and raises the first error then."""

    async def end_copy(part: JobPart) -> None:
        request = pb.EndRanksRequest(record=move_log.move, incarnation=move_log.move, rank_uids=[part.rank_uid])
        if part.home_node not in {"", part.node}:  # so that it accepts the next copy instead of this one
            with contextlib.suppress(SnapshotError):
                async with node.client(part.home_node, part.home_endpoint) as client:
                    await client.job.EndRanks(request, timeout_s=END_S)
        async with node.client(part.node, part.endpoint) as client:
            await client.job.EndRanks(request, timeout_s=END_S)

    parts = (await in_thread(move_log.whole)).participants
    for error in await asyncio.gather(*map(end_copy, parts), return_exceptions=True):
        if error is not None:
            raise error


async def ask_all(node: Node, move_log: MoveLog) -> dict[str, Part]:
    """The answers of all participants, by a name for display. What a participant has carried out is journalled, and it is
    not asked again: it may forget its part then."""
    record = await in_thread(move_log.whole)
    ask = ask_target if record.suspension else ask_store
    known = set(record.done) if move_log.committed else set()
    asked = [(f"rank {part.rank} on {part.node}", part, ask) for part in record.participants]
    asked += [
        (f"the copy of rank {buddy.rank} on {buddy.node}", buddy, ask_target)
        for part in record.participants
        for buddy in records.buddies_of(part)
    ]

    async def answer(part: JobPart, ask: Callable[[Node, JobPart], Awaitable[Part]]) -> Part:
        return Part.DONE if part.move in known else await ask(node, part)

    answers = await asyncio.gather(*(answer(part, ask) for _, part, ask in asked))
    parts = list(zip(asked, answers, strict=True))
    done = [part.move for (_, part, _), said in parts if said in job_rules.CARRIED_OUT]
    if move_log.committed and set(done) > known:
        await in_thread(move_log.mark, move_log.last_mark, done=done)
    return {name: said for (name, _, _), said in parts}


async def ask_store(node: Node, part: JobPart) -> Part:
    try:
        async with node.client(part.node, part.endpoint) as client:
            found = await client.source.GetOutcome(pb.MoveRequest(move=part.move), timeout_s=ASK_S)
    except NotFound:
        return Part.ABSENT
    except SnapshotError:
        return Part.UNREACHABLE
    if found.settled:
        return Part.DONE
    return Part.READY if found.stored else Part.WORKING


async def ask_target(node: Node, part: JobPart) -> Part:
    try:
        async with node.client(part.node, part.endpoint) as client:
            found = await client.target.GetCopy(pb.MoveRequest(move=part.move), timeout_s=ASK_S)
    except SnapshotError:
        return Part.UNREACHABLE
    if found.unattached:  # its communicators are down: it must not run
        return Part.WORKING
    return job_rules.target_part(CopyState[pb.Copy.State.Name(found.state)])
