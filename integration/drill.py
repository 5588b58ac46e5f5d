"""Runs drills: one small job and one move during which something fails.

Every drill ends with the same checks, whatever was killed: no step of the job ran twice or was skipped (the witness file),
its output is that of an uninterrupted run, a plain retry succeeds, and nothing is left on any node: no image, no cgroup
of criu or of a rank, no frozen cgroup, no process, no unfinished move.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.harness import (
    PATIENCE_S,
    SHORT_LEASE,
    WORKLOADS,
    Cluster,
    Job,
    everything_below,
    processes_of,
    until,
)
from snapshotd.moves.journal import Journal, MoveLog
from snapshotd.runtime.faults import Point

SOURCE, TARGET, OTHER = "node-1", "spare-1", "node-2"
#: Outcome in the answer of `migrator move --json`, and exit code.
MOVED, UNDONE, UNKNOWN, GONE = ("moved", 0), ("undone", 11), ("unknown", 13), ("undone", 21)


@dataclass(frozen=True)
class Result:
    """The result of `migrator move`."""

    code: int
    answer: dict[str, Any]
    errors: str

    @property
    def verdict(self) -> tuple[str, int]:
        return self.answer.get("outcome", self.answer.get("error", "")), self.code


class Drill:
    def __init__(self, nodes: Cluster) -> None:
        self.nodes, self.lab = nodes, nodes.lab
        self.witness = nodes.folder / f"witness-{time.monotonic_ns()}"
        self.job: Job = nodes.workload(SOURCE, "chain.py", "--witness", str(self.witness))
        self.keeper = self.job.process
        self.asked: subprocess.Popen[str] | None = None
        self.job.await_lines(3)

    # ------------------------------------------------------------------ a move during which something fails

    def arm(self, node: str, point: str, action: str) -> None:
        self.nodes.fault(node, point, action)

    def ask(self, *more: str, to: str = TARGET) -> subprocess.Popen[str]:
        """Starts `migrator move` in the background."""
        self.asked = self.nodes.begin_move(self.job, to, more=(*SHORT_LEASE, *more))
        return self.asked

    def reached(self, node: str) -> None:
        """Waits until the armed fault of a node has occurred."""
        until(f"the fault of {node}\n{self.nodes.logs()}", lambda: self.nodes.fired(node) or self._ended_early())

    def _ended_early(self) -> bool:
        if self.asked is None or self.asked.poll() is None:
            return False
        out, errors = self.asked.communicate()
        raise AssertionError(f"the move ended before the fault\n{out}{errors}\n{self.nodes.logs()}")

    def go_on(self, node: str, point: str) -> None:
        """Lets a daemon that waits at a point continue."""
        (self.nodes.run_dir(node) / f"{point}.go").touch()

    @contextlib.contextmanager
    def waiting_at(self, node: str, point: str, *more: str) -> Iterator[None]:
        """A move that waits at a point while the block runs, and then continues (if that daemon still exists)."""
        self.arm(node, point, "wait")
        self.ask(*more)
        self.reached(node)
        yield
        with contextlib.suppress(FileNotFoundError, AssertionError):
            self.go_on(node, point)

    @contextlib.contextmanager
    def waiting_with_a_held_copy(self, point: Point) -> Iterator[None]:
        """A move whose source waits before COMMIT or at it, while the target holds its copy.

        The target's daemon is stopped while the block runs. Otherwise it asks the source itself when the driver is slow, and
        its copy may run before the block has done anything."""
        with self.waiting_at(SOURCE, Point.BEFORE_COMMIT):
            self.lab.kill_daemon(TARGET, signal.SIGSTOP)
            if point is Point.COMMIT:
                self.arm(SOURCE, point, "wait")
                self.go_on(SOURCE, Point.BEFORE_COMMIT)
                self.reached(SOURCE)
            yield
            self.lab.kill_daemon(TARGET, signal.SIGCONT)
            self.go_on(SOURCE, point)

    def kill_driver(self) -> None:
        assert self.asked is not None
        self.asked.kill()
        self.asked.wait(PATIENCE_S)
        for pipe in (self.asked.stdout, self.asked.stderr):
            if pipe is not None:
                pipe.close()

    def result(self, timeout_s: float = PATIENCE_S) -> Result:
        assert self.asked is not None
        try:
            out, errors = self.asked.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the move has not ended after {timeout_s} s\n{self.nodes.logs()}") from None
        return Result(self.asked.returncode, json.loads(out) if out else {}, errors)

    def expect(self, *verdicts: tuple[str, int], timeout_s: float = PATIENCE_S) -> Result:
        result = self.result(timeout_s)
        assert result.verdict in verdicts, f"{result}\n{self.nodes.logs()}"
        return result

    def bring_back(self, node: str) -> None:
        """Starts a daemon again that was killed."""
        until(f"the end of the daemon of {node}", lambda: self.lab.daemon_pid(node) is None)
        self.lab.start_daemon(node)

    def close(self) -> None:
        if self.asked is not None:
            self.kill_driver()
        self.witness.unlink(missing_ok=True)

    # ------------------------------------------------------------------ processes

    def copies(self) -> list[int]:
        return processes_of(str(self.witness))

    def copy_on(self, node: str) -> int:
        """The job's process on a node."""
        return next(pid for pid in self.copies() if node_of(pid) == node)

    def place(self) -> str:
        """The only node that has a copy."""
        places = [node_of(pid) for pid in self.copies()]
        assert len(places) == 1, f"copies on {places}\n{self.nodes.logs()}"
        return places[0]

    def guest_keeper(self, node: str) -> int:
        """The guest keeper of the job's process on a node: its parent."""
        stat = Path(f"/proc/{self.copy_on(node)}/stat").read_text().rpartition(")")[2].split()
        return int(stat[1])

    def moves(self) -> dict[str, list[MoveLog]]:
        """The journals of all nodes, read from disk."""
        state = self.lab.layout.state
        return {node: Journal(state / node).all() for node in self.lab.nodes}

    def move_id(self) -> str:
        return max((log for logs in self.moves().values() for log in logs), key=lambda log: log.begin.begun_unix_s).move

    # ------------------------------------------------------------------ afterwards

    def settled(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until no daemon has an unfinished move."""

        def unfinished() -> list[str]:
            found = []
            for node, logs in self.moves().items():
                found += [f"{node} {log.move} {log.last_mark}" for log in logs if not log.ended_unix_s]
            return found

        _until_none("unfinished moves", unfinished, self.nodes.logs, timeout_s)

    def goes_on(self) -> None:
        steps = self._steps()
        until(f"new steps of the job\n{self.nodes.logs()}", lambda: self._steps() > steps + 3)

    def runs_on(self, node: str) -> None:
        """The job makes progress on this node, and no other node has a copy."""
        self.goes_on()
        assert [node_of(pid) for pid in self.copies()] == [node], self.nodes.logs()

    def _steps(self) -> int:
        return self.witness.read_text().count("\n")

    def finish(self, at: str) -> None:
        """The job runs on `at`; a retry moves it elsewhere; it ends on SIGTERM; nothing was lost and nothing is left."""
        self.settled()
        self.runs_on(at)
        self.job.await_progress(2)
        self.nodes.move(self.job, TARGET if at != TARGET else OTHER)
        self.end()

    def end(self) -> None:
        self.job.await_progress(2)
        self.keeper.send_signal(signal.SIGTERM)
        self.ended()

    def ended(self) -> None:
        """The job, which got SIGTERM, has printed every line, and nothing is left."""
        assert self.job.finish() == 0, f"{self.job.text()[-200:]}\n{self.nodes.logs()}"
        lines = self.job.lines()
        command = [sys.executable, str(WORKLOADS / "chain.py"), "--steps", str(len(lines) - 1), "--pace-s", "0"]
        assert self.job.text() == subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self._no_step_twice()
        self.nothing_left()

    def end_orphan(self) -> None:
        """Ends a rank whose home keeper died with its node: no process gets its status, and nothing is left."""
        os.kill(self.copy_on(self.place()), signal.SIGTERM)
        until(f"the end of the rank\n{self.nodes.logs()}", lambda: not self.copies())
        self._no_step_twice()
        self.nothing_left()

    def _no_step_twice(self) -> None:
        seen = [int(line) for line in self.witness.read_text().split()]
        assert seen == list(range(len(seen))), f"a step ran twice or never\n{self.nodes.logs()}"

    def killed(self, status: int = -signal.SIGKILL) -> None:
        """The rank was killed: its launcher sees that, no copy runs on, and nothing is left."""
        try:
            assert self.job.finish() == status, self.nodes.logs()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the keeper has not ended\n{self.nodes.logs()}") from None
        self.settled()
        self._no_step_twice()
        self.nothing_left()

    def nothing_left(self) -> None:
        self.settled()
        _until_none("what is left", self._leftovers, self.nodes.logs)
        status = self.nodes.migrator("status", "--json")
        assert json.loads(status.stdout)["moves"] == [], status.stdout

    def _leftovers(self) -> list[str]:
        found = [f"process {pid}" for pid in self.copies()]
        for node in self.lab.nodes:
            images = self.nodes.run_dir(node) / "images"
            found += [f"{node} {path}" for path in everything_below(images) if path.name not in {"out", "sockets"}]
            group = self.lab.layout.node_cgroup(node)
            found += [f"{path}" for path in everything_below(group) if path.is_dir() and _is_of_a_move(path)]
        return found


def _is_of_a_move(group: Path) -> bool:
    """Whether it is a cgroup of criu or of a rank (`snapshotd-UID` at home, `UID-MOVE` as a guest), or frozen."""
    if group.name.startswith("criu-") or group.parent.name == "snapshotd-ranks":
        return True
    if group.name.startswith("snapshotd-") and group.name != "snapshotd-ranks":
        return True
    return "frozen 1" in (group / "cgroup.events").read_text()


def _until_none(
    what: str, find: Callable[[], list[str]], logs: Callable[[], str], timeout_s: float = PATIENCE_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while found := find():
        assert time.monotonic() < deadline, f"{what}: {found}\n{logs()}"
        time.sleep(0.02)


def node_of(pid: int) -> str:
    """The lab node of a process, from its cgroup: the host name of another UTS namespace cannot be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line.split("/")[2] if line.count("/") > 1 else ""
    return ""


def kill(pid: int) -> None:
    """Kills a process and waits for its end: until then it counts as alive, for the daemons too."""
    os.kill(pid, signal.SIGKILL)
    until(f"process {pid} to end", lambda: ended(pid))


def ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
