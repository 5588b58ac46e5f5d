"""Each parser of /proc on a text from a kernel, and each reader on this process."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from snapshotd.proc import (
    cgroup_paths,
    comm,
    cpuinfo,
    environ,
    fd,
    locks,
    maps,
    meminfo,
    mountinfo,
    namespaces,
    sizes,
    stat,
    status,
)

NO_SUCH_PID = 2**22 + 1

STAT = (
    "4711 (a) (b c) S 1 4710 4709 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 7 0 123456 8192 55 18446744073709551615 1 1 0\n"
)
STATUS = """Name:\tpython3
Pid:\t4711
TracerPid:\t12
Uid:\t1000\t1001\t1001\t1001
Gid:\t100\t100\t100\t100
Groups:\t27 4
NSpid:\t4711\t32
SigBlk:\t0000000000000200
SigCgt:\t0000000180004002
"""
MAPS = (
    b"7f01b000-7f01c000 r--p 00000000 00:00 0 \n"
    b"00400000-00401000 r-xp 00001000 08:02 173521     /usr/bin/a b (deleted)\n"
    b"7f0000-7f1000 rw-s 00000000 00:05 42                         /dev/zero (deleted)\n"
    b"7ffd0000-7ffd1000 rw-p 00000000 00:00 0                          [stack]\n"
    b"7f2000-7f3000 r--p 00000000 08:02 7 /x\\012y\n"
)
MOUNTINFO = """25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw
31 25 0:27 / /sys/fs/cgroup\\040two rw shared:9 - cgroup2 cgroup2 rw,nsdelegate
36 25 0:32 / /sys/fs/cgroup/memory rw shared:16 - cgroup cgroup rw,memory
40 30 0:40 / /empty rw - tmpfs  rw,size=4k
"""


def test_stat_with_parentheses_in_the_name() -> None:
    found = stat.parse(STAT)
    assert (found.pid, found.name, found.state, found.parent) == (4711, "a) (b c", "S", 1)
    assert (found.group, found.session, found.threads, found.start_ticks) == (4710, 4709, 7, 123456)
    assert not found.dead
    assert not found.stopped
    assert stat.parse(STAT.replace(" S ", " Z ")).dead
    assert stat.parse(STAT.replace(" S ", " T ")).stopped
    assert not found.exiting
    assert stat.exiting(NO_SUCH_PID)


def test_stat_of_this_process() -> None:
    found = stat.read(os.getpid())
    assert (found.pid, found.parent, found.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert os.getpid() in {thread.pid for thread in stat.read_threads(os.getpid())}


def test_stat_of_a_process_that_has_ended() -> None:
    with pytest.raises(ProcessLookupError):
        stat.read(NO_SUCH_PID)
    assert stat.read_threads(NO_SUCH_PID) == []


def test_status() -> None:
    found = status.parse(STATUS)
    assert (found.user_id, found.inner_pid, found.tracer_pid) == (1000, 32, 12)
    assert (found.user_ids, found.group_ids, found.groups) == ((1000, 1001, 1001, 1001), (100,) * 4, (4, 27))
    assert found.blocks(signal.SIGUSR1)
    assert not found.blocks(signal.SIGINT)
    assert found.catches(signal.SIGINT)
    assert status.parse("Pid:\t7\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n").inner_pid == 7


def test_status_of_this_process() -> None:
    found = status.read(os.getpid())
    assert found.user_id == os.getuid()
    assert status.read(os.getpid(), os.getpid()) == found
    with pytest.raises(FileNotFoundError):
        status.read(NO_SUCH_PID)


def test_maps() -> None:
    first, second, third = maps.parse(MAPS)
    assert (first.path, first.device, first.inode, first.offset) == ("/usr/bin/a b (deleted)", "08:02", 173521, 0x1000)
    assert (first.readable, first.writable, first.executable, first.shared) == (True, False, True, False)
    assert (first.span, first.start, first.size_bytes) == ("400000-401000", 0x400000, 4096)
    assert (second.shared, second.writable) == (True, True)
    assert third.path == "/x\ny"
    assert [one.path for one in maps.parse(MAPS, ("/dev/",))] == ["/dev/zero (deleted)"]
    assert maps.parse_inodes(MAPS) == {(os.makedev(8, 2), 173521), (os.makedev(0, 5), 42), (os.makedev(8, 2), 7)}


def test_maps_of_this_process() -> None:
    executable = os.stat(sys.executable)
    mapping = next(one for one in maps.read(os.getpid()) if one.inode == executable.st_ino)
    assert mapping.path == os.path.realpath(sys.executable)
    assert (executable.st_dev, executable.st_ino) in maps.parse_inodes(maps.read_raw(os.getpid()))


def test_descriptors(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as sock:
        found = {one.number: one for one in fd.read_descriptors(os.getpid())}
        assert (found[file.fileno()].link, found[file.fileno()].writable) == (str(tmp_path / "file"), True)
        assert found[sock.fileno()].link.startswith("socket:[")
        assert found[sock.fileno()].stat is None
        assert {one.number for one in fd.read_descriptors(os.getpid(), ("socket:[",))} >= {sock.fileno()}


def test_fdinfo() -> None:
    assert fd.parse_info("pos:\t0\nflags:\t0100002\ntty-index:\t3\n") == fd.FdInfo(0o100002, "3", None)
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert fd.read_info(os.getpid(), pidfd).watched_pid == os.getpid()
    finally:
        os.close(pidfd)


def test_mountinfo() -> None:
    mounts = mountinfo.parse(MOUNTINFO)
    assert [mount.kind for mount in mounts] == ["sysfs", "cgroup2", "cgroup", "tmpfs"]
    assert mountinfo.cgroup2_root(mounts) == Path("/sys/fs/cgroup two")
    assert mountinfo.cgroup2_root(mounts[2:]) is None
    assert mounts[2].options == ("rw", "memory")
    assert Path("/proc") in [mount.point for mount in mountinfo.read() if mount.kind == "proc"]


def test_cgroup_paths() -> None:
    found = cgroup_paths.parse("9:memory,cpu:/a:b\n1:name=systemd:/\n0::/user.slice/x\n")
    assert found[0] == cgroup_paths.CgroupPath(("memory", "cpu"), "/a:b")
    assert [one.path for one in found if one.unified] == ["/user.slice/x"]


@pytest.mark.parametrize("sign", ["\f", "\v", "\r", "\x1c", "\x85", "\u2028"])
def test_a_name_that_a_user_chose_does_not_end_a_line(sign: str) -> None:
    assert [one.path for one in cgroup_paths.parse(f"0::/a{sign}0::b\n")] == [f"/a{sign}0::b"]
    line = f"1 2 0:3 / /mnt/a{sign}b rw - fuse.x source rw"
    assert [mount.point for mount in mountinfo.parse(f"{line}\n{line}\n")] == [Path(f"/mnt/a{sign}b")] * 2
    status_text = f"Name:\tx{sign}Uid: 0\nUid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nPid:\t1\n"
    assert status.parse(status_text).user_id == 7


def test_environ_of_a_process() -> None:
    assert environ.parse("A=1\0B=x=y\0A=2\0broken\0") == {"A": "1", "B": "x=y"}
    # Popen returns during execve, while /proc still shows an empty environment: wait until the program has printed a line.
    command = ["/bin/sh", "-c", "echo; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"ONE": "1"}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert environ.read(process.pid) == {"ONE": "1"}


def test_memory() -> None:
    assert meminfo.parse_available("MemTotal: 100 kB\nMemAvailable:   12 kB\n") == 12288
    assert meminfo.parse_available("MemTotal: 100 kB\n") == 0
    assert sizes.parse_resident("10 3 1 1 0 1 0") == 3 * os.sysconf("SC_PAGE_SIZE")
    assert sizes.parse_anonymous("Rss: 9 kB\nAnonymous:  3 kB\nSwap: 1 kB\n") == 4096
    assert sizes.resident_bytes(os.getpid()) > 1 << 20
    assert sizes.anonymous_bytes(os.getpid()) > 1 << 20


def test_cpu_features_are_those_of_every_cpu() -> None:
    assert cpuinfo.parse_features("flags\t\t: sse avx fpu\n\nflags\t\t: fpu sse\n") == ("fpu", "sse")
    assert cpuinfo.parse_features("processor: 0\n") == ()


def test_names_of_processes_and_threads() -> None:
    name = Path("/proc/self/comm").read_text().strip()
    assert comm.read(os.getpid()) == name
    assert comm.thread_names(os.getpid())[os.getpid()] == name
    assert comm.name_or(NO_SUCH_PID, "ended") == "ended"


def test_locks() -> None:
    text = "1: POSIX  ADVISORY  WRITE 42 08:02:173521 0 EOF\n1: -> FLOCK ADVISORY WRITE 43 00:01:9 0 EOF\nnonsense\n"
    assert [(lock.kind, lock.pid, lock.file[1]) for lock in locks.parse(text)] == [
        ("POSIX", 42, 173521),
    ]
    with tempfile.TemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        inode = os.fstat(file.fileno()).st_ino
        assert ("FLOCK", os.getpid()) in {(lock.kind, lock.pid) for lock in locks.read() if lock.file[1] == inode}
        own = locks.read_of(os.getpid(), file.fileno())
        assert [(lock.kind, lock.pid, lock.file[1]) for lock in own] == [("FLOCK", os.getpid(), inode)]


def test_namespaces() -> None:
    assert namespaces.read("self", "net") == os.readlink("/proc/self/ns/net")
    assert namespaces.read("self", "nonsense") == ""
    with pytest.raises(FileNotFoundError):
        namespaces.read(NO_SUCH_PID, "net")
