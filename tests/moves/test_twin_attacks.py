"""A user decides what becomes of a twin: nothing but the rank's own memory gets into the image, and no daemon hangs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from snapshotd.criu import page_ranges
from snapshotd.moves import page_copy
from snapshotd.moves.saved import Late, Saved
from snapshotd.moves.source import twin_memory
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.moves.source.twins import Twin
from snapshotd.proc import privileges, stat, tree
from snapshotd.proc.files import GONE, parse_fields, read_text
from snapshotd.proc.tree import Process
from snapshotd.runtime import child_process
from snapshotd.sandbox import syscalls
from tests.kernel import needs_page_scans
from tests.moves.twinned import MOVE, SIZE_BYTES, Rank, until, within

pytestmark = [pytest.mark.root, needs_page_scans]

USER, NOBODY = 1500, 65534
CLONE_VM = 0x100
MAP_FIXED = 0x10
PR_SET_DUMPABLE = 4
SILENT = Path(__file__).parents[1] / "proc" / "silent_process.py"
Act = Callable[[Rank], object]
libc = ctypes.CDLL(None, use_errno=True)

#: A program that has other bytes at the same address. It keeps the descriptors that it was given.
OTHER = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
where, size, line = {start}, {size}, {line}
piece = 1 << 20
for at in range(where, where + size, piece):  # its own libraries may lie at some of them
    numbers = (ctypes.c_void_p(at), ctypes.c_size_t(piece), 3, 0x100022, -1, ctypes.c_long(0))
    if libc.mmap(*numbers) == at:
        ctypes.memset(at, 0x73, piece)
os.write(line, b"{sibling}")
signal.pause()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Act], Rank]]:
    monkeypatch.setattr(twin_memory, "memory_room", lambda _pid: [("this node", 1 << 50)])
    made: list[Rank] = []

    def started(act: Act) -> Rank:
        made.append(Rank(tmp_path, act))
        return made[-1]

    yield started
    for rank in made:
        rank.end()


def shares_its_memory_and_executes(rank: Rank) -> None:
    """What the twin does: its memory lives on in another process, and its pid is another program's."""
    stack = ctypes.create_string_buffer(64 << 10)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    sibling = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, CLONE_VM, None)
    line = rank.theirs.fileno()
    os.set_inheritable(line, True)
    text = OTHER.format(start=rank.start, size=SIZE_BYTES, line=line, sibling=sibling)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", text])


def becomes_another_user(_rank: Rank) -> str:
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    return "done"


def takes_its_pages_away(server: Process, folder: Path, rank: Rank) -> str:
    """From now on a reader of that memory waits for an answer that never comes."""
    file = os.open(f"/proc/{server.pid}/root{folder}/file", os.O_RDONLY)
    libc.mmap.restype = ctypes.c_void_p
    how = mmap.PROT_READ, mmap.MAP_PRIVATE | MAP_FIXED, file, ctypes.c_long(0)
    where = libc.mmap(ctypes.c_void_p(rank.start), ctypes.c_size_t(1 << 20), *how)
    return "done" if where == rank.start else "failed"


