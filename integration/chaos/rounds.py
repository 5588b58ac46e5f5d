"""Runs rounds: one move with one fault, then the wait until the cluster has settled."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from integration.chaos import jobs
from integration.chaos import kinds as fault_kinds
from integration.chaos.faults import Fault, Round
from integration.chaos.jobs import Broken, ChaosJob, Gpus, Say
from integration.chaos.processes import idle_guest_keepers
from integration.chaos.report import Entry, Report
from integration.chaos.watch import Watch
from integration.connections import filters
from integration.harness import SHORT_LEASE, Cluster, everything_below, files_below, pids_in, until
from integration.nccl_nodes import unsettled
from snapshotd.api.errors import Busy, Changed, NotFound, OutcomeUnknown, RankGone, Refused, Undone, Unreachable

TICK_S = 0.05
#: A person does not wait forever before running `migrator recover`, and then runs it again.
RECOVER_AFTER_S, RECOVER_EVERY_S = 20.0, 15.0
#: After this the cluster counts as broken. Far more than it takes, also on a busy machine.
SETTLE_LIMIT_S, MOVE_LIMIT_S = 300.0, 300.0
MOVED, REFUSED, UNDONE = 0, Refused.exit_code, Undone.exit_code
OUTCOMES = {MOVED: "moved", -signal.SIGKILL: "driver killed", 130: "interrupted"}
OUTCOMES |= {error.exit_code: error.code for error in (Refused, Undone, Unreachable, OutcomeUnknown, NotFound, Busy)}
OUTCOMES |= {RankGone.exit_code: "ended", Changed.exit_code: Changed.code}
#: A job is ended and verified after so many rounds, and another one begins.
ROUNDS_OF_A_JOB = (4, 10)
#: What `images` of a daemon contains also without a move.
_KNOWN = {"out", "sockets"}


class Chaos:
    """Rounds in one lab, drawn from a seed. `say` gets one line for each round."""

    def __init__(
        self,
        nodes: Cluster,
        seed: int,
        say: Say,
        kinds: Sequence[str] = jobs.KINDS,
        gpus: Gpus | None = None,
        faults: Sequence[str] = tuple(fault_kinds.KINDS),
    ) -> None:
        self.nodes, self.seed, self.say, self.kinds, self.gpus = nodes, seed, say, kinds, gpus
        self.faults = tuple(faults)
        of_jobs = [] if tuple(kinds) == jobs.ALL_KINDS else [f"--jobs {kind}" for kind in kinds]
        self.report = Report(seed, [*of_jobs, *fault_kinds.options(self.faults)])
        self.watch = Watch(nodes)
        self.jobs: dict[str, ChaosJob] = {}
        self._typical_s = dict.fromkeys(kinds, 3.0)
        self._lasts: dict[str, int] = {}

    def run(self, seconds: float, first: int = 1, most: int | None = None) -> Report:
        """Rounds until the time is over. Raises Broken, with the number of the round, if a promise is broken."""
        ends_s, number = time.monotonic() + seconds, first
        self.report.options += [f"--first {first}"] if first != 1 else []
        self.watch.start()
        try:
            while time.monotonic() < ends_s and (most is None or number < first + most):
                self._named(number, partial(self._round, number))
                number += 1
            self._named(number, self._end)
        finally:
            self.watch.stop()
            self.report.scans, self.report.longest_gap_s = self.watch.scans, self.watch.longest_gap_s
        return self.report

    def _named(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.report.broken = f"round {number}: {error}"
            repeat = f"repeat with: {self.report.repeat()} (the rounds before it are part of the state)"
            raise Broken(f"seed {self.seed}, {self.report.broken}\n{repeat}\n{self.nodes.logs(200)}") from error

    # ---------------------------------------------------------------- one round

    def _round(self, number: int) -> None:
        random = Random(f"{self.seed}/{number}")
        job = self._job(random.choice(self.kinds), random)
        rank = random.randrange(len(job.ranks))
        (source,) = self._placed(job, rank)
        target = random.choice([node for node in self.nodes.lab.nodes if node != source])
        others = [place for other in range(len(job.ranks)) if other != rank for place in job.places(other)]
        third = next(node for node in self.nodes.lab.nodes if node not in (source, target))
        peer = others[0] if others else third
        round_ = Round(
            number, self.nodes, job, rank, source, target, peer, self._typical_s[job.kind], list(self.jobs.values())
        )
        fault = fault_kinds.draw(random, job, self.faults)
        words = f"{job.name} rank {rank} {source} → {target}: {fault.words}"
        try:
            code, took_s = self._move(round_, fault)
            outcome = OUTCOMES.get(code, f"exit {code}")
            settled_s, recovers = self._settle(round_, fault, code)
        except BaseException:
            self.say(f"round {number}: {words}")
            raise
        if code == MOVED and took_s < 2 * self._typical_s[job.kind]:  # not one that waited for something
            self._typical_s[job.kind] = (self._typical_s[job.kind] + took_s) / 2
        job.rounds += 1
        notes = f" ({', '.join(round_.notes)})" if round_.notes else ""
        self.say(f"round {number}: {words}: {outcome}{notes}, settled in {settled_s:.1f} s")
        self.report.add(Entry(number, fault.kind, fault.words, job.kind, outcome, took_s, settled_s, recovers))

    def _job(self, kind: str, random: Random) -> ChaosJob:
        """A running job of this kind."""
        job = self.jobs.get(kind)
        if job is not None and job.rounds >= self._lasts[kind]:
            self._finish(job)
            job = None
        if job is None:
            job = self.jobs[kind] = jobs.draw(kind, self.nodes, random, self.gpus)
            self._lasts[kind] = random.randint(*ROUNDS_OF_A_JOB)
            job.await_steps()
            self.watch.add(job)
        return job

    def _finish(self, job: ChaosJob) -> None:
        self.watch.remove(job)
        del self.jobs[job.kind]
        job.end()

    def _abandon(self, job: ChaosJob) -> None:
        self.watch.remove(job)
        del self.jobs[job.kind]
        job.abandon()

    def _placed(self, job: ChaosJob, rank: int) -> list[str]:
        places = job.places(rank)
        if len(places) != 1:
            raise Broken(f"rank {rank} of {job.name} has copies on {places or 'no node'}\n{job.tails()}")
        return places

    def _move(self, round_: Round, fault: Fault) -> tuple[int, float]:
        """Runs the move beside its fault. Returns the exit code and how long it took."""
        act = fault.act(round_)
        active = next(act, act) is not act  # what must be in place before the move is asked for
        began_s = time.monotonic()
        more = (*SHORT_LEASE, "--timeout", "60")
        driver = self.nodes.begin_move(
            round_.job.ranks[round_.rank], round_.to or round_.target, rank=round_.rank, more=more
        )
        with driver:
            round_.driver = driver
            took_s = 0.0
            try:
                while active or not round_.over:
                    time.sleep(TICK_S)
                    self.watch.check()
                    if not round_.over and driver.poll() is not None:
                        round_.over, took_s = True, time.monotonic() - began_s
                    if active:
                        active = next(act, act) is not act
                    if time.monotonic() > began_s + MOVE_LIMIT_S:
                        raise Broken(f"`migrator move` has not ended after {MOVE_LIMIT_S:.0f} s")
            finally:
                driver.kill()
            out, errors = driver.communicate()
        if "Traceback" in errors:
            raise Broken(f"`migrator move` failed:\n{errors}")
        if driver.returncode == 0 and json.loads(out)["outcome"] != "moved":
            raise Broken(f"`migrator move` exits with 0 and says {out}")
        round_.driver = None
        return driver.returncode, took_s

    # ---------------------------------------------------------------- afterwards

    def _settle(self, round_: Round, fault: Fault, code: int) -> tuple[float, int]:
        """Waits until everything is in order. Returns how long that took since the harm ended, and how often `migrator
        recover` was needed."""
        job, rank = round_.job, round_.rank
        self.nodes.calm()
        began_s, recovers = time.monotonic(), 0
        steps = [ledger.steps for ledger in job.ledgers]
        may_end = fault.may_end or job.name in round_.hit
        while problems := self._problems(job, steps, ended_is_fine=may_end):
            self.watch.check()
            waited_s = time.monotonic() - began_s
            if waited_s > SETTLE_LIMIT_S:
                raise Broken(f"not settled after {waited_s:.0f} s: {'; '.join(problems)}\n{job.tails()}")
            if waited_s > RECOVER_AFTER_S + recovers * RECOVER_EVERY_S:
                self.nodes.migrator("recover", "--json", timeout_s=SETTLE_LIMIT_S)
                recovers += 1
            time.sleep(5 * TICK_S)
        self.watch.check()
        for other in round_.everyone:  # of a crashed node
            if other is not job and other.name in round_.hit:
                until(f"the end of {other.name}", other.ended, SETTLE_LIMIT_S)
                self._abandon(other)
        settled_s = time.monotonic() - began_s
        if job.ended():
            self._abandon(job)
        else:
            (place,) = self._placed(job, rank)
            wanted = {MOVED: round_.to or round_.target, REFUSED: round_.source, UNDONE: round_.source}.get(code, place)
            if place != wanted and not fault.answer_is_open:
                raise Broken(f"`migrator move` exits with {code}, and the rank runs on {place}")
        return settled_s, recovers

    def _problems(self, job: ChaosJob, steps: list[int], *, ended_is_fine: bool) -> list[str]:
        found = unsettled(self.nodes)
        if job.ended():
            if not ended_is_fine:
                raise Broken(f"{job.name} has ended:\n{job.tails()}")
        else:
            for number, (ledger, before) in enumerate(zip(job.ledgers, steps, strict=True)):
                if ledger.steps < before + 2:
                    found.append(f"rank {number} makes no steps")
                if len(places := job.places(number)) != 1:
                    found.append(f"rank {number} has copies on {places or 'no node'}")
        found += [] if found else left_by_moves(self.nodes)
        return found

    def _end(self) -> None:
        """Ends all jobs. Nothing is left of them."""
        for job in list(self.jobs.values()):
            self._finish(job)
        began_s = time.monotonic()
        while left := [*self.nodes.leftovers(), *unsettled(self.nodes), *filters(self.nodes)]:
            if time.monotonic() > began_s + SETTLE_LIMIT_S:
                raise Broken(f"left when all jobs have ended: {'; '.join(left)}")
            time.sleep(5 * TICK_S)
        status = self.nodes.migrator("status", "--json")
        if json.loads(status.stdout)["moves"]:
            raise Broken(f"`migrator status` shows {status.stdout}")


def left_by_moves(nodes: Cluster) -> list[str]:
    """What must not exist while no move is in progress: images, cgroups of criu, frozen processes, guest keepers without a
    rank, packet filters."""
    found = []
    for node in nodes.lab.nodes:
        images = nodes.run_dir(node) / "images"
        found += [f"{node}: {path.name}" for path in everything_below(images) if path.name not in _KNOWN]
        for procs in files_below(nodes.lab.layout.node_cgroup(node), "cgroup.procs"):
            with contextlib.suppress(OSError):
                if procs.parent.name.startswith("criu-"):
                    found.append(f"{node}: cgroup {procs.parent.name}")
                # A rank that is away has left an empty one at home.
                if pids_in(procs) and "frozen 1" in (procs.parent / "cgroup.events").read_text():
                    found.append(f"{node}: cgroup {procs.parent.name} is frozen")
    found += [f"guest keeper {pid} has no rank" for pid in idle_guest_keepers(nodes)]
    return found or filters(nodes)
