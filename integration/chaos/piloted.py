"""Rounds in which the autopilot moves the ranks (`make chaos CHAOS=--autopilot`): a node reports failing memory, other faults
happen meanwhile, and the autopilot is killed and started again at any moment.

Besides what holds in every round: every rank leaves the node in the end. Every move that a daemon has journalled was
intended, with a reason, and recorded before. No rank has two moves in progress, and where the record says that a rank is,
there it is.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

from integration.chaos import jobs
from integration.chaos import kinds as fault_kinds
from integration.chaos.faults import Fault, Round, lapse, moment
from integration.chaos.jobs import Broken, Gpus, Say
from integration.chaos.rounds import (
    MOVE_LIMIT_S,
    MOVED,
    RECOVER_AFTER_S,
    RECOVER_EVERY_S,
    SETTLE_LIMIT_S,
    TICK_S,
    Chaos,
)
from integration.harness import Cluster, until
from integration.pilot import Pilot
from migrator.driver import ATTEMPTS, attempt_id
from snapshotd.moves.journal import Journal

POLICY = """
[[rules]]
name = "failing"
checks = ["host-mce"]
action = "move"

[spares]
floating = true

# Without limits: a rank must leave in the end, however often its move was undone.
[breaker]
moves = 100000
nodes_percent = 100
same_alarm_nodes = 1000
undone = 1000
rank_window_s = 1
back_off_s = 1
"""
#: `migrator move` by hand is not the autopilot's, a target that is down is avoided, and a crashed node has no ranks to move.
WITHOUT = ("refusal", "second-move", "node-crash")
#: How often the autopilot is killed besides the fault of the round.
KILLED = 0.5


class PilotedChaos(Chaos):
    def __init__(
        self,
        nodes: Cluster,
        seed: int,
        say: Say,
        kinds: Sequence[str] = jobs.KINDS,
        gpus: Gpus | None = None,
        faults: Sequence[str] = tuple(fault_kinds.KINDS),
    ) -> None:
        super().__init__(nodes, seed, say, kinds, gpus, [kind for kind in faults if kind not in WITHOUT])
        self.report.options = ["--autopilot", *self.report.options]
        self.pilot = Pilot(nodes, POLICY)
        shutil.rmtree(self.pilot.state, ignore_errors=True)
        self.journalled: set[str] = set()
        self.moves = self.kills = 0

    def run(self, seconds: float, first: int = 1, most: int | None = None) -> Any:
        self.pilot.start()
        try:
            report = super().run(seconds, first, most)
            if not self.pilot.verb("report", "verify")["valid"]:
                raise Broken("the event log is not intact")
            self.say(f"the autopilot made {self.moves} moves, and was killed or stopped {self.kills} times")
            return report
        finally:
            self.pilot.kill()

    # ---------------------------------------------------------------- one round

    def _move(self, round_: Round, fault: Fault) -> tuple[int, float]:
        """Lets the source fail, and waits until the rank has left it, or has ended."""
        random = Random(f"{self.seed}/{round_.number}/autopilot")
        acts = [fault.act(round_)]
        if random.random() < KILLED:
            acts.append(self._killed(round_, random.uniform(0.0, 1.1), random.uniform(0.0, 3.0)))
        acts = [act for act in acts if next(act, acts) is not acts]
        began_s = time.monotonic()
        self.pilot.memory_fails(round_.source)
        while acts or not round_.over:
            time.sleep(TICK_S)
            self.watch.check()
            self._revive()
            round_.driver = cast("subprocess.Popen[str]", self.pilot.process)
            round_.over = round_.over or self._has_left(round_)
            acts = [act for act in acts if next(act, acts) is not acts]
            if time.monotonic() > began_s + MOVE_LIMIT_S:
                raise Broken(f"the rank has not left {round_.source} after {MOVE_LIMIT_S:.0f} s\n{self._tail()}")
        return MOVED, time.monotonic() - began_s

    def _killed(self, round_: Round, part: float, down_s: float) -> Iterator[None]:
        yield from moment(round_, part)
        round_.notes.append("the autopilot was killed")
        assert self.pilot.process is not None
        self.pilot.process.kill()
        self._down_until_s = time.monotonic() + down_s
        yield from lapse(down_s)

    _down_until_s = 0.0

    def _revive(self) -> None:
        """Starts the autopilot again, as systemd does. It ends only because of a signal of a round."""
        process = self.pilot.process
        assert process is not None
        if process.poll() is None or time.monotonic() < self._down_until_s:
            return
        if process.returncode not in (0, -signal.SIGKILL, -signal.SIGINT):
            raise Broken(f"the autopilot ended with {process.returncode}\n{self._tail()}")
        self.kills += 1
        self.pilot.start()

    def _has_left(self, round_: Round) -> bool:
        if round_.job.ended():
            return True
        places = round_.job.places(round_.rank)
        return len(places) == 1 and places != [round_.source] and not self._open_moves()

    def _open_moves(self) -> list[str]:
        return [move for (move,) in self.pilot.rows("SELECT id FROM moves WHERE state = 'intended'")]

    # ---------------------------------------------------------------- afterwards

    def _settle(self, round_: Round, fault: Fault, code: int) -> tuple[float, int]:
        """Waits for the autopilot too, repairs the node, and compares the record with what is true."""
        self.nodes.calm()
        began_s, recovers = time.monotonic(), 0
        while left := self._left_to_do(round_):
            self.watch.check()
            self._revive()
            waited_s = time.monotonic() - began_s
            if waited_s > SETTLE_LIMIT_S:
                raise Broken(f"the autopilot is not done after {waited_s:.0f} s: {'; '.join(left)}\n{self._tail()}")
            if waited_s > RECOVER_AFTER_S + recovers * RECOVER_EVERY_S:
                self.nodes.migrator("recover", "--json", timeout_s=SETTLE_LIMIT_S)
                recovers += 1
            time.sleep(5 * TICK_S)
        waited_s = time.monotonic() - began_s
        self._repair(round_.source)
        settled_s, more = super()._settle(round_, replace(fault, answer_is_open=True), code)
        self._check_record()
        return waited_s + settled_s, recovers + more

    def _left_to_do(self, round_: Round) -> list[str]:
        found = [f"{move} is in progress" for move in self._open_moves()]
        if not self.pilot.rows(f"SELECT 1 FROM nodes WHERE name = '{round_.source}' AND state = 'tainted'"):
            found.append(f"{round_.source} is not tainted")
        for job in self.jobs.values():
            ranks = range(0 if job.ended() else len(job.ranks))
            there = [rank for rank in ranks if round_.source in job.places(rank)]
            found += [f"rank {rank} of {job.name} is on {round_.source}" for rank in there]
        return found

    def _repair(self, node: str) -> None:
        """As a person would: the alarms are cleared, and the node is used again."""
        done = self.nodes.migrator("health", "--clear", "all", node)
        if done.returncode != 0:
            raise Broken(f"`migrator health --clear` failed: {done.stderr}")
        until("the autopilot to see no alarm", lambda: self._sees_no_alarm(node), SETTLE_LIMIT_S)
        self.pilot.verb("untaint", node)

    def _sees_no_alarm(self, node: str) -> bool:
        self._revive()  # the fault of a round may have killed it a moment ago
        return not self.pilot.rows(f"SELECT 1 FROM alarms WHERE node = '{node}'")

    def _check_record(self) -> None:
        """The journals of the daemons and the places of the ranks agree with the event log."""
        records = [(kind, json.loads(data)) for kind, data in self._events()]
        intents = {data["id"]: data for kind, data in records if kind == "intent"}
        for node in self.nodes.lab.nodes:
            self.journalled |= {log.move for log in Journal(self.nodes.lab.layout.state / node).all()}
        allowed = {attempt_id(move, attempt) for move in intents for attempt in range(ATTEMPTS)}
        if unknown := self.journalled - allowed:
            raise Broken(f"moves without a recorded intent: {', '.join(sorted(unknown))}\n{self._tail()}")
        for move, data in intents.items():
            if not (data["reason"] and data["cause"]):
                raise Broken(f"the move {move} has no recorded reason: {data}")
        self.moves = len(intents)
        for rank, place in recorded_places(records).items():
            self._compare(rank, place)

    def _events(self) -> list[tuple[Any, ...]]:
        return self.pilot.rows("SELECT kind, data FROM events WHERE kind IN ('intent', 'result') ORDER BY id")

    def _compare(self, rank_uid: str, place: str) -> None:
        for job in self.jobs.values():
            for rank in range(0 if job.ended() else len(job.ranks)):
                if rank_uid.startswith(f"{job.name}-{rank}-") and job.places(rank) != [place]:
                    raise Broken(f"the record says that {rank_uid} is on {place}; it is on {job.places(rank)}")

    def _tail(self) -> str:
        log = self.nodes.folder / "autopilot.log"
        return "--- the autopilot\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def recorded_places(records: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """Where the record says that ranks are, by uid. Raises Broken if it contradicts itself: a rank that has two moves in
    progress, a move with two results, or a rank that is moved from where it is not."""
    places: dict[str, str] = {}
    in_progress: dict[str, dict[str, Any]] = {}  # by rank
    intents: dict[str, dict[str, Any]] = {}
    for kind, data in records:
        if kind == "intent":
            rank = data["rank_uid"]
            if rank in in_progress:
                raise Broken(f"{data['id']} was intended while {in_progress[rank]['id']} of {rank} was in progress")
            if places.get(rank, data["source"]) != data["source"]:
                raise Broken(f"{data['id']} moves {rank} from {data['source']}, and it was moved to {places[rank]}")
            in_progress[rank] = intents[data["id"]] = data
            places[rank] = data["source"]
        else:
            rank = intents[data["id"]]["rank_uid"]
            if in_progress.pop(rank, {}).get("id") != data["id"]:
                raise Broken(f"{data['id']} has a second result: {data}")
            if data["state"] == "moved":
                places[rank] = intents[data["id"]]["target"]
            elif data["state"] == "lost":
                places.pop(rank)
    return places
