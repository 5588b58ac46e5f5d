"""What processes have of priorities and limits, and what a node grants to a user's rank."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.proc import oom_score, priorities
from snapshotd.proc.priorities import UNLIMITED, Priorities
from tests.preflight.conftest import Starter, rank

__all__ = ["rank"]
USER = 1500
AS_USER = f"os.setgroups([]); os.setresgid(*[{USER}] * 3); os.setresuid(*[{USER}] * 3)"


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user cannot be started without root")
def test_what_a_process_has_is_the_highest_of_its_threads(rank: Starter) -> None:
    child = rank(
        "import resource, threading\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))\n"
        "def work(): os.setpriority(os.PRIO_PROCESS, 0, -3); started.release(); gate2.acquire()\n"
        "started, gate2 = threading.Semaphore(0), threading.Semaphore(0)\n"
        "threading.Thread(target=work, daemon=True).start(); started.acquire()\n"
        "os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(7))"
    )
    found = priorities.read(child.pid)
    assert (found.nice, found.realtime, found.limits["nofile"]) == (-3, 7, 128)
    assert found.limits.keys() == priorities.granted().limits.keys()
    child.then("os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    assert priorities.read(child.pid).realtime == 0


def test_unlimited_limits_are_read() -> None:
    """As on nodes whose users may lock memory for InfiniBand."""
    lines = [
        "Limit                     Soft Limit           Hard Limit           Units     ",
        "Max cpu time              unlimited            unlimited            seconds   ",
        "Max processes             unlimited            unlimited            processes ",
        "Max open files            1024                 1048576              files     ",
        "Max locked memory         unlimited            unlimited            bytes     ",
        "Max pending signals       8388608              unlimited            signals   ",
        "Max msgqueue size         819200               819200               bytes     ",
        "Max nice priority         0                    40                   ",
        "Max realtime priority     0                    99                   ",
        "Max realtime timeout      unlimited            unlimited            us        ",
    ]
    some = {"nofile": 1 << 20, "msgqueue": 819200, "nice": 40, "rtprio": 99}
    unlimited = dict.fromkeys(("nproc", "memlock", "sigpending"), UNLIMITED)
    assert priorities.hard_limits("\n".join(lines) + "\n") == some | unlimited


def test_this_process_has_what_its_descendants_are_granted() -> None:
    assert priorities.beyond(priorities.read(os.getpid()), priorities.granted()) == []


@pytest.mark.parametrize(
    ("limit_nice", "limit_rtprio", "grant"), [(0, 0, (0, 0)), (25, 10, (-5, 10)), (-1, -1, (-20, 99)), (10, 0, (0, 0))]
)
def test_limits_of_the_daemon_are_the_grant(
    limit_nice: int, limit_rtprio: int, grant: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = {resource.RLIMIT_NICE: limit_nice, resource.RLIMIT_RTPRIO: limit_rtprio}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (0, hard.get(number, resource.RLIM_INFINITY)))
    found = priorities.granted()
    assert (found.nice, found.realtime, found.limits["memlock"]) == (*grant, UNLIMITED)


def test_what_exceeds_the_grant_is_named() -> None:
    grant = Priorities(nice=0, realtime=0, limits={"memlock": 1 << 20, "nofile": 1024})
    assert priorities.beyond(Priorities(5, 0, {"memlock": 1 << 20, "nofile": 1}), grant) == []
    assert priorities.beyond(Priorities(-5, 3, {"memlock": UNLIMITED, "nofile": 1025, "unknown": 1}), grant) == [
        "nice -5 (at least 0)",
        "real-time priority 3 (at most 0)",
        "limit memlock unlimited (at most 1048576)",
        "limit nofile 1025 (at most 1024)",
        "limit unknown 1 (at most 0)",
    ]


def negative_score_is_possible() -> bool:
    """Root needs CAP_SYS_RESOURCE for it, which it lacks in many containers."""
    code = "import pathlib; pathlib.Path('/proc/self/oom_score_adj').write_text('-1')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_user_is_not_spared_when_memory_runs_out(rank: Starter) -> None:
    if not negative_score_is_possible():
        pytest.skip("needs CAP_SYS_RESOURCE")
    mine, roots = rank(AS_USER), rank()
    for child in (mine, roots):
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("-500")
    oom_score.spare_no_user([mine.pid, roots.pid, 2**22 - 1])
    assert (oom_score.read(mine.pid), oom_score.read(roots.pid)) == (0, -500)


def test_score_that_a_user_can_have_stays(rank: Starter) -> None:
    child = rank(AS_USER)
    Path(f"/proc/{child.pid}/oom_score_adj").write_text("300")
    oom_score.spare_no_user([child.pid])
    assert oom_score.read(child.pid) == 300
