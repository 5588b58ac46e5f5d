"""Finishes or undoes a move that did not end, on an operator's request, or declares one of its nodes dead.

Invariant: nothing is decided here. The daemons settle a move by themselves. This module asks them to do it now (Abort,
Release), passes the source's token to a target that the source cannot reach, and passes on an operator's declaration that a
node is dead. A declaration that an answering daemon contradicts is not passed on, because it could make two copies run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from migrator import death, formatting
from migrator.cluster import Cluster
from migrator.journals import Move, all_moves
from migrator.protocol import Verdict
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import (
    Ambiguous,
    NotFound,
    OutcomeUnknown,
    SnapshotError,
    Timeout,
    Unreachable,
    Usage,
    Where,
    WrongState,
)

CALL_TIMEOUT_S = 30.0
#: The source may have to wait for an attempt to build communicators first, which takes minutes in a job of thousands of
#: ranks. It carries a declaration out also if this command does not wait any longer.
GIVE_UP_TIMEOUT_S = 600.0
POLL_S = 0.5
#: The source notices that a driver died when the lease expires: after 30 s, unless `move --lease` set another time.
LEASE_WAIT_S = 35.0
SETTLE_WAIT_S = 6.0

Note = Callable[[str], None]
#: Returns if the operator confirms that a node is dead; raises otherwise.
Confirm = Callable[[], None]


@dataclass(frozen=True)
class Recovered:
    """One move after recovery: its state, what was done, and what the operator can still do."""

    move: Move
    did: list[str] = field(default_factory=list)
    remedy: str = ""

    @property
    def verdict(self) -> Verdict:
        return self.move.verdict

    def to_json(self) -> dict[str, Any]:
        return {**self.move.to_json(), "did": self.did, "remedy": self.remedy}


@dataclass(frozen=True)
class Report:
    recovered: list[Recovered]
    silent: dict[str, SnapshotError]

    @property
    def exit_code(self) -> int:
        """0 when the outcome of every move is known."""
        return OutcomeUnknown.exit_code if any(one.verdict is Verdict.UNKNOWN for one in self.recovered) else 0


async def recover(
    cluster: Cluster, move: str | None, *, abort: bool, by: str, note: Note, wait_s: float | None = None
) -> Report:
    """Brings every unfinished move (or only `move`) to its end.

    A committed move is finished and an aborted one undone. With `abort`, an undecided move is aborted at once. Otherwise
    it is left to its driver, which may still run, and to its lease, which expires if the driver does not. Waits up to
    `wait_s`.
    """
    known, silent = await all_moves(cluster, move or "")
    if move is not None:
        _the_only(known, move, silent)
    open_moves = [found for found in known if not found.ended]
    did: dict[str, list[str]] = {}
    for found in open_moves:
        if _never_began(cluster, found, silent):
            did[found.id] = await _end_unbegun(cluster, found, note)
        else:
            did[found.id] = await _push(cluster, found, abort=abort, by=by, note=note)
    # Without its source a move does not change by itself, so waiting makes sense only if the source answers.
    answered = [found for found in open_moves if found.source is not None]
    leased = [found.id for found in answered if not did[found.id] and found.outcome == pb.UNDECIDED]
    if wait_s is None:
        wait_s = (LEASE_WAIT_S if leased else SETTLE_WAIT_S) if answered else 0.0
    if leased and wait_s:
        note(f"waiting up to {wait_s:.0f} s for the lease of {', '.join(leased)}; `recover --abort` undoes it at once")
    ended = await _await_ends(cluster, open_moves, wait_s)
    shown = ended or ([known[0]] if move is not None else [])
    return Report([Recovered(one, did.get(one.id, []), _remedy(one, silent)) for one in shown], silent)


async def _push(cluster: Cluster, move: Move, *, abort: bool, by: str, note: Note) -> list[str]:
    """Asks the daemons to do now what they would do later anyway. Returns a description of each action."""
    did: list[str] = []
    if move.source is None:
        return did
    request = pb.MoveRequest(move=move.id)
    try:
        async with cluster.client(move.source.node) as source:
            outcome = await source.source.GetOutcome(request, timeout_s=CALL_TIMEOUT_S, retry=True)
            if outcome.kind == pb.UNDECIDED and abort:
                ask = pb.AbortRequest(move=move.id, reason=f"migrator recover by {by}")
                outcome = await source.source.Abort(ask, timeout_s=CALL_TIMEOUT_S, retry=True)
                if outcome.kind == pb.ABORT:
                    did.append(f"{move.source.node} aborted it")
            elif outcome.kind == pb.ABORT and not move.source.ended:
                await source.source.Abort(pb.AbortRequest(move=move.id), timeout_s=CALL_TIMEOUT_S, retry=True)
                did.append(f"{move.source.node} was asked again to undo it")
            if outcome.kind != pb.UNDECIDED and not (move.target is not None and move.target.ended):
                did += await _hand_token(cluster, move, outcome, note)
            if outcome.kind == pb.COMMIT and not move.source.ended:
                reply = await source.source.Release(request, timeout_s=CALL_TIMEOUT_S)
                said = "released its copy" if reply.released else f"keeps its copy: {reply.waiting_for}"
                did.append(f"{move.source.node} {said}")
    except SnapshotError as error:
        note(f"{move.id}: {error.message}")
    return did


def _never_began(cluster: Cluster, move: Move, silent: dict[str, SnapshotError]) -> bool:
    """Whether only the target knows the move, without a whole copy: its source answers without a record of it, or is no node
    of the cluster."""
    if move.source is not None or move.target is None or move.target.record.mark not in {"prepared", "sealed"}:
        return False
    return move.source_node not in cluster.nodes or move.source_node not in silent


async def _end_unbegun(cluster: Cluster, move: Move, note: Note) -> list[str]:
    """Has the target drop what it prepared. The target refuses if the source, which it asks as well, knows the move."""
    assert move.target is not None
    try:
        async with cluster.client(move.target.node) as target:
            await target.target.Discard(pb.TokenRequest(move=move.id), timeout_s=CALL_TIMEOUT_S)
    except SnapshotError as error:
        note(f"{move.id}: {error.message}")
        return []
    return [f"{move.target.node} dropped what it had prepared: the move never began"]


async def _hand_token(cluster: Cluster, move: Move, outcome: pb.Outcome, note: Note) -> list[str]:
    """Passes the source's outcome to the target, because the two may be unable to reach each other."""
    node = move.target.node if move.target is not None else move.target_node
    if node not in cluster.nodes:
        note(f"{move.id}: {node} is not in {cluster.origin}, so the token was not carried there")
        return []
    token = pb.TokenRequest(move=move.id, token=outcome.token, abandoned=outcome.abandoned)
    try:
        async with cluster.client(node) as target:
            if outcome.kind == pb.ABORT:
                await target.target.Discard(token, timeout_s=CALL_TIMEOUT_S)
                return [f"{node} dropped its copy"]
            reply = await target.target.Activate(token, timeout_s=CALL_TIMEOUT_S)
            return [f"{node} runs the rank"] if reply.running else [f"{node} has the token"]
    except NotFound:
        return []  # the target has settled the move and deleted its record, or never had one
    except SnapshotError as error:
        note(f"{move.id}: {error.message}")
        return []


