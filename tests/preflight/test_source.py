"""Every check of the source, on a real process that has the feature."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from snapshotd import preflight
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight.file_checks import deleted_files
from snapshotd.preflight.objects import Kind, Object
from snapshotd.preflight.source import GPU_CHECKS, NCCL_CHECKS, SOURCE_CHECKS
from snapshotd.preflight.target import GPU_CHECKS as TARGET_GPU_CHECKS
from snapshotd.preflight.target import TARGET_CHECKS
from snapshotd.preflight.verdict import guarded, passed
from tests.preflight.conftest import Starter

FORK = """
if (child := os.fork()) == 0:
    wait(); os._exit(0)
pids.append(child)
"""

REFUSED = {
    "packet": ("a = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)", "other-sockets", "PACKET"),
    "io-uring": (
        (
            "params = ctypes.create_string_buffer(120)\n"
            "if libc.syscall(425, 4, params) < 0: sys.exit('skip: io_uring is disabled')"
        ),
        "io-uring",
        r"fd \d+: anon_inode:\[io_uring\]",
    ),
    "userfaultfd": (
        (
            "number = {'x86_64': 323, 'aarch64': 282}.get(os.uname().machine)\n"
            "if not number or libc.syscall(number, 1) < 0: sys.exit('skip: no userfaultfd')"
        ),
        "kernel-objects",
        r"anon_inode:\[userfaultfd\]",
    ),
    "pidfd-outside": ("a = os.pidfd_open(os.getppid())", "kernel-objects", "pidfd"),
    "namespace-handle": ("a = os.open('/proc/self/ns/net', os.O_RDONLY)", "kernel-objects", r"net:\[\d+\]"),
    "device": ("a = os.open('/dev/kmsg', os.O_RDONLY)", "devices", "/dev/kmsg"),
    "sysv-memory": (
        (
            "libc.shmat.restype = ctypes.c_void_p\n"
            "key = libc.shmget(0, 4096, 0o1600)\n"
            "libc.shmat(key, None, 0); libc.shmctl(key, 0, None)"
        ),
        "sysv-memory",
        "/SYSV00000000",
    ),
    "other-names": (
        (
            "import tempfile; d = tempfile.TemporaryDirectory(); f = open(d.name + '/a', 'w')\n"
            "os.mkdir(d.name + '/b'); os.link(d.name + '/a', d.name + '/b/a'); os.unlink(d.name + '/a')"
        ),
        "deleted-files",
        r"/a \(deleted\)",
    ),
    "no-utf8": (
        "import tempfile; d = tempfile.TemporaryDirectory(); f = open(os.fsencode(d.name) + b'/\\xff', 'w')",
        "open-files",
        r"not UTF-8.*\\udcff",
    ),
    "proc-of-outsider": ("f = open(f'/proc/{os.getppid()}/status')", "open-files", "/proc/"),
    "stray": (
        (
            "r, w = os.pipe()\n"
            "if os.fork() == 0:\n"
            "    if os.fork() == 0:\n"
            "        os.setsid(); os.write(w, b'%d' % os.getpid()); wait()\n"
            "    os._exit(0)\n"
            "os.wait(); pids.append(int(os.read(r, 20)))"
        ),
        "process-tree",
        r"python\S* \(pid \d+\)",
    ),
    "mount-namespace": ("assert libc.unshare(0x20000) == 0", "namespaces", "mnt"),
    "host-namespace": ("assert libc.unshare(0x4000000) == 0", "namespaces", "uts"),
    "chroot": ("os.chroot('/usr')", "root-directory", "/usr"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(rank: Starter, case: str) -> None:
    code, name, pattern = REFUSED[case]
    _, checks = rank(code).inspect()
    assert checks[name].verdict == Check.REFUSE
    assert re.search(pattern, checks[name].reason), checks[name].reason
    assert checks[name].remedy


MOVES = {
    "nothing": "",
    "children": FORK,
    "zombie": "if os.fork() == 0: os._exit(0)\npids.append(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid)",
    "unlinked": "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x'); f.flush()",
    "memory": "import mmap; a = os.memfd_create('a'); b = mmap.mmap(-1, 4096); os.truncate(a, 4096)",
    "events": "import select; a = libc.eventfd(0, 0); b = select.epoll(); c = libc.timerfd_create(1, 0);"
    " d = libc.inotify_init(); e = os.pidfd_open(os.getpid())",
    "unix-inside": "a, b = socket.socketpair()\n" + FORK,
    "pipe-inside": "a, b = os.pipe()\n" + FORK,
    "netlink": "a = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "harmless-devices": "a = [os.open('/dev/' + name, os.O_RDWR) for name in ('null', 'zero', 'full', 'urandom')]",
    "own-terminal": "a, b = os.openpty()",
    "proc": "a = open('/proc/self/status'); b = open('/proc/stat'); c = open('/sys/kernel/uevent_seqnum')",
    "lock": "import fcntl, tempfile; f = tempfile.NamedTemporaryFile(); fcntl.flock(f, fcntl.LOCK_EX)",
}


@pytest.mark.parametrize("case", MOVES)
def test_movable_features_pass(rank: Starter, case: str) -> None:
    facts, checks = rank(MOVES[case]).inspect()
    assert [check for check in checks.values() if check.verdict != Check.PASS] == []
    assert facts.memory_bytes > 0
    assert facts.files


def test_all_checks_run_and_are_described(rank: Starter) -> None:
    _, checks = rank().inspect()
    assert list(checks) == [*SOURCE_CHECKS, "facts"]
    described = set(re.findall(r"^([a-z][a-z-]+)  +\S", preflight.__doc__ or "", re.MULTILINE))
    more = {"facts", "closed-files", "new-files", "gpu-offload-room", *GPU_CHECKS, *TARGET_GPU_CHECKS, *NCCL_CHECKS}
    suspended = {"job-coordinator"}
    restored = {"image-content", "image-credentials", "image-priorities", "restored-files", "file-rights"}
    assert described == {*SOURCE_CHECKS, *TARGET_CHECKS, *more, *suspended, *restored}


def test_unix_socket_to_an_outsider_is_refused(rank: Starter, tmp_path: Path) -> None:
    server = rank(f"a = socket.socket(socket.AF_UNIX); a.bind('{tmp_path}/s'); a.listen()")
    client = rank(f"a = socket.socket(socket.AF_UNIX); a.connect('{tmp_path}/s')")
    _, checks = client.inspect()
    for accepted in (False, True):
        if accepted:
            server.then("b = a.accept()")
            _, checks = client.inspect()
        assert checks["unix-sockets"].verdict == Check.REFUSE
        assert f"{tmp_path}/s of python" in checks["unix-sockets"].reason
        assert f"(pid {server.pid})" in checks["unix-sockets"].reason


def test_listening_unix_socket_passes_under_carry_paths(rank: Starter, tmp_path: Path) -> None:
    server = rank(f"a = socket.socket(socket.AF_UNIX); a.bind('{tmp_path}/s'); a.listen()")
    facts, checks = server.inspect()
    assert checks["unix-sockets"].verdict == Check.PASS
    assert str(tmp_path) in facts.directories
    assert str(tmp_path) in [fact.path for fact in facts.files if fact.carried]
    _, checks = server.inspect(carry_paths=["/dev/shm"])
    assert checks["unix-sockets"].verdict == Check.WARN


def test_unix_socket_inherited_by_an_outsider_is_refused(rank: Starter) -> None:
    child = rank("a, b = socket.socketpair()\n" + FORK)
    child.pids.pop()  # the forked child counts as a stranger now
    _, checks = child.inspect()
    assert checks["unix-sockets"].verdict == Check.REFUSE
    assert "also open in" in checks["unix-sockets"].reason


def test_memory_shared_with_an_outsider_is_refused(rank: Starter) -> None:
    name = f"/dev/shm/preflight-test-{os.getpid()}"
    code = f"import mmap; f = open('{name}', 'r+b'); m = mmap.mmap(f.fileno(), 4096); f.close()"
    Path(name).write_bytes(bytes(4096))
    try:
        child = rank(code)
        facts, checks = child.inspect()
        assert checks["shared-memory"].verdict == Check.PASS
        assert [fact.path for fact in facts.files if fact.carried and fact.mapped] == [name]
        outsider = rank(code)
        _, checks = child.inspect()
        assert checks["shared-memory"].verdict == Check.REFUSE
        assert f"(pid {outsider.pid}) maps it" in checks["shared-memory"].reason
    finally:
        Path(name).unlink()


def test_renamed_file_shared_with_an_outsider_is_warned_about(rank: Starter, tmp_path: Path) -> None:
    """The outsider has it open by the name under which it is moved."""
    child = rank(f"f = open('{tmp_path}/a', 'w'); os.link('{tmp_path}/a', '{tmp_path}/b'); os.unlink('{tmp_path}/a')")
    assert child.inspect()[1]["shared-memory"].verdict == Check.PASS
    outsider = rank(f"f = open('{tmp_path}/b')")
    _, checks = child.inspect()
    assert checks["shared-memory"].verdict == Check.WARN
    assert f"(pid {outsider.pid}) has it open" in checks["shared-memory"].reason
    assert child.inspect(carry_paths=[])[1]["deleted-files"].verdict == Check.REFUSE


def test_node_local_log_shared_with_an_outsider_is_warned_about(rank: Starter, tmp_path: Path) -> None:
    code = f"f = open('{tmp_path}/log', 'a')"
    child = rank(code)
    rank(code)
    _, checks = child.inspect()
    assert checks["shared-memory"].verdict == Check.WARN
    assert "has it open" in checks["shared-memory"].reason
    _, checks = child.inspect(carry_paths=[])  # not node-local: appending is no obstacle
    assert checks["shared-memory"].verdict == Check.PASS


@pytest.mark.parametrize("kind", ["pipe", "fifo"])
def test_pipe_to_an_outsider_is_refused(rank: Starter, tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        read, write = os.pipe()
        child, outsider = rank(pass_fds=[read]), rank(pass_fds=[write])
        os.close(read)
        os.close(write)
    else:
        os.mkfifo(tmp_path / "fifo")
        code = f"a = os.open('{tmp_path}/fifo', os.O_RDWR)"
        child, outsider = rank(code), rank(code)
    _, checks = child.inspect()
    assert checks["pipes"].verdict == Check.REFUSE
    assert f"(pid {outsider.pid})" in checks["pipes"].reason


def test_terminal_of_an_outsider_is_refused(rank: Starter) -> None:
    master, slave = os.openpty()
    try:
        child = rank(pass_fds=[slave])
        stranger = rank()
        assert child.inspect()[1]["terminals"].verdict == Check.PASS
        checks = child.inspect(keeper_pid=stranger.pid)[1]
        assert checks["terminals"].verdict == Check.REFUSE
        assert "/dev/pts/" in checks["terminals"].reason
    finally:
        os.close(master)
        os.close(slave)


def test_attached_debugger_is_refused(rank: Starter) -> None:
    child = rank()
    tracer = rank(f"assert libc.ptrace(0x4206, {child.pid}, 0, 0) == 0")  # PTRACE_SEIZE
    _, checks = child.inspect()
    assert checks["tracing"].verdict == Check.REFUSE
    assert f"(pid {tracer.pid})" in checks["tracing"].reason


def test_stopped_process_is_warned_about(rank: Starter) -> None:
    child = rank()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert child.inspect()[1]["stopped"].verdict == Check.WARN


def test_rank_that_does_not_lead_its_session_is_refused(rank: Starter) -> None:
    _, checks = rank(session=False).inspect()
    assert checks["session"].verdict == Check.REFUSE
    assert "does not lead its session" in checks["session"].reason


def test_rank_without_a_keeper_is_refused(rank: Starter) -> None:
    child = rank()
    assert "migrator run" in child.inspect(keeper_pid=0)[1]["keeper"].remedy
    for keeper_pid in (0, 1):
        assert child.inspect(keeper_pid=keeper_pid)[1]["keeper"].verdict == Check.REFUSE


def test_namespaces_are_accepted_only_from_a_guest_keeper(rank: Starter) -> None:
    """A rank that was moved here is in its keeper's namespaces. Namespaces that a user created are refused."""
    keeper = rank(
        "assert libc.unshare(0x20000) == 0\n"
        "ready = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    os.setsid(); os.write(ready[1], b'x'); wait(); os._exit(0)\n"
        "os.read(ready[0], 1); pids = [child]"
    )
    _, checks = keeper.inspect(keeper_pid=keeper.pid, keeper_is_guest=True)
    assert [check for check in checks.values() if check.verdict == Check.REFUSE] == []
    _, checks = keeper.inspect(keeper_pid=keeper.pid, keeper_is_guest=False)
    assert checks["namespaces"].verdict == Check.REFUSE


