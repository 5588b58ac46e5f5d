"""The facts that the source gathers for the target, and the checks after the freeze."""

from __future__ import annotations

import _ctypes
import errno
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check, FileFact, RankFacts
from snapshotd.files.paths import open_regular
from snapshotd.preflight import Carried, compare_files, digest, list_carried, recheck, sync_files
from snapshotd.preflight.sockets import unix_sockets_of
from tests.descriptors import open_links
from tests.preflight.conftest import Starter
from tests.preflight.ranks import CARRY_PATHS

MIB = 1024 * 1024


def library(folder: Path) -> Path:
    """A shared object that can be mapped: a copy of one of Python's own."""
    folder.mkdir(parents=True)
    return Path(shutil.copy(_ctypes.__file__, folder / "library.so"))


def content_digest(path: str, size: int, deadline: float = float("inf")) -> bytes:
    handle = open_regular(path)
    try:
        return digest.content_digest(handle, size, deadline)
    finally:
        os.close(handle)


def by_path(facts: RankFacts) -> dict[str, FileFact]:
    return {fact.path: fact for fact in facts.files}


def test_mapped_node_local_library_is_carried_with_its_directories(rank: Starter, tmp_path: Path) -> None:
    path = library(tmp_path / "cache" / "ab")
    (tmp_path / "cache").chmod(0o750)
    facts, _ = rank(f"ctypes.CDLL('{path}')").inspect(carry_paths=[str(tmp_path)])
    carried = [fact for fact in facts.files if fact.carried]
    assert [fact.path for fact in carried] == [str(tmp_path / "cache"), str(tmp_path / "cache" / "ab"), str(path)]
    assert [stat.S_ISDIR(fact.mode) for fact in carried] == [True, True, False]
    assert stat.S_IMODE(carried[0].mode) == 0o750
    assert carried[2].mapped
    assert carried[2].digest  # the target may have the same file with another time
    assert facts.carried_bytes >= path.stat().st_size


def test_priorities_of_users_processes_are_facts(rank: Starter) -> None:
    as_user = "os.setgroups([]); os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3)"
    lower = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 4096))"
    facts, _ = rank(f"{lower}; os.setpriority(os.PRIO_PROCESS, 0, -4); {as_user}").inspect()
    assert (facts.priorities.nice, facts.priorities.realtime, facts.priorities.limits["memlock"]) == (-4, 0, 4096)
    facts, _ = rank("os.nice(-4)").inspect()
    assert not facts.HasField("priorities"), "root could set any"


