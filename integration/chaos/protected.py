"""Rounds in which a whole job is rolled back (`make chaos CHAOS=--rollback`): `migrator protect` takes a snapshot every few
seconds, and ranks, nodes, daemons, cables and `migrator protect` itself are lost at random moments, also during a snapshot
and during a rollback.

After each round every rank makes new steps, one copy of each exists, and there is a new snapshot. In the end the launchers
have seen every step once, with the losses of an undisturbed run, and nothing is left on any node. Only what a launcher on a
node that was switched off would have printed is missing, as docs/limits.md says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from integration.chaos.ddp_jobs import Ddp, Undisturbed
from integration.chaos.jobs import Broken, Gpus, Say
from integration.chaos.losses import LOSSES, Moment, Stage, draw_loss, draw_moment
from integration.chaos.protected_jobs import ProtectedJob
from integration.chaos.report import Entry, Report
from integration.chaos.tensor_jobs import TensorParallel
from integration.chaos.watch import Watch
from integration.connections import filters
from integration.harness import MIGRATOR, PATIENCE_S, Cluster
from integration.nccl_nodes import unsettled

NODES = ("node-1", "node-2", "node-3", "spare-1")
EVERY_S = 3.0
#: Faults come more often here than any job fails by itself.
TRIES = "20"
TICK_S = 0.1
#: For a moment that a daemon has to reach; it may never, because another node has the part that was drawn.
REACH_S = 40.0
SETTLE_LIMIT_S = 240.0
ROUNDS_OF_A_JOB = (3, 6)
#: Every snapshot lies on three nodes at least. Those on two need a witness: test_job_rollback.py.
MIN_NODES = 3
JOBS = ("ddp", "nccl", "nccl-gpu")


class ProtectedChaos:
    """Rounds in one lab, drawn from a seed. `say` gets one line for each round. It is the `Course` of each loss."""

    def __init__(
        self,
        nodes: Cluster,
        seed: int,
        say: Say,
        kinds: Sequence[str] = JOBS,
        gpus: Gpus | None = None,
        faults: Sequence[str] = tuple(LOSSES),
    ) -> None:
        self.nodes, self.seed, self.say = nodes, seed, say
        self.kinds, self.gpus, self.faults = tuple(kinds), gpus, tuple(faults)
        chosen = [] if self.kinds == JOBS else [f"--jobs {kind}" for kind in self.kinds]
        chosen += [] if self.faults == tuple(LOSSES) else [f"--faults {kind}" for kind in self.faults]
        self.report = Report(seed, ["--rollback", *chosen])
        self.watch = Watch(nodes)
        self.undisturbed = Undisturbed(nodes)
        self.notes: list[str] = []
        self.guard: subprocess.Popen[bytes] | None = None
        self.said = nodes.folder / "protect.out"
        self._job: ProtectedJob | None = None
        self._lasts = 0

    @property
    def job(self) -> ProtectedJob:
        assert self._job is not None
        return self._job

    def run(self, seconds: float, first: int = 1, most: int | None = None) -> Report:
        """Rounds until the time is over. Raises Broken, with the number of the round, if a promise is broken."""
        ends_s, number = time.monotonic() + seconds, first
        self.report.options += [f"--first {first}"] if first != 1 else []
        self.watch.start()
        try:
            while time.monotonic() < ends_s and (most is None or number < first + most):
                self._named(number, partial(self._round, number))
                number += 1
            self._named(number, self._finish)
        finally:
            self.watch.stop()
            if self.guard is not None:
                self.guard.kill()
                self.guard.wait()
            self.report.scans, self.report.longest_gap_s = self.watch.scans, self.watch.longest_gap_s
        return self.report

    def _named(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.report.broken = f"round {number}: {error}"
            tails = self._job.tails() if self._job is not None else ""
            raise Broken(
                f"seed {self.seed}, {self.report.broken}\nrepeat with: {self.report.repeat()} (the rounds before it are part"
                f" of the state)\n--- migrator protect\n{self._said()[-4000:]}\n{tails}\n{self.nodes.logs(400)}"
            ) from error

    # ---------------------------------------------------------------- one round

    def _round(self, number: int) -> None:
        random = Random(f"{self.seed}/{number}")
        if self._job is None:
            self._begin(random)
        self.notes, job = [], self.job
        places = [place for rank in range(len(job.homes)) for place in job.places(rank)]
        stage = Stage(self.nodes.lab.nodes, places, job.homes, self._coordinator(), isinstance(job, TensorParallel))
        moment = draw_moment(random, stage, EVERY_S)
        loss = draw_loss(random, stage, moment, self.faults)
        words = f"{job.name} on {', '.join(places)}, coordinator {stage.coordinator}: {loss.words}, {moment}"
        began_s, rollbacks = time.monotonic(), self._said().count(", down ")
        try:
            self._come(moment)
            before, struck_s = [ledger.steps for ledger in self.job.ledgers], time.monotonic()
            loss.strike(self)
            self._go(moment)
            self.wait(loss.down_s)
            loss.mend(self)
            self.nodes.calm()
            self._await_steps(before)
            back_s = time.monotonic() - struck_s
            self._await_snapshot()
        except BaseException:
            self.say(f"round {number}: {words}")
            raise
        self.job.rounds += 1
        again = moment.during == "rollback" or self._said().count(", down ") > rollbacks
        notes = f" ({', '.join(self.notes)})" if self.notes else ""
        outcome = "rolled back" if again else "went on"
        self.say(f"round {number}: {words}: {outcome}{notes}, new steps after {back_s:.1f} s")
        took_s = time.monotonic() - began_s
        kind = f"{loss.kind}, {f'in a {moment.during}' if moment.during else 'between'}"
        self.report.add(Entry(number, kind, words, self.job.kind, outcome, took_s, back_s, 0))
        if self.job.rounds >= self._lasts or self.job.lost:
            self._finish()

    def _begin(self, random: Random) -> None:
        """A job of a kind that is drawn, and its first snapshot."""
        kind = random.choice(self.kinds)
        ranks = random.choice([3, 3, 4]) if kind == "ddp" else random.choice([4, 4, 8])
        first = random.sample(self.nodes.lab.nodes, MIN_NODES)
        homes = [*first, *(random.choice(self.nodes.lab.nodes) for _ in range(ranks - MIN_NODES))]
        if kind == "ddp":
            self._job = Ddp(self.nodes, homes, self.undisturbed)
        else:
            self._job = TensorParallel(self.nodes, homes, self.gpus if kind == "nccl-gpu" else None)
        self._lasts = random.randint(*ROUNDS_OF_A_JOB)
        self.job.await_steps()
        self.watch.add(self.job)
        self.said.write_text("")
        self.start_guard()
        self._await_snapshot()

    def _come(self, moment: Moment) -> None:
        """Waits for the moment at which the loss strikes."""
        if moment.point is not None:
            self.nodes.fault(moment.node, moment.point, "wait")
        known = self._records()
        if moment.during == "rollback":
            before = self._said().count("rolling the job back")
            for pid in self.job.copies(moment.victim):
                os.kill(pid, signal.SIGKILL)
            self._until("a rollback", lambda: self._said().count("rolling the job back") > before)
        if moment.point is not None:
            node = moment.node
            if not self._until("the fault point", lambda: self.nodes.fired(node), REACH_S, needed=False):
                (self.nodes.run_dir(node) / "fault").unlink(missing_ok=True)
                self.notes.append("not reached")
            return
        if moment.during == "snapshot":
            self._until("a snapshot", lambda: self._records() - known)
        self.wait(moment.after_s)

    def _go(self, moment: Moment) -> None:
        """The daemon that waits at a fault point goes on, if it has not been lost."""
        node, lab = moment.node, self.nodes.lab
        if moment.point is None or lab.daemon_pid(node) is None or not self.nodes.fired(node):
            return
        go = self.nodes.run_dir(node) / f"{moment.point}.go"
        go.touch()
        self._until("a daemon to go on", lambda: not go.exists() or lab.daemon_pid(node) is None)

    # ---------------------------------------------------------------- waiting

    def wait(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while True:
            self._check()
            if time.monotonic() >= ends_s:
                return
            time.sleep(min(TICK_S, max(0.0, ends_s - time.monotonic())))

    def _check(self) -> None:
        self.watch.check()
        if self.guard is not None and (status := self.guard.poll()) is not None:
            raise Broken(f"`migrator protect` ended with {status} while the job runs")
        if self.job.ended():
            raise Broken(f"{self.job.name} has ended")

    def _until(
        self, what: str, condition: Callable[[], object], limit_s: float = SETTLE_LIMIT_S, *, needed: bool = True
    ) -> bool:
        ends_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > ends_s:
                if needed:
                    raise Broken(f"waited {limit_s:.0f} s for {what}")
                return False
            self.wait(TICK_S)
        return True

    def _await_steps(self, before: Sequence[int]) -> None:
        """Every rank makes new steps, and has one process. Two of them, at any time, are found by `watch`."""
        ledgers, ranks = self.job.ledgers, range(len(self.job.homes))
        self._until(
            "new steps of all ranks, in one process each",
            # A node that was cut off for almost too long may end its ranks after it has made some steps.
            lambda: (
                all(ledger.steps > steps + 2 for ledger, steps in zip(ledgers, before, strict=True))
                and all(len(self.job.places(rank)) == 1 for rank in ranks)
            ),
        )

    def _await_snapshot(self) -> None:
        before = self._said().count(", paused ")
        self._until("a snapshot", lambda: self._said().count(", paused ") > before)

    # ---------------------------------------------------------------- what runs

    def start_guard(self) -> None:
        with self.said.open("ab") as out:
            self.guard = subprocess.Popen(
                [*MIGRATOR, "protect", self.job.name, "--every", str(EVERY_S), "--tries", TRIES],
                env=self.nodes.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def kill_guard(self) -> None:
        assert self.guard is not None
        self.guard.kill()
        self.guard.wait()
        self.guard = None

    def _said(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""

    def _coordinator(self) -> str:
        """The node that keeps the job's snapshot."""
        listed = json.loads(self.nodes.migrator("job", "list", "--all", "--json").stdout)["jobs"]
        mine = [
            one for one in listed if (one["job"], one["kind"], one["state"]) == (self.job.name, "snapshot", "snapshot")
        ]
        return str(mine[0]["coordinator"]) if mine else self.job.homes[0]

    def _records(self) -> set[str]:
        state = self.nodes.lab.layout.state
        return {path.name for node in self.nodes.lab.nodes for path in (state / node / "moves").glob("m-*")}

    # ---------------------------------------------------------------- the end of a job

    def _finish(self) -> None:
        """Ends the job. Its output is that of an undisturbed run, and nothing is left of it."""
        if self._job is None:
            return
        self.watch.remove(self.job)
        self.job.end()
        guard, self.guard = self.guard, None
        assert guard is not None
        if guard.wait(PATIENCE_S) != 0 or "the job has ended" not in self._said():
            raise Broken(f"`migrator protect` ended with {guard.returncode}")
        ends_s = time.monotonic() + SETTLE_LIMIT_S
        while left := [*self.nodes.leftovers(), *unsettled(self.nodes), *filters(self.nodes)]:
            if time.monotonic() > ends_s:
                raise Broken(f"left when the job has ended: {'; '.join(left)}")
            time.sleep(5 * TICK_S)
        self._job = None
