"""Processes that end while a rank is looked at: programs that live for milliseconds are no reason to refuse a move."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.snapshotd_pb2 import Check, RankFacts
from snapshotd.moves.source import inspection as source_inspection
from snapshotd.preflight.inspection import LOOKS, Inspection, examined
from snapshotd.preflight.verdict import passed, refused
from snapshotd.proc import comm
from tests.preflight.conftest import Starter
from tests.preflight.ranks import Child

FORKS = """
for _ in range(3):
    if (child := os.fork()) == 0:
        wait(); os._exit(0)
    pids.append(child)
"""


def end_one(child: Child) -> None:
    """Ends a forked child and has its parent reap it."""
    pid = child.pids.pop()
    os.kill(pid, signal.SIGKILL)
    child.then(f"os.waitpid({pid}, 0)")


def test_check_is_repeated_without_the_process_that_ended(rank: Starter) -> None:
    child = rank(FORKS)
    seen = Inspection(list(child.pids), child.pid, [])
    looks = []

    def check(rank: Inspection) -> Check:
        processes = [process.pid for process in rank.tree.alive]
        looks.append(len(processes))
        if len(looks) <= 2:
            end_one(child)
        for pid in processes:
            comm.read(pid)
        return passed("threads", "looked at all")

    assert examined("threads", check, seen).verdict == Check.PASS
    assert looks == [4, 3, 2]


def test_refusal_does_not_count_if_a_process_has_ended_meanwhile(rank: Starter) -> None:
    """One that is just ending has no namespaces and no descriptors, which looks like a reason to refuse."""
    child = rank(FORKS)
    seen = Inspection(list(child.pids), child.pid, [])
    looks = []

    def check(rank: Inspection) -> Check:
        looks.append(len(rank.tree.alive))
        if len(looks) == 1:
            os.kill(child.pids.pop(), signal.SIGKILL)  # not reaped: a zombie
            child.then("os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)")
        return refused("namespaces", "other namespaces", "") if len(looks) <= 2 else passed("namespaces", "the same")

    assert examined("namespaces", check, seen).verdict == Check.REFUSE  # the second time, with every process alive
    assert looks == [4, 3]


def test_check_that_never_succeeds_refuses(rank: Starter) -> None:
    looks = []

    def check(rank: Inspection) -> Check:
        looks.append(rank)
        raise FileNotFoundError("/proc/1/task/1")

    verdict = examined("some-name", check, Inspection([], rank().pid, []))
    assert (verdict.name, verdict.verdict) == ("some-name", Check.REFUSE)
    assert len(looks) == LOOKS + 1


def test_rank_that_starts_programs_all_the_time_passes_every_check(rank: Starter) -> None:
    child = rank(
        "import subprocess, threading\n"
        "def start():\n"
        "    while True: subprocess.run(['/bin/sleep', '0.05'])\n"
        "for _ in range(4): threading.Thread(target=start, daemon=True).start()"
    )

    def look() -> tuple[dict[str, str], bool]:
        """What is refused, and whether processes began or ended meanwhile."""
        child.pids[1:] = _children(child.pid)
        facts, checks = child.inspect()
        assert len({fact.path for fact in facts.files}) == len(facts.files)
        found = {name: check.reason for name, check in checks.items() if check.verdict == Check.REFUSE}
        return found, child.pids[1:] != _children(child.pid)

    for _ in range(20):
        found, changed = look()
        for _ in range(source_inspection.LOOKS - 1):  # as the daemon does
            if found and changed:
                found, changed = look()
        # A process between fork and exec shares its parent's descriptors, so nothing but its end can be noticed.
        assert found == {}


def _children(pid: int) -> list[int]:
    """Not /proc/PID/task/TID/children, which some kernels lack."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found.append(int(entry))
    return found


@pytest.mark.parametrize(
    ("lists", "looks"),
    [
        ([[1, number] for number in range(100, 200)], source_inspection.LOOKS),
        ([[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]], 2),
        ([[1, 2], [1, 2]], 1),
    ],
    ids=["began and ended", "began", "neither"],
)
async def test_rank_is_looked_at_again_if_its_processes_changed_during_a_refused_look(
    monkeypatch: pytest.MonkeyPatch, lists: list[list[int]], looks: int
) -> None:
    count = 0

    async def look(node: Any, entry: Any, pids: list[int], *, moves: bool) -> source_inspection.Looked:
        nonlocal count
        count += 1
        return source_inspection.Looked(RankFacts(), [refused("process-tree", "no parent", "")])

    monkeypatch.setattr(source_inspection, "_look", look)
    group = SimpleNamespace(pids=lambda: lists.pop(0))
    entry: Any = SimpleNamespace(group=group)
    none: Any = None
    checks = (await source_inspection.look(none, entry, moves=True)).checks
    assert (count, len(checks)) == (looks, 1)