async def _await_ends(cluster: Cluster, moves: list[Move], wait_s: float) -> list[Move]:
    """The same moves, in their state when all have ended or the time is over."""
    latest = {move.id: move for move in moves}

    async def all_ended() -> bool:
        fresh, _ = await all_moves(cluster)
        latest.update({move.id: move for move in fresh if move.id in latest})
        return all(move.ended for move in latest.values())

    if latest:
        attempts = AsyncRetrying(
            retry=retry_if_result(lambda ended: not ended),
            stop=stop_after_delay(wait_s),
            wait=wait_fixed(POLL_S),
            retry_error_callback=lambda _: False,
        )
        await attempts(all_ended)
    return list(latest.values())


def _remedy(move: Move, silent: dict[str, SnapshotError]) -> str:
    """What the operator can do about a move that has not ended."""
    if move.ended:
        return ""
    if move.source is None and move.verdict is Verdict.UNKNOWN:
        why = f"{move.source_node} does not answer" if move.source_node in silent else "the source has no record of it"
        return f"{why}; bring it back, or if it is dead for good, say so: migrator recover {move.id} --source-is-dead"
    if move.outcome == pb.COMMIT and not move.runs_on_target:
        return (
            f"bring {move.target_node} back; if it is dead for good, say so: migrator recover {move.id} "
            "--target-is-dead, and the source's copy goes on"
        )
    if move.outcome == pb.UNDECIDED:
        return f"its driver may be at work; `migrator recover {move.id}` undoes it now"
    if move.outcome == pb.ABORT and move.source is not None and not move.source.ended:
        # Communicators of an NCCL job need every member: no declaration replaces a node that has one.
        nodes = ", ".join(sorted(silent)) or "a node"
        return (
            f"usually nothing: the daemons clean up alone. If it waits for {nodes} to build communicators again, bring that "
            "node back; if it is dead for good, the job cannot continue: end it, or let its ranks end with an NCCL error: "
            f"migrator recover {move.id} --member-is-dead NODE"
        )
    return "nothing: the daemons clean up alone"