@pytest.mark.parametrize(("version", "verdict"), [("4.1", Check.REFUSE), ("", Check.REFUSE), ("4.2", Check.PASS)])
def test_old_or_unknown_criu_is_refused(rank: Starter, version: str, verdict: Check.Verdict.ValueType) -> None:
    assert rank().inspect(criu_version=version)[1]["criu"].verdict == verdict


def test_rank_that_has_ended_is_refused(rank: Starter) -> None:
    child = rank()
    child.process.kill()
    child.process.wait()
    _, checks = child.inspect()
    assert list(checks) == ["rank-alive"]
    assert checks["rank-alive"].verdict == Check.REFUSE


def test_process_that_ends_during_the_inspection_is_ignored(rank: Starter) -> None:
    child, gone = rank(), rank()
    gone.process.kill()
    gone.process.wait()
    child.pids.append(gone.pid)
    _, checks = child.inspect()
    assert [check for check in checks.values() if check.verdict == Check.REFUSE] == []


def test_failing_check_refuses() -> None:
    def broken() -> Check:
        raise KeyError("\udcff")

    check = guarded("some-name", broken)
    assert (check.name, check.verdict) == ("some-name", Check.REFUSE)
    assert "KeyError" in check.reason
    assert guarded("some-name", passed, "some-name", "fine").verdict == Check.PASS


class Process(NamedTuple):
    user_id: int
    cwd: str = "/"


@pytest.mark.parametrize(
    ("owner", "user", "verdict"), [(0, 1500, Check.REFUSE), (1500, 1500, Check.PASS), (1500, 0, Check.PASS)]
)
def test_removed_files_of_other_users_are_refused_before_the_freeze(
    owner: int, user: int, verdict: Check.Verdict.ValueType
) -> None:
    """An upgrade replaces libraries of root, and the target lets no user's rank make files of root."""
    about = os.stat_result((0o100755, 1, 1, 0, owner, owner, 1, 0, 0, 0))
    process: Any = Process(user)
    library = Object(Kind.GHOST, "/opt/lib.so (deleted)", about, mapped=True, holders={process: -1})
    seen: Any = SimpleNamespace(
        survey=SimpleNamespace(nameless=()),
        tree=SimpleNamespace(alive=[process]),
        of_kind=lambda _: [library],
        objects=[],
    )
    found = deleted_files(seen)
    assert found.verdict == verdict
    assert ("/opt/lib.so" in found.reason) == (verdict == Check.REFUSE)
