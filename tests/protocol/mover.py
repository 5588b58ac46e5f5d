"""The driver of the model, which executes the table of `migrator/protocol.py`, and queries for tests to use afterwards."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from migrator.protocol import ACTIVATE, COMMIT, PREPARE, TABLE, Asked, Step, Verdict, decide, undo_plan
from snapshotd.moves.rules import CopyState, Mark, Outcome
from tests.protocol.model import Model
from tests.protocol.network import Copy
from tests.protocol.world import DRIVER, NODES, Answer, Died, Lost, Record, Refused


@dataclass
class Move:
    """One run of the driver. `verdict` is None while it runs, and stays None if it died."""

    model: Model
    name: str
    source: str
    target: str
    verdict: Verdict | None = None
    knowable: bool = True  # the source was reachable and had decided, and after COMMIT the target was reachable, too
    token: bytes = b""
    nonce: bytes = b""
    receipt: bytes = b""
    peers: tuple[str, ...] = ()
    touched: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.moved_copy = next(iter(running(self.model)), None)

    def run(self) -> Verdict | None:
        self.model.up[DRIVER] = True
        with self.model.acting(DRIVER):
            try:
                self.verdict = self._run()
            except Died:
                self.verdict = None
            undecided = self.at_source is not None and self.at_source.outcome is None
            self.knowable = self.model.reaches(DRIVER, self.source) and not undecided
            if self.committed:
                self.knowable = self.knowable and self.model.reaches(DRIVER, self.target) and not self.stranded
        return self.verdict

    def _run(self) -> Verdict:
        done = 0
        try:
            for step in TABLE:
                self._ask(step)
                done += 1
        except (Refused, Lost) as failed:
            refused = isinstance(failed, Refused) and done < PREPARE
            return Verdict.REFUSED if refused else self._stop(done)
        return Verdict.MOVED

    def _stop(self, reached: int) -> Verdict:
        outcome = "COMMIT" if reached > COMMIT else None
        for step in undo_plan(reached):
            if outcome == "COMMIT":
                break
            with suppress(Lost, Refused):
                answer = self._ask(step)
                outcome = answer.kind if step.action == "Abort" else outcome
        if outcome == "COMMIT":
            reached = max(reached, COMMIT + 1)
            with suppress(Lost, Refused):
                for step in TABLE[reached:]:
                    self._ask(step)
                    reached += 1
        if outcome == "COMMIT" and reached <= ACTIVATE:
            reached, outcome = self._ask_the_source(reached)
        return decide(reached, outcome)[0]

    def _ask_the_source(self, reached: int) -> tuple[int, str]:
        """The target has not confirmed that it runs the rank. Release makes the source ask it now. The source then takes the
        rank back, or releases its own copy, which it does only if the target's copy was activated."""
        released, outcome = False, "COMMIT"
        with suppress(Lost, Refused):  # a source that took the rank back may still wait for another member
            released = self._ask_twice(self.source, "Release").kind == "released"
        with suppress(Lost, Refused):
            outcome = self._ask_twice(self.source, "GetOutcome").kind
        return ACTIVATE + 1 if released else reached, outcome

    def _ask_twice(self, node: str, rpc: str, *arguments: object) -> Answer:
        with suppress(Lost):
            return self.model.call(DRIVER, node, rpc, self.name, *arguments)
        return self.model.call(DRIVER, node, rpc, self.name, *arguments)

    def _ask(self, step: Step) -> Answer:
        """Makes one request. A step whose answer is not the requested outcome has failed."""
        if step.asked is Asked.PEERS:
            return self._ask_peers(step)
        if step.asked is Asked.JOB:
            return self._ask_job(step)
        node = self.target if step.asked is Asked.TARGET else self.source
        arguments: dict[str, tuple[object, ...]] = {
            "Prepare": (self.source,),
            "Begin": (self.target, self.nonce),
            "Commit": (self.receipt,),
            "Activate": (self.token,),
            "Discard": (self.token,),
        }
        if step.phase == "undo":
            answer = self._ask_twice(node, step.action, *arguments.get(step.action, ()))
        else:
            answer = self.model.call(DRIVER, node, step.action, self.name, *arguments.get(step.action, ()))
        match step.action:
            case "Inspect" | "Freeze":
                self.peers = answer.peers
            case "Prepare":
                self.nonce = answer.token
            case "Restore":
                self.receipt = answer.token
            case "Commit" | "Abort":
                self.token = answer.token
                if step.action == "Commit" and answer.kind != "COMMIT":
                    raise Refused("the source has aborted")
            case "Activate" if answer.copy not in (CopyState.RUNNING, CopyState.ENDED):
                raise Refused(f"the target's copy is {answer.copy}")
        return answer

    def _ask_peers(self, step: Step) -> Answer:
        """Asks all peers, even if one fails. Then raises the first failure, unless the step is Settle."""
        arguments: dict[str, tuple[object, ...]] = {
            "InspectConnections": (self.source,),
            "SuspendTimeouts": (self.source, self.target, self.nonce),
            "Hold": (self.source, self.target, self.nonce),
            "Repoint": (self.source, self.target, self.nonce),
            "Settle": (self.token,),
        }
        failures: list[Lost | Refused] = []
        for peer in sorted(self.touched) if step.action == "Settle" else self.peers:
            self.touched |= {peer} if step.action in ("SuspendTimeouts", "Hold", "Repoint") else set()
            try:
                self.model.call(DRIVER, peer, step.action, self.name, *arguments[step.action])
            except (Lost, Refused) as failed:
                failures.append(failed)
        if failures and step.action != "Settle":
            raise Refused(str(failures[0])) if step.action == "InspectConnections" else failures[0]
        return Answer()

    def _ask_job(self, step: Step) -> Answer:
        """Asks every node that has a member. Raises the first failure to close a gate."""
        failures: list[Lost | Refused] = []
        living = [peer for peer, program in self.model.programs.items() if program.alive]
        for node in sorted(self.gated) if step.action == "Open" else (self.source, *living):
            try:
                if step.action == "Open":
                    self.model.call(DRIVER, node, "Open", self.name, self.token)
                else:
                    self.gated.add(node)
                    self.model.call(DRIVER, node, "Close", self.name, self.source, self.target, self.nonce)
            except (Lost, Refused) as failed:
                failures.append(failed)
        if failures and step.action != "Open":
            raise failures[0]
        return Answer()

    # ------------------------------------------------------------ what became of it

    @property
    def at_source(self) -> Record | None:
        return self.model.journal.get((self.source, self.name))

    @property
    def at_target(self) -> Record | None:
        return self.model.journal.get((self.target, self.name))

    @property
    def at_source_ended(self) -> bool:
        return self.at_source is not None and self.at_source.ended

    @property
    def at_target_ran(self) -> bool:
        return self.at_target is not None and self.at_target.mark is Mark.ACTIVATED

    @property
    def committed(self) -> bool:
        """Whether the rank belongs to the target, by the record (unless overruled) or by a person's declaration."""
        declared = self.at_target is not None and bool(self.at_target.overruled_by)
        recorded = self.at_source is not None and self.at_source.holds is Outcome.COMMIT
        return declared or recorded

    @property
    def stranded(self) -> bool:
        """Whether COMMIT stands although the target's copy died before it ran, which the source does not know yet."""
        unrun = self.at_target is not None and self.at_target.mark in (Mark.HELD, Mark.DISCARDED)
        return self.committed and unrun and self.at_target is not None and not self.at_target.copy_exists

    def owner(self) -> Copy | None:
        """The copy that should run according to the outcome; None if it has died."""
        record = self.at_target if self.committed else self.at_source
        copy = record.copy if self.committed and record is not None else self.moved_copy
        return copy if copy is not None and copy.alive else None