async def declare_source_dead(cluster: Cluster, move: str, by: str, note: Note, confirm: Confirm) -> Recovered:
    """Declares the source dead, so that a held copy on the target may run. Refused if the source answers for the move."""
    found = await _find(cluster, move)
    if found.source is not None:
        raise WrongState(
            f"{found.source.node} answers, and its journal decides move {move}: it is not dead",
            remedy=f"`migrator recover {move}` asks it to decide now",
            where=found.where,
        )
    if found.target is None:
        raise NotFound(f"no node has a copy of move {move}")
    done = await death.establish(cluster, found.source_node, note, confirm)
    async with cluster.client(found.target.node) as target:
        request = pb.DeclareRequest(move=move, declared_by=by)
        reply = await target.target.DeclareSourceDead(request, timeout_s=CALL_TIMEOUT_S)
    node = found.target.node
    did = f"{node} lets the rank run" if reply.running else f"{node} held no whole copy and dropped what it had"
    return Recovered(await _find(cluster, move), [*done, did])


async def declare_target_dead(cluster: Cluster, move: str, by: str, note: Note, confirm: Confirm) -> Recovered:
    """Declares the target dead, so that the source's frozen copy may run. Refused if the target answers for a copy."""
    found = await _find(cluster, move)
    if found.source is None:
        raise Unreachable(
            f"{found.source_node}, the source of move {move}, does not answer or has no record of it",
            where=found.where,
        )
    done = []
    if await _answers_without_a_copy(cluster, found):
        confirm()
    else:
        node = found.target.node if found.target is not None else found.target_node
        done = await death.establish(cluster, node, note, confirm)
    async with cluster.client(found.source.node) as source:
        request = pb.DeclareRequest(move=move, declared_by=by)
        outcome = await source.source.DeclareTargetDead(request, timeout_s=CALL_TIMEOUT_S)
    did = f"{found.source.node}: {formatting.name_of(pb.OutcomeKind, outcome.kind)}, the rank is {outcome.where}"
    return Recovered(await _find(cluster, move), [*done, did])


