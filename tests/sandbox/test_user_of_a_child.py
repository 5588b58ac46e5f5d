"""A child that works for a user is not that user's to stop, limit or delay; and it changes no other process either."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.files.as_user import User, UserFiles
from snapshotd.proc import foreign_memory, stat
from snapshotd.sandbox.privileges import Ids
from tests.sandbox.children import USER, attempts, denied, needs_seccomp, root

WORKS_FOR = User(1500, 1500, (1502,))
NOBODY = "65534"

#: Tries everything that the kernel allows among processes of one user, and prints what succeeded.
HOSTILE = """
import ctypes, json, os, resource, signal, sys
os.setgroups([]); os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3)
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def ioprio():
    if libc.syscall(251 if os.uname().machine == "x86_64" else 30, 1, pid, 3 << 13) < 0:
        raise OSError(ctypes.get_errno(), "ioprio_set")

def attach():
    if libc.ptrace(16, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

tries = {
    "look": lambda: os.kill(pid, 0),
    "stop": lambda: os.kill(pid, signal.SIGSTOP),
    "pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGSTOP),
    "limit": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
    "address space": lambda: resource.prlimit(pid, resource.RLIMIT_AS, (4096, 4096)),
    "cpus": lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}),
    "idle": lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "disk": ioprio,
    "attach": attach,
    "descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
}
done = []
for name, act in tries.items():
    try:
        act()
        done.append(name)
    except PermissionError:
        pass
print(json.dumps(done))
"""


def hostile(pid: int) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-I", "-c", HOSTILE, str(pid)], check=True, stdout=subprocess.PIPE, timeout=60
    )
    done: list[str] = json.loads(ran.stdout)
    return done


@contextlib.contextmanager
def users_process() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"], user=1500, group=1500, extra_groups=[])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@root
def test_user_does_all_that_to_a_process_of_its_own() -> None:
    """Otherwise the next tests would show nothing."""
    with users_process() as pid:
        done = hostile(pid)
    assert {"look", "stop", "pidfd", "limit", "address space", "cpus", "idle", "nice"} <= set(done)


@root
@pytest.mark.parametrize("write", [(), ("/tmp",)], ids=["looking", "placing"])
def test_user_can_do_nothing_to_its_file_worker(write: tuple[str, ...]) -> None:
    with UserFiles(WORKS_FOR, write=write) as files:
        assert hostile(files._child.pid) == []
        files.ask("folder", root="/", path="tmp") if not write else files.ask("folder", root="/tmp", path="")


@root
def test_user_can_do_nothing_to_its_memory_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    children = foreign_memory._Children()
    monkeypatch.setattr(foreign_memory, "_children", children)
    with users_process() as pid:
        assert foreign_memory.read_file(pid, "cmdline") == b"sleep\x00600\x00"
        (reader,) = children._idle
        assert reader.ids == Ids(1500, 1500)
        assert hostile(reader._child.pid) == []
        assert foreign_memory.read_file(pid, "cmdline") == b"sleep\x00600\x00"
        assert children._idle == [reader], "it is the same one"
    children.close()


@root
@pytest.mark.parametrize("profile", ["FILES", "LOOK", "MEMORY"])
def test_child_has_the_user_s_id_for_files_alone(profile: str, place: Path) -> None:
    own, other = place / "own", place / "other"
    for path, user_id in ((own, 1500), (other, 1501)):
        path.write_text("x")
        path.chmod(0o600)
        os.chown(path, user_id, user_id)
    read = [["read", str(own)], ["read", str(other)]]
    tried = attempts(read, profile, ids=USER, write=[str(place)])
    assert tried.results == [0, 13]
    assert tried.fields["Uid"] == [NOBODY] * 3 + ["1500"]
    assert (tried.fields["Gid"], tried.fields["Groups"]) == (["1500"] * 4, ["1502"])


#: Each of these would succeed, or fail with another error, where nothing denies it.
NO_OTHER: list[list[Any]] = [
    *(["call", name, 0] for name in ("setuid", "setgid", "setfsuid", "setfsgid")),
    *(["call", name, -1, 0] for name in ("setreuid", "setregid")),
    *(["call", name, -1, -1, 0] for name in ("setresuid", "setresgid")),
    ["call", "setgroups", 0, 0],
    ["call", "capset", 0, 0],
    ["call", "sched_setaffinity", 0, 8, 0],
    ["call", "sched_setscheduler", 0, 0, 0],
    ["call", "sched_setparam", 0, 0],
    ["call", "sched_setattr", 0, 0, 0],
    ["call", "setpriority", 0, 0, 19],
    ["call", "ioprio_set", 1, 0, 0],
    ["call", "process_madvise", -1, 0, 0, 0, 0],
    ["call", "process_mrelease", -1, 0],
]


@root
@needs_seccomp
@pytest.mark.parametrize("profile", ["NETWORK", "FILES", "LOOK", "MEMORY", "PARSER", "TRACKER", "COPIER", "STRIPE"])
def test_child_changes_neither_its_ids_nor_the_scheduling_of_others(profile: str) -> None:
    results = attempts(NO_OTHER, None).results
    assert 1 not in results, "nothing of this fails with EPERM by itself"
    denied(NO_OTHER, "filter only", rules=profile)


@root
def test_worker_that_was_stopped_by_root_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of time holds, whatever delays it."""
    with users_process() as pid:
        children = foreign_memory._Children()
        monkeypatch.setattr(foreign_memory, "_children", children)
        foreign_memory.read_file(pid, "cmdline")
        (reader,) = children._idle
        os.kill(reader._child.pid, signal.SIGSTOP)
        with pytest.raises(Exception, match="did not answer within"):
            foreign_memory.read_file(pid, "cmdline", 0.2)
        assert stat.read(pid).state == "S"
        children.close()