def test_open_and_mapped_files_are_described(rank: Starter, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data" * 1000)
    child = rank(f"a = open('{tmp_path}/data'); b = open('{tmp_path}/log', 'a')")
    facts, _ = child.inspect(carry_paths=[])
    files = by_path(facts)
    data, log = files[f"{tmp_path}/data"], files[f"{tmp_path}/log"]
    assert (data.size, data.writable, data.mapped, data.carried) == (4000, False, False, False)
    assert data.mtime_ns == (tmp_path / "data").stat().st_mtime_ns
    assert data.digest == content_digest(f"{tmp_path}/data", 4000)
    assert log.writable
    assert not log.digest
    python = files[os.path.realpath(f"/proc/{child.pid}/exe")]
    assert python.mapped
    assert python.digest
    assert str(Path.cwd()) in facts.directories
    assert list(facts.user_ids) == [os.getuid()]
    assert (facts.processes, facts.threads) == (1, 1)


def test_memory_counts_each_object_once(rank: Starter, tmp_path: Path) -> None:
    plain, _ = rank().inspect()
    heavy, _ = rank(
        f"""
import mmap
own = bytearray(b"x") * {64 * MIB}
ghost = open("{tmp_path}/ghost", "w+b"); ghost.write(own[:{32 * MIB}]); ghost.flush(); os.unlink("{tmp_path}/ghost")
again = os.dup(ghost.fileno()); view = mmap.mmap(ghost.fileno(), 0)
shared = mmap.mmap(-1, {16 * MIB}); shared.write(own[:{16 * MIB}])
"""
    ).inspect()
    added = heavy.memory_bytes - plain.memory_bytes
    assert 112 * MIB <= added <= 120 * MIB + 48 * MIB  # slices above may leave their heap behind


def test_many_mappings_and_descriptors_are_fast_enough(rank: Starter) -> None:
    """1500 mappings and 300 descriptors take less than a second, and milliseconds after the freeze.

    CPU time is measured, so that other load on the machine does not matter."""
    child = rank(
        "import mmap, tempfile\n"
        "files = [tempfile.NamedTemporaryFile() for _ in range(300)]\n"
        "for file in files: file.truncate(8 * 4096)\n"
        "maps = [mmap.mmap(file.fileno(), 4096, offset=4096 * at) for file in files for at in range(0, 8, 2)]\n"
        "more = [mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ) for file in files]\n"
    )
    began = time.thread_time()
    facts, _ = child.inspect()
    assert time.thread_time() - began < 1.0
    began = time.thread_time()
    carried = list_carried(child.pids, CARRY_PATHS)
    assert time.thread_time() - began < 0.2
    assert [fact.path for fact in carried.facts] == [fact.path for fact in facts.files if fact.carried]
    assert len(carried.facts) >= 300


def test_carried_files_are_listed_again_after_the_freeze(rank: Starter, tmp_path: Path) -> None:
    child = rank("if (child := os.fork()) == 0: wait(); os._exit(0)\npids.append(child)")
    assert list_carried(child.pids, CARRY_PATHS).facts == []
    child.then(f"f = open('{tmp_path}/new', 'w')")
    assert f"{tmp_path}/new" in [fact.path for fact in list_carried(child.pids, CARRY_PATHS).facts]
    assert list_carried([], CARRY_PATHS) == Carried()


SEMAPHORE = "libc.sem_open.restype = ctypes.c_void_p\nsem = libc.sem_open(b'/{name}', os.O_CREAT | os.O_EXCL, 0o600, 1)"


def test_semaphore_is_moved_under_its_real_name(rank: Starter) -> None:
    """The kernel shows the temporary name under which sem_open creates it; a worker opens it by its real name."""
    name = f"preflight-test-{os.getpid()}"
    path = Path(f"/dev/shm/sem.{name}")
    worker = f"if (child := os.fork()) == 0: f = open('{path}', 'r+b'); wait()\npids.append(child)"
    try:
        child = rank(f"{SEMAPHORE.format(name=name)}\n{worker}")
        facts, checks = child.inspect()
        assert checks["deleted-files"].reason == "1 moved under another name"
        (fact,) = [fact for fact in facts.files if fact.path == str(path)]
        assert (fact.carried, fact.mapped, fact.writable, fact.size) == (True, True, True, 32)
        assert facts.carried_bytes == 32
        carried = list_carried(child.pids, CARRY_PATHS)
        ((removed, kept),) = carried.other_names.items()
        assert kept == str(path)
        assert re.fullmatch(r"/dev/shm/sem\.\w{6}", removed)
        assert [fact.path for fact in carried.facts].count(str(path)) == 1
    finally:
        path.unlink(missing_ok=True)


def test_other_name_that_is_in_use_is_preferred(rank: Starter, tmp_path: Path) -> None:
    child = rank(
        f"a = open('{tmp_path}/a', 'w'); os.link('{tmp_path}/a', '{tmp_path}/b'); os.link('{tmp_path}/a', '{tmp_path}/c')\n"
        f"c = open('{tmp_path}/c'); os.unlink('{tmp_path}/a')"
    )
    assert list_carried(child.pids, CARRY_PATHS).other_names == {f"{tmp_path}/a": f"{tmp_path}/c"}


def test_two_files_that_had_the_same_name_are_refused(rank: Starter, tmp_path: Path) -> None:
    child = rank(
        "def make(other):\n"
        f"    file = open('{tmp_path}/a', 'w')\n"
        f"    os.link('{tmp_path}/a', other); os.unlink('{tmp_path}/a')\n"
        "    return file\n"
        f"files = [make('{tmp_path}/b'), make('{tmp_path}/c')]"
    )
    assert child.inspect()[1]["deleted-files"].verdict == Check.REFUSE
    child.then("files.pop().close()")
    assert child.inspect()[1]["deleted-files"].verdict == Check.PASS


RECHECKED = {
    "b = os.open('/dev/kmsg', os.O_RDONLY)": "devices",
    "c = os.pidfd_open(os.getppid())": "kernel-objects",
    "import ctypes; ctypes.CDLL(None).unshare(0x20000)": "namespaces",  # CLONE_NEWNS
    "import ctypes; ctypes.CDLL(None).unshare(0x20000000)": "namespaces",  # CLONE_NEWPID, of its children
    "os.chroot('/usr')": "root-directory",
}


@pytest.mark.parametrize("statement", RECHECKED)
def test_recheck_refuses_features_that_are_new(rank: Starter, statement: str) -> None:
    child = rank()
    facts, _ = child.inspect()
    again = recheck(child.pids, facts, carry_paths=CARRY_PATHS, keeper_pid=os.getpid())
    assert {check.verdict for check in again.checks} == {Check.PASS}
    child.then(statement)
    again = recheck(child.pids, facts, carry_paths=CARRY_PATHS, keeper_pid=os.getpid())
    assert [check.name for check in again.checks if check.verdict == Check.REFUSE] == [RECHECKED[statement]]


def test_recheck_lists_files_that_were_mapped_since_for_the_target_to_compare(rank: Starter, tmp_path: Path) -> None:
    path = library(tmp_path / "lib")
    child = rank()
    facts, _ = child.inspect(carry_paths=[])
    child.then(f"f = open('{path}')")
    again = recheck(child.pids, facts, carry_paths=[], keeper_pid=os.getpid())
    assert {check.name: check.verdict for check in again.checks}["new-files"] == Check.WARN
    assert again.new_files == []
    child.then(f"ctypes.CDLL('{path}')")
    again = recheck(child.pids, facts, carry_paths=[], keeper_pid=os.getpid())
    assert {check.name: check.verdict for check in again.checks}["new-files"] == Check.WARN
    (fact,) = again.new_files
    assert fact.path == str(path)
    with path.open("rb") as file:
        assert fact.digest == digest.content_digest(file.fileno(), fact.size)
    os.utime(path, (1, 1))  # the same content with another time, as on a node where it was installed at another time
    assert compare_files("new-files", RankFacts(files=[fact])).verdict == Check.PASS
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert compare_files("new-files", RankFacts(files=[fact])).verdict == Check.REFUSE


def test_recheck_refuses_a_rank_that_ended(rank: Starter) -> None:
    child = rank()
    facts, _ = child.inspect()
    child.process.kill()
    child.process.wait()
    (check,) = recheck(child.pids, facts, carry_paths=CARRY_PATHS, keeper_pid=os.getpid()).checks
    assert (check.name, check.verdict) == ("rank-alive", Check.REFUSE)


def test_sync_reaches_every_writable_file_once(rank: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log", "map", "read"):
        (tmp_path / name).write_bytes(bytes(4096))
    child = rank(
        f"a = open('{tmp_path}/log', 'a'); b = open('{tmp_path}/log', 'a'); c = open('{tmp_path}/read')\n"
        f"import mmap; f = os.open('{tmp_path}/map', os.O_RDWR); m = mmap.mmap(f, 4096); os.close(f)\n"
        "import tempfile; g = tempfile.TemporaryFile()\n"
        "if (child := os.fork()) == 0: wait(); os._exit(0)\n"
        "pids.append(child)\n"
        "if os.fork() == 0: os._exit(0)\n"  # a zombie
        "pids.append(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid)"
    )
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    opened = len(os.listdir("/proc/self/fd"))
    assert sync_files([*child.pids, 2**22 + 1]) == []  # the last is no process
    assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in ("log", "map"))
    assert len(os.listdir("/proc/self/fd")) == opened

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    synced.clear()
    assert sync_files(child.pids, carry_paths=[str(tmp_path)]) == []
    assert synced == []
    monkeypatch.setattr(os, "fsync", fail)
    assert sorted(sync_files(child.pids)) == [f"{tmp_path}/{name}: Input/output error" for name in ("log", "map")]


def test_unix_peers_are_found_in_another_network_namespace(rank: Starter) -> None:
    child = rank("assert libc.unshare(0x40000000) == 0\na, b = socket.socketpair()")
    here = os.readlink("/proc/thread-self/ns/net")
    peers = unix_sockets_of(child.pid).peers
    ends = [int(link[8:-1]) for link in open_links(child.pid).values() if link.startswith("socket:")]
    assert (peers[ends[0]], peers[ends[1]]) == (ends[1], ends[0])
    assert ends[0] not in unix_sockets_of(os.getpid()).peers
    assert os.readlink("/proc/thread-self/ns/net") == here


def test_names_of_unix_sockets_are_exact_whatever_they_contain(tmp_path: Path) -> None:
    row = b"0000000000000000: 00000002 00000000 00010000 0001 01 4242 /etc/forged"
    path = os.fsencode(tmp_path) + b"/a\rb"
    with socket.socket(socket.AF_UNIX) as forger, socket.socket(socket.AF_UNIX) as filed:
        forger.bind(b"\0x\n" + row)
        filed.bind(path)
        names = unix_sockets_of(os.getpid()).names
        assert names[os.fstat(forger.fileno()).st_ino] == "@x\n" + row.decode()
        assert names[os.fstat(filed.fileno()).st_ino] == os.fsdecode(path)
    assert names.get(4242) != "/etc/forged"


def test_digest_covers_the_prefix_and_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 3 * MIB)
    whole, part = content_digest(str(path), 3 * MIB), content_digest(str(path), 2 * MIB)
    assert whole != part
    assert content_digest(str(path), 4 * MIB) == b""
    assert content_digest(str(path), MIB, deadline=0.0) == b""
    with path.open("ab") as file:
        file.write(b"b")
    assert content_digest(str(path), 3 * MIB) == whole
    monkeypatch.setattr(os, "pread", lambda *args: pytest.fail("read again"))
    assert content_digest(str(path), 3 * MIB) == whole


def test_digest_of_a_large_file_samples_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "WHOLE_BYTES", 4 * MIB)
    path = tmp_path / "file"
    size = 10 * MIB + 5
    digests = set()
    for at in (None, 0, size - 1):
        with path.open("wb") as file:
            file.truncate(size)
            if at is not None:
                file.seek(at)
                file.write(b"x")
        path.write_bytes(path.read_bytes())  # another mtime
        digests.add(content_digest(str(path), size))
    assert len(digests) == 3