async def declare_member_dead(
    cluster: Cluster, move: str, node: str, by: str, note: Note, confirm: Confirm
) -> Recovered:
    """Declares a node dead that has another rank of the job, so that the undo of a move does not wait for it: the job gets
    NCCL's errors. Refused if the node answers. The source is asked first whether the move waits for the node, because the
    declaration may have it fenced."""
    known, silent = await all_moves(cluster, move)
    found = _the_only(known, move, silent)
    if node == found.source_node:
        raise Usage(f"{node} is the source of move {move}", remedy="use --source-is-dead")
    if node in cluster.nodes and node not in silent:
        raise WrongState(
            f"snapshotd on {node} answers: it is not dead",
            remedy=f"`migrator status {move}` says what the move waits for",
            where=found.where,
        )
    if found.source is None:
        raise Unreachable(
            f"{found.source_node}, the source of move {move}, does not answer or has no record of it", where=found.where
        )
    request = pb.DeclareMemberRequest(move=move, declared_by=by, node=node, only_check=True)
    async with cluster.client(found.source.node) as source:
        checked = await source.source.DeclareMemberDead(request, timeout_s=CALL_TIMEOUT_S)
        if checked.settled:
            raise WrongState(
                f"move {move} has ended: it waits for no node", remedy="nothing is left to do", where=found.where
            )
        done = await death.establish(cluster, node, note, confirm)
        request.only_check = False
        try:
            outcome = await source.source.DeclareMemberDead(request, timeout_s=GIVE_UP_TIMEOUT_S)
        except Timeout:
            did = f"{found.source.node} has the declaration, and carries it out when its attempt to build communicators ends"
        else:
            did = _given_up(found.source.node, outcome)
    return Recovered(await _find(cluster, move), [*done, did])


def _given_up(source: str, outcome: pb.Outcome) -> str:
    if outcome.abandoned:
        return f"{source} opens the gates without communicators"
    if outcome.settled:
        return "it has ended meanwhile, and its communicators are built again"
    return f"{source} builds no communicators any more, and has not decided yet how the move ends"


async def _answers_without_a_copy(cluster: Cluster, move: Move) -> bool:
    """Whether the target answers that it has no copy. Raises WrongState if it has, or had, the rank: then it is not dead."""
    node = move.target.node if move.target is not None else move.target_node
    if node not in cluster.nodes:
        return False
    try:
        async with cluster.client(node) as target:
            copy = await target.target.GetCopy(pb.MoveRequest(move=move.id), timeout_s=5)
    except SnapshotError:
        return False  # no answer, which agrees with the declaration
    living = {
        pb.Copy.RECEIVING: "is receiving the rank",
        pb.Copy.HELD: "holds the rank",
        pb.Copy.RUNNING: "runs the rank",
        pb.Copy.ENDED: "ran the rank, which has ended since",
    }
    if copy.state in living:
        raise WrongState(
            f"{node} answers that it {living[copy.state]}: it is not dead",
            remedy=f"`migrator recover {move.id}` finishes or undoes the move",
            where=move.where,
        )
    return True


async def _find(cluster: Cluster, move: str) -> Move:
    known, silent = await all_moves(cluster, move)
    return _the_only(known, move, silent)


def _the_only(known: list[Move], move: str, silent: dict[str, SnapshotError]) -> Move:
    """Raises NotFound or Unreachable if there is none, Ambiguous if nodes contradict each other."""
    if not known:
        raise unknown_move(move, silent)
    if len(known) > 1:
        said = "; ".join(f"{view.node}: {one.source_node} → {one.target_node}" for one in known for view in one.views)
        raise Ambiguous(
            f"nodes contradict each other about move {move}: {said}",
            remedy="only one of them can be right: find out which, and take the others out of the cluster file meanwhile",
        )
    return known[0]


def unknown_move(move: str, silent: dict[str, SnapshotError]) -> SnapshotError:
    """The error for a move that is unknown to every node that answers."""
    if silent:
        lost = ", ".join(silent)
        return Unreachable(f"no node that answers knows move {move}, and these do not: {lost}", where=Where.UNKNOWN)
    return NotFound(f"no node knows a move {move}")