def person_says(model: Model, node: str, declaration: str, move: str, *more: str) -> bool:
    """`migrator recover --source-is-dead` (sent to the target), `--target-is-dead` or `--member-is-dead` (to the source)."""
    model.up[DRIVER] = True
    with model.acting(DRIVER):
        try:
            model.call(DRIVER, node, declaration, move, *more)
        except (Lost, Refused, Died):
            return False
    return True


def running(model: Model) -> list[Copy]:
    return [copy for copy in model.copies if copy.alive and copy.running]


def leftovers(model: Model) -> list[str]:
    """What must not remain after settling: frozen or held copies, images, filters, blocked connections, unfinished moves."""
    still = [f"a copy on {copy.node} that does not run" for copy in model.copies if copy.alive and not copy.running]
    images = [f"an image on {node} of {move}" for node, move in model.images]
    filters = [f"a filter on {node} for {move}" for node, move, _ in model.filters]
    silent = [
        f"no packets between the rank and {peer}"
        for peer in model.peers
        if running(model) and not model.excused(peer) and not model.flows(peer)
    ]
    timeouts_suspended = [
        f"time-outs off on {holder.node}" for _, holder, socket in model.ends() if socket.timeouts_suspended
    ]
    gates = [f"a closed gate on {copy.node}" for copy in model.members() if copy.gated]
    excused = model.given_up or any(model.excused(peer) for peer in model.peers)
    apart = ["the communicator is not whole"] if not excused and running(model) and not model.whole() else []
    open_moves = [f"{move} unfinished on {node}" for (node, move), record in model.journal.items() if not record.ended]
    return still + images + filters + silent + timeouts_suspended + gates + apart + open_moves


def other(node: str) -> str:
    return NODES[1 - NODES.index(node)]