@pytest.fixture
def silent(start: Callable[[Act], Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank whose twin maps a file of a FUSE server that does not answer, when it is told to."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse, for a FUSE server that never answers")
    monkeypatch.setattr(child_process, "REAP_S", 0.1)  # one that waits for the server ends with it
    folder = tmp_path / "fuse"
    folder.mkdir()
    words = [sys.executable, "-I", "-S", str(SILENT), str(folder), "file"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    assert server.stdout.readline()
    yield start(partial(takes_its_pages_away, Process.of(server.pid), folder))
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    until(lambda: not copiers())


def found(rank: Rank) -> TwinMemory:
    made = rank.twins()
    assert made.find()
    rank.sealed()
    return made


async def saved(rank: Rank, made: TwinMemory) -> Saved:
    made.save_soon()
    result: Saved = await rank.node.saving[MOVE, Late.HOST]
    return result


def must_be_the_rank_s(rank: Rank, made: TwinMemory) -> None:
    """What is in the file of the image."""
    (layer,), ((name, _),) = made.find(), made.files()
    content = (rank.node.store.path(MOVE) / name).read_bytes()
    at = page_ranges.size_bytes(page_ranges.common(layer.pages, [(0, rank.start)]))  # a run may begin before it
    parts = within(rank, layer.pages)
    assert page_ranges.size_bytes(parts) > SIZE_BYTES // 2
    for start, end in parts:
        assert content[at : at + end - start] == rank.content[start:end]
        at += end - start


async def test_program_that_a_twin_executes_is_not_read(start: Callable[[Act], Rank]) -> None:
    rank = start(shares_its_memory_and_executes)
    made = found(rank)
    sibling = Process.of(int(rank.tell()))
    try:
        assert rank.twin.alive(), "it is the same process, with another program"
        assert (await saved(rank, made)).failure == ""
        must_be_the_rank_s(rank, made)
    finally:
        sibling.signal(signal.SIGKILL)


def test_program_that_a_twin_has_executed_before_the_dump_is_not_used(start: Callable[[Act], Rank]) -> None:
    rank = start(shares_its_memory_and_executes)
    sibling = Process.of(int(rank.tell()))
    try:
        assert rank.twins().find() == []
    finally:
        sibling.signal(signal.SIGKILL)


def test_twin_of_another_user_is_not_used(start: Callable[[Act], Rank]) -> None:
    rank = start(becomes_another_user)
    rank.tell()
    before = len(os.listdir("/proc/self/fd"))
    assert rank.twins().find() == []
    assert len(os.listdir("/proc/self/fd")) == before


async def test_copy_does_not_unshare_the_twin_s_pages(start: Callable[[Act], Rank]) -> None:
    """process_vm_readv would: the memory would exist twice, though the rank writes none of it."""
    rank = start(lambda _rank: None)
    made = found(rank)
    before = private_bytes(rank.twin.pid)
    assert (await saved(rank, made)).failure == ""
    assert private_bytes(rank.twin.pid) - before < SIZE_BYTES // 4


def private_bytes(pid: int) -> int:
    fields = parse_fields(read_text(f"/proc/{pid}/smaps_rollup"))
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))


def copiers() -> list[int]:
    """The children of this process that copy memory of twins, in their sandboxes."""
    ours = []
    for pid in tree.children(os.getpid()):
        try:
            words = read_text(f"/proc/{pid}/cmdline").split("\0")
            if "snapshotd.moves.page_copy_child" in words and not stat.read(pid).dead:
                ours.append(pid)
        except GONE:
            continue
    return ours


def reads(pid: int) -> bool:
    """Whether it waits in a system call that reads memory."""
    numbers = [syscalls.number(name, os.uname().machine) for name in ("preadv", "preadv2")]
    return read_text(f"/proc/{pid}/syscall").split()[0] in map(str, numbers)


async def test_page_that_never_arrives_hangs_no_more_than_a_child(silent: Rank) -> None:
    made = found(silent)
    assert silent.tell() == "done"
    made.save_soon()
    await asyncio.to_thread(until, lambda: any(map(reads, copiers())))
    for pid in copiers():
        child = privileges.read(pid)
        assert (child.all_user_ids, child.capabilities, child.no_new_privs) == (frozenset([NOBODY]), 0, True)
    await made.close()
    ((name, _),) = made.files()
    assert (silent.node.store.path(MOVE) / f".{name}").stat().st_blocks == 0, "what was copied is given back"
    assert silent.node.saving == {}


async def test_copy_that_gets_no_answer_is_given_up(silent: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    made = found(silent)
    assert silent.tell() == "done"
    monkeypatch.setattr(page_copy, "LIMIT_S", 0.5)
    assert "did not answer within" in (await saved(silent, made)).failure


@pytest.mark.parametrize("at_once", [True, False])
async def test_copy_whose_child_is_killed_fails(
    start: Callable[[Act], Rank], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """`at_once`: it has ended before it could get its descriptors."""
    rank = start(lambda _rank: None)
    made = found(rank)
    begin = child_process.start

    def killed(module: str) -> child_process.ChildProcess:
        child = begin(module)
        child.process.kill()
        if at_once:
            child.process.wait()
        return child

    monkeypatch.setattr(child_process, "start", killed)
    assert "has ended" in (await saved(rank, made)).failure


@pytest.mark.parametrize("dumpable", [True, False])
def test_twin_that_was_a_set_user_id_program_is_not_used(dumpable: bool) -> None:
    """One that has given up its rights has the ids of the rank's user, but the kernel gives its memory to root."""
    with user_process(dumpable=True) as rank, user_process(dumpable=dumpable) as twin:
        if dumpable:
            os.close(twin_memory.opened(Twin(rank.pid, rank.pid, twin)))
        else:
            with pytest.raises(PermissionError, match="not that of the rank"):
                twin_memory.opened(Twin(rank.pid, rank.pid, twin))


@contextlib.contextmanager
def user_process(*, dumpable: bool) -> Iterator[Process]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1)
        yield Process.of(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
