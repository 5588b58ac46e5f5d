"""Carries intended moves out through the driver of `migrator move`, and finds out how interrupted ones ended.

Invariant: a move is begun only if its intent is recorded and its rank is still on the source. Its id is recorded with the
intent, so after a restart the daemons' journals say whether it began and how it ended. Nothing is concluded from a missing
answer: a move stays in progress until source and target have both answered.
"""

from __future__ import annotations

from collections.abc import Callable

from migrator.autopilot.model import Move, MoveState
from migrator.autopilot.store import Store
from migrator.cluster import Cluster
from migrator.driver import ATTEMPTS, Driver, attempt_id
from migrator.fan_out import ASK_TIMEOUT_S
from migrator.journals import all_moves
from migrator.protocol import Verdict
from migrator.results import Event, MoveOptions, MoveResult
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import NotFound, RankGone, SnapshotError, Where

_STATES = {Verdict.MOVED: MoveState.MOVED, Verdict.UNDONE: MoveState.UNDONE, Verdict.REFUSED: MoveState.REFUSED}


async def carry_out(cluster: Cluster, store: Store, move: Move, on_event: Callable[[Event], None]) -> None:
    """Begins an intended move and records how it ended. If that is not known, the move stays intended: see `settle`."""
    try:
        if not await _is_there(cluster, move):
            await store.finish(move.id, MoveState.NEVER_BEGAN, f"the rank is not on {move.source} any more")
            return
        options = MoveOptions(move.rank_uid, move.target, move=move.id, source=move.source)
        result = await Driver(cluster, on_event).move(options)
    except (NotFound, RankGone) as error:
        await store.finish(move.id, MoveState.LOST, error.message)
    except SnapshotError as error:
        await store.finish(move.id, MoveState.REFUSED, error.message)
    else:
        await _record(store, move, result)


async def _is_there(cluster: Cluster, move: Move) -> bool:
    async with cluster.client(move.source) as client:
        reply = await client.node.ListRanks(pb.ListRanksRequest(brief=True), timeout_s=ASK_TIMEOUT_S)
    return any(rank.uid == move.rank_uid and rank.place == pb.Rank.HERE for rank in reply.ranks)


async def _record(store: Store, move: Move, result: MoveResult) -> None:
    if result.outcome is Verdict.UNKNOWN:
        await store.note("unknown", f"move {move.id}: {result.reason}", node=move.source, id=move.id)
        return
    state = MoveState.LOST if result.where is Where.ENDED else _STATES[result.outcome]
    phases = {phase.name: round(phase.seconds, 3) for phase in result.phases}
    await store.finish(
        move.id, state, result.reason, result.pause_s, bytes=result.bytes, phases=phases, attempts=result.attempts
    )


async def settle(cluster: Cluster, store: Store, move: Move) -> bool:
    """Records how a move ended that this process does not drive. Returns False if that is not known yet."""
    ids = [attempt_id(move.id, attempt) for attempt in range(ATTEMPTS)]
    moves, silent = await all_moves(cluster)
    if move.source in silent or move.target in silent:
        return False
    # Any node can name any rank, so a move between other nodes need not concern the same one.
    between = (move.source, move.target)
    moves = [found for found in moves if (found.source_node, found.target_node) == between]
    if any(found.rank_uid == move.rank_uid and not found.ended for found in moves):
        return False  # the daemons are at work: a source whose driver is gone undoes the move when its lease expires
    mine = sorted((found for found in moves if found.id in ids), key=lambda found: ids.index(found.id))
    if not mine:
        return await store.finish(
            move.id, MoveState.NEVER_BEGAN, "no daemon knows it: it was interrupted before it began"
        )
    last = mine[-1]
    state = MoveState.LOST if last.where is Where.ENDED else _STATES.get(last.verdict, MoveState.LOST)
    return await store.finish(move.id, state, last.reason, last.pause_s, bytes=last.bytes, found_in_journals=True)
