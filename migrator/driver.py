"""Executes the table of `migrator/protocol.py` against real daemons: one RPC per step, undo on failure, then a verdict.

Invariant: the driver decides nothing. It asks; the source's outcome record decides. A driver that dies at any point
leaves a move that the daemons finish or undo alone (`snapshotd/moves/rules.py`). After an error it never guesses: it asks the
source for the record, and says "unknown" when there is no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from migrator import protocol
from migrator.cluster import Cluster
from migrator.find import Found, find_node, find_rank
from migrator.peers import Peers, node_addresses
from migrator.protocol import TABLE, Step, Verdict
from migrator.quiesce.gates import Gates
from migrator.report import Ask, CheckReport, Event, MoveResult, PhaseTime
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient, NotSpoken
from snapshotd.api.errors import (
    NotFound,
    OutcomeUnknown,
    RankGone,
    Refused,
    SnapshotError,
    Timeout,
    Undone,
    Unreachable,
    Where,
)

log = logging.getLogger(__name__)

#: How long to wait for the source to clean up after a rank that already runs elsewhere; the source may be dead.
RELEASE_S = 15.0
#: How long to go on asking a source that cannot be reached to abort.
REACH_S = 60.0
#: How long to go on asking for an outcome that was not answered.
ASK_AGAIN_S = 20.0


class Driver:
    """Moves ranks of one cluster."""

    def __init__(self, cluster: Cluster, on_event: Callable[[Event], None]) -> None:
        self.cluster = cluster
        self.on_event = on_event

    async def check(self, ask: Ask) -> CheckReport:
        """Preflight alone: nothing is paused, nothing is changed."""
        async with self._ends(ask) as (found, source, target):
            run = _Run(self, ask, found, source, target)
            await run.preflight()
            return CheckReport(found.node, ask.to, found.rank, run.checks)

    async def move(self, ask: Ask) -> MoveResult:
        """One move, start to end. Cancelling it undoes the move before COMMIT and lets it finish after it.

        Raises only for what is wrong before anything was asked of a daemon (unknown rank, unreachable node); everything
        later is in the result.
        """
        async with self._ends(ask) as (found, source, target):
            run = _Run(self, ask, found, source, target)
            work = asyncio.create_task(run.drive())
            while True:
                try:
                    return await asyncio.shield(work)
                except asyncio.CancelledError:
                    if work.done():
                        raise
                    run.interrupt(work)

    @contextlib.asynccontextmanager
    async def _ends(self, ask: Ask) -> AsyncIterator[tuple[Found, DaemonClient, DaemonClient]]:
        find_node(self.cluster, ask.to)
        found = await find_rank(self.cluster, ask.rank, ask.job)
        if found.node == ask.to:
            raise Refused(f"rank {ask.rank} is already on {ask.to}", remedy="choose another node with --to")
        async with self.cluster.client(found.node) as source, self.cluster.client(ask.to) as target:
            yield found, source, target


class _Run:
    """One walk through the table."""

    def __init__(self, driver: Driver, ask: Ask, found: Found, source: DaemonClient, target: DaemonClient) -> None:
        self.driver, self.ask, self.found = driver, ask, found
        self.source, self.target = source, target
        self.move = f"m-{secrets.token_hex(6)}"
        self.reached = 0  # index of the step being done
        self.checks: list[pb.Check] = []
        self.facts = pb.RankFacts()
        self.nodes: list[pb.NodeAddresses] = []
        self.peers = Peers(driver.cluster)
        self.gates = Gates(driver.cluster)
        self.prepared = pb.PrepareReply()
        self.frozen = pb.FreezeReply()
        self.parts: list[PhaseTime] = []
        self.parts_running = 0  # so many of them, the first ones, while the job ran
        self.receipt = b""
        self.token = b""
        self.bytes = 0  # as they were sent
        self.counted_bytes = 0  # as the source knows it in the end
        self.frozen_at: float | None = None
        self.pause_s = 0.0
        self.phases: list[PhaseTime] = []
        self.request = pb.MoveRequest(move=self.move)

    def interrupt(self, work: asyncio.Task[MoveResult]) -> None:
        """Ctrl-C: before COMMIT the current step is given up and the move undone; from then on it is let finish."""
        if self.reached < protocol.COMMIT:
            work.cancel()
        else:
            self._say("note", text="past COMMIT: letting the move finish")

    async def drive(self) -> MoveResult:
        began = time.monotonic()
        renewing: asyncio.Task[None] | None = None
        try:
            await self.preflight()
            self._refuse_if_checked_so()
            for self.reached in range(protocol.PREFLIGHT, len(TABLE)):
                step = TABLE[self.reached]
                left_s = step.timeout_s
                if self.ask.timeout_s is not None and self.reached < protocol.COMMIT:
                    left_s = min(left_s, self.ask.timeout_s - (time.monotonic() - began))
                    if left_s <= 0:
                        raise Timeout(f"--timeout {self.ask.timeout_s:.0f} s ran out before {step.phase}")
                await self._do(step, left_s)
                if step.action == "Begin":
                    renewing = asyncio.create_task(self._renew())
            return self._result(Verdict.MOVED, "", Where.TARGET_RUNNING, None)
        except Refused as error:
            return await self._refused(error)
        except (SnapshotError, asyncio.CancelledError) as error:
            if self.reached < protocol.PREFLIGHT and isinstance(error, SnapshotError):
                raise  # only questions were asked: there is nothing to undo, and the error has a code of its own
            cause = error if isinstance(error, SnapshotError) else Undone("interrupted")
            return await self._end_badly(cause)
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)

    # ------------------------------------------------------------------ steps

    async def preflight(self) -> None:
        with self._phase("preflight"):
            self.nodes = await node_addresses(self.driver.cluster)
            inspect = pb.InspectRequest(rank_uid=self.found.rank.uid, nodes=self.nodes, target_node=self.ask.to)
            inspected = await self.source.source.Inspect(inspect, timeout_s=TABLE[0].timeout_s)
            self.facts = inspected.facts
            self.checks = list(inspected.checks)
            self.reached = 1
            request = pb.ExamineRequest(facts=self.facts, rewires=inspected.rewires, gpu=self.ask.gpu)
            examined = await self.target.target.Examine(request, timeout_s=TABLE[1].timeout_s)
            self.checks += examined.checks
            self.reached = 2
            self.checks += await self.peers.check(inspected.rewires, TABLE[2].timeout_s)
            self.checks += await self.gates.check(self._description())

    def _refuse_if_checked_so(self) -> None:
        refused = [check for check in self.checks if check.verdict == pb.Check.REFUSE]
        if refused:
            told = "\n".join(f"  {check.name}: {check.reason}\n    remedy: {check.remedy}" for check in refused)
            raise Refused(f"rank {self.ask.rank} cannot move to {self.ask.to}:\n{told}", where=Where.SOURCE_RUNNING)

    async def _do(self, step: Step, timeout_s: float) -> None:
        if step.action == "Quiesce" and not await self.gates.find(self._description()):
            return
        if step.action in protocol.NCCL_ALONE and not self.gates.involved:
            return
        with self._phase(step.phase):
            match step.action:
                case "Prepare":
                    prepare = pb.PrepareRequest(
                        move=self.move,
                        facts=self.facts,
                        source_endpoint=self.driver.cluster.nodes[self.found.node],
                        gpu=self.ask.gpu,
                    )
                    self.prepared = await self.target.target.Prepare(prepare, timeout_s=timeout_s)
                case "Begin":
                    begin = pb.BeginRequest(
                        move=self.move,
                        rank_uid=self.found.rank.uid,
                        target_node=self.ask.to,
                        target_endpoint=self.driver.cluster.nodes[self.ask.to],
                        nonce=self.prepared.nonce,
                        lease_s=self.ask.lease_s,
                        nodes=self.nodes,
                    )
                    try:
                        await self.source.source.Begin(begin, timeout_s=timeout_s)
                    except NotFound as error:
                        raise RankGone(f"rank {self.ask.rank} ended: {error.message}", where=Where.ENDED) from error
                case "PrepareDevice":
                    await self._ready(timeout_s)
                case "Quiesce":
                    await self.gates.quiesce(self._description(), min(timeout_s, self.ask.quiesce_timeout_s))
                case "Detach":
                    self.frozen_at = time.monotonic()  # from the cut on the whole job stands still
                    await self.source.source.Detach(self.request, timeout_s=timeout_s)
                case "Attach":
                    await self.source.source.Attach(self.request, timeout_s=timeout_s)
                case "Open":
                    await self._open(timeout_s)
                case "Freeze":
                    self.frozen_at = self.frozen_at or time.monotonic()
                    self.frozen = await self.source.source.Freeze(self.request, timeout_s=timeout_s)
                    self.peers.take(self.frozen.rewires)
                    self._take_parts(self.frozen.parts)
                    for words in self.frozen.warnings:
                        self._say("note", text=words)
                case "Stream":
                    streamed = pb.Progress()
                    async for progress in self.source.source.Stream(self.request, timeout_s=timeout_s):
                        self.bytes, streamed = progress.bytes_sent, progress
                        self._say("bytes", "stream", bytes_=self.bytes, expected=progress.bytes_expected)
                    beside = sum(part.bytes for part in self.frozen.parts if part.name == "park-out")
                    dumped_bytes = max(0, streamed.bytes_expected - beside)
                    self.parts.append(PhaseTime("criu-dump", streamed.dump_seconds, dumped_bytes))
                    self.parts.append(PhaseTime("stream", streamed.stream_seconds, streamed.bytes_sent))
                case "Restore":
                    restored = await self.target.target.Restore(self.request, timeout_s=timeout_s)
                    self.receipt = restored.held_receipt
                    self._take_parts(restored.parts)
                case "SuspendTimeouts":
                    await self.peers.suspend_timeouts(self._description(), timeout_s)
                case "Repoint":
                    await self.peers.repoint(self._description(), timeout_s)
                case "Settle":
                    await self.peers.settle(self.move, self.token, timeout_s)
                case "Commit":
                    request = pb.CommitRequest(move=self.move, held_receipt=self.receipt)
                    outcome = await self.source.source.Commit(request, timeout_s=timeout_s)
                    if outcome.kind != pb.COMMIT:
                        raise Undone(f"the source decided {pb.OutcomeKind.Name(outcome.kind)}: {outcome.reason}")
                    self.token = outcome.token
                case "Activate":
                    await self._activate(timeout_s)
                case "Release":
                    await self._release(timeout_s)
                case other:
                    raise AssertionError(f"no such step: {other}")

    async def _ready(self, timeout_s: float) -> None:
        try:
            ready = await self.source.source.PrepareDevice(self.request, timeout_s=timeout_s)
        except NotSpoken as error:  # it does it in Freeze
            self._say("note", text=f"an older daemon, so more of the move is in the pause: {error.message}")
            return
        self._take_parts(ready.parts)
        self.parts_running = len(self.parts)

    def _take_parts(self, parts: Iterable[pb.Part]) -> None:
        self.parts += [PhaseTime(part.name, part.seconds, part.bytes) for part in parts]

    def _description(self) -> pb.MoveDescription:
        return pb.MoveDescription(
            move=self.move,
            rank_uid=self.found.rank.uid,
            job=self.found.rank.job,
            rank=self.found.rank.rank,
            source_node=self.found.node,
            source_endpoint=self.driver.cluster.nodes[self.found.node],
            target_node=self.ask.to,
            target_endpoint=self.driver.cluster.nodes[self.ask.to],
            nonce=self.prepared.nonce,
        )

    async def _activate(self, timeout_s: float) -> None:
        token = pb.TokenRequest(move=self.move, token=self.token)
        reply = await self.target.target.Activate(token, timeout_s=timeout_s, retry=True)
        if not reply.running:
            raise RankGone("the target's copy died before it could run", where=Where.SOURCE_FROZEN)
        if self.frozen_at is not None:
            self.pause_s = time.monotonic() - self.frozen_at

    async def _open(self, timeout_s: float) -> None:
        """The rank already runs: a node that does not hear of it now asks the source, and opens alone."""
        late = await self.gates.open(self.move, self.token, timeout_s)
        for words in late:
            self._say("note", text=f"the gates there open later: {words}")
        if self.frozen_at is not None and not late:
            self.pause_s = time.monotonic() - self.frozen_at

    async def _release(self, timeout_s: float) -> None:
        """The rank already runs: a source that cannot clean up now does it alone later."""
        try:
            request = pb.MoveRequest(move=self.move, pause_s=self.pause_s)
            reply = await self.source.source.Release(request, timeout_s=min(timeout_s, RELEASE_S), retry=True)
            if reply.released:  # what went beside the image has arrived, and what of it was zero and not sent is known
                self.counted_bytes = reply.bytes
        except SnapshotError as error:
            self._say("note", text=f"the source cleans up later: {error.message}")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.ask.lease_s / 4)
            with contextlib.suppress(SnapshotError):
                await self.source.source.Renew(self.request, timeout_s=self.ask.lease_s / 4)

    # ------------------------------------------------------------------ ends

    async def _refused(self, error: Refused) -> MoveResult:
        """A refusal after Prepare (the rank changed since) still has to be undone."""
        if self.reached >= protocol.PREFLIGHT:
            return await self._end_badly(error)
        return self._result(Verdict.REFUSED, error.message, Where.SOURCE_RUNNING, error)

    async def _end_badly(self, error: SnapshotError) -> MoveResult:
        """Undo what can be undone, ask how it ended, and say where the rank is."""
        undo = protocol.undo_plan(self.reached)
        outcome: pb.Outcome | None = None
        if self.reached >= protocol.COMMIT:
            with contextlib.suppress(
                SnapshotError
            ):  # lets the source look at the target at once, not at its next round
                await self.source.source.Release(self.request, timeout_s=10)
            outcome = await self._learn_outcome()
            if outcome is None and self.token:  # COMMIT was heard: the token can still be handed on
                outcome = pb.Outcome(kind=pb.COMMIT, token=self.token)
            undo = () if outcome is None or outcome.kind == pb.COMMIT else undo
        for step in undo:
            with self._phase("undo"), contextlib.suppress(SnapshotError):
                if step.action == "Abort":
                    request = pb.AbortRequest(move=self.move, reason=error.message.splitlines()[0][:500])
                    outcome = await self._abort(request, step.timeout_s)
                    if outcome is not None and outcome.kind == pb.COMMIT:  # the answer to Commit was lost
                        break
                elif outcome is None or outcome.kind != pb.ABORT:
                    continue
                elif step.action == "Settle":
                    await self.peers.settle(self.move, outcome.token, step.timeout_s)
                elif step.action == "Open":
                    for words in await self.gates.open(self.move, outcome.token, step.timeout_s):
                        self._say("note", text=f"the gates there open later: {words}")
                else:
                    token = pb.TokenRequest(move=self.move, token=outcome.token)
                    await self.target.target.Discard(token, timeout_s=step.timeout_s)
        return await self._judge(outcome, error)

    async def _judge(self, outcome: pb.Outcome | None, error: SnapshotError) -> MoveResult:
        if outcome is not None and outcome.kind == pb.COMMIT and self.reached <= protocol.ACTIVATE:
            self.token = outcome.token
            with contextlib.suppress(SnapshotError):
                await self._activate(TABLE[protocol.ACTIVATE].timeout_s)
                self.reached = protocol.ACTIVATE + 1
                await self._open(TABLE[self.reached].timeout_s)
                await self.peers.settle(self.move, self.token, TABLE[-2].timeout_s)
                await self._release(TABLE[-1].timeout_s)
        kind = None if outcome is None else pb.OutcomeKind.Name(outcome.kind)
        verdict, reason = protocol.decide(self.reached, kind)
        if verdict is Verdict.MOVED:
            return self._result(verdict, "", Where.TARGET_RUNNING, None)
        if verdict is Verdict.UNDONE:
            if isinstance(error, Refused):
                return self._result(Verdict.REFUSED, error.message, Where.SOURCE_RUNNING, error)
            where = Where(outcome.where) if outcome is not None and outcome.where else Where.SOURCE_RUNNING
            where = Where.ENDED if error.where is Where.ENDED else where
            if where is Where.ENDED and not isinstance(error, RankGone):
                error = RankGone(f"rank {self.ask.rank} ended during the move ({error.message})", where=where)
            told = error.message
            if outcome is not None and where in {Where.SOURCE_FROZEN, Where.ENDED}:
                told = f"{told} ({outcome.reason})"
            return self._result(verdict, told, where, error)
        where = Where.TARGET_HELD if kind == "COMMIT" else Where.UNKNOWN
        unknown = OutcomeUnknown(f"{reason} (first failure: {error.message})", where=where)
        return self._result(verdict, unknown.message, where, unknown)

    async def _abort(self, request: pb.AbortRequest, timeout_s: float) -> pb.Outcome | None:
        """A source that is at work on the undo is waited for; one that does not come back is asked how it ended."""
        give_up_at = time.monotonic() + REACH_S
        while True:
            try:
                return await self.source.source.Abort(request, timeout_s=timeout_s)
            except Unreachable:
                if time.monotonic() > give_up_at:
                    return None
                await asyncio.sleep(0.5)
            except SnapshotError:
                return await self._learn_outcome(decided=True)

    async def _learn_outcome(self, *, decided: bool = False) -> pb.Outcome | None:
        """The source's record. `decided`: UNDECIDED is asked again, since the decision has been asked for."""
        deadline = time.monotonic() + ASK_AGAIN_S
        answer: pb.Outcome | None = None
        while time.monotonic() < deadline:
            try:
                answer = await self.source.source.GetOutcome(self.request, timeout_s=5)
                if answer.kind != pb.UNDECIDED or not decided:
                    return answer
            except (Unreachable, Timeout):
                answer = None
            except SnapshotError:
                return None
            await asyncio.sleep(0.5)
        return answer

    def _result(self, verdict: Verdict, reason: str, where: Where, error: SnapshotError | None) -> MoveResult:
        rank = self.found.rank
        known = verdict in {Verdict.REFUSED, Verdict.UNKNOWN} or where is Where.ENDED
        exit_code = 0 if error is None else (error.exit_code if known else Undone.exit_code)
        return MoveResult(
            move=self.move,
            job=rank.job,
            rank=rank.rank,
            source=self.found.node,
            target=self.ask.to,
            outcome=verdict,
            pause_s=self.pause_s,
            bytes=self.counted_bytes or self.bytes,
            phases=self.phases,
            parts=self.parts,
            gpu_pairs=[(pair.old_uuid, pair.new_uuid) for pair in self.prepared.gpu_pairs],
            device_bytes=self.frozen.device_bytes,
            device_bytes_left=self.frozen.device_bytes_left,
            reason=reason,
            where=where,
            error_code=error.code if error is not None else "",
            remedy=error.advice if error is not None else "",
            exit_code=exit_code,
            longest_part=self._longest_part(),
            warnings=list(self.frozen.warnings),
            peers_stopped_s=self.peers.stopped_s,
        )

    def _longest_part(self) -> PhaseTime | None:
        return max(self.parts[self.parts_running :], key=lambda part: part.seconds, default=None)

    # ------------------------------------------------------------------ telling

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began, before = time.monotonic(), self.bytes
        self._say("phase-start", name)
        try:
            yield
        finally:
            seconds, moved = time.monotonic() - began, self.bytes - before
            if self.phases and self.phases[-1].name == name:
                self.phases[-1].seconds += seconds
                self.phases[-1].bytes += moved
            else:
                self.phases.append(PhaseTime(name, seconds, moved))
            self._say("phase-end", name, seconds=seconds, bytes_=moved)

    def _say(
        self, kind: str, phase: str = "", *, seconds: float = 0, bytes_: int = 0, expected: int = 0, text: str = ""
    ) -> None:
        self.driver.on_event(Event(kind, phase, seconds, bytes_, expected, text))
