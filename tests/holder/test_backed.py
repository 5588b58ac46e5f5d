"""Memory outlives the process that keeps it, and the daemon: whichever of the two ends, the other still has all of it."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.holder.backed import BackedHolder
from snapshotd.holder.client import Holder
from snapshotd.holder.process import BATCH
from snapshotd.inprocess.holding import HeldBlock
from tests.holder.test_process import keep, kept, memory
from tests.shim.jobs import until

KEY = "m-0123456789ab/7"
Contents = list[tuple[int, bytes]]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BackedHolder]:
    holder = BackedHolder(tmp_path / "holder.sock")
    holder.start("test")
    yield holder
    holder.leave("test")
    holder.drop(list(holder.kept()))
    holder.close()
    until(lambda: not holder.path.exists())


def contents_of(blocks: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(blocks)]


def as_kept(contents: list[bytes]) -> Contents:
    return [(number << 21, content) for number, content in enumerate(contents)]


def kill(pid: int) -> None:
    """Waits until it has ended, and not for the process that reaps it."""
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    assert ended.poll(60_000)
    os.close(handle)


def files_here() -> int:
    return len(os.listdir("/proc/self/fd"))


BLOCKS = 2 * BATCH + 3
ASKED: dict[str, tuple[Callable[[BackedHolder], object], object]] = {
    "kept": (lambda holder: holder.kept(), {KEY: 16 * BLOCKS, "m-2/8": 5}),
    "count": (lambda holder: holder.count(KEY), BLOCKS),
    "held": (lambda holder: len(kept(holder, KEY)), BLOCKS),
    "drop": (lambda holder: holder.drop(["m-3/9"]), None),
    "start": (lambda holder: holder.start("test"), None),
    "keep": (lambda holder: keep(holder, "m-4/1", [b"more"]), None),
}


@pytest.mark.parametrize("asked", ASKED)
def test_killed_holder_is_replaced_with_all_that_it_kept(holder: BackedHolder, asked: str) -> None:
    contents, (ask, expected) = contents_of(BLOCKS), ASKED[asked]
    keep(holder, KEY, contents)
    keep(holder, "m-2/8", [b"other"])
    first = holder.pid
    os.kill(first, signal.SIGKILL)
    assert ask(holder) == expected
    assert holder.pid not in (0, first)
    assert kept(holder, KEY) == as_kept(contents)
    assert kept(holder, "m-2/8") == [(0, b"other")]


def test_killed_holder_is_replaced_before_it_is_asked(holder: BackedHolder) -> None:
    """The daemon may be the next that is killed."""
    contents = contents_of(BLOCKS)
    keep(holder, KEY, contents)
    kill(holder.pid)
    other = Holder(holder.path)
    until(lambda: other.count(KEY) == len(contents))
    assert kept(other, KEY) == as_kept(contents)
    other.close()


@pytest.mark.parametrize("kept_before", [1, BATCH, BATCH + 1])
def test_holder_that_is_killed_between_two_batches_gets_no_block_twice(holder: BackedHolder, kept_before: int) -> None:
    contents = contents_of(kept_before + BATCH + 5)
    for number, content in enumerate(contents):
        if number == kept_before:
            os.kill(holder.pid, signal.SIGKILL)
        fd = memory(content)
        holder.keep(KEY, [HeldBlock(number << 21, len(content), 0)], [fd])
        os.close(fd)
    assert kept(holder, KEY) == as_kept(contents)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("at", range(1, 16))
def test_holder_that_dies_at_any_request_loses_nothing(
    holder: BackedHolder, monkeypatch: pytest.MonkeyPatch, at: int, answered: bool
) -> None:
    """Requests are made while it gets memory, while another one gets it again, and while it is asked. `answered`: the request
    was, before the holder died."""
    exchange, made = Holder._exchange, [0]

    def counted(self: Holder, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        made[0] += 1
        dies = made[0] in (at, at + 3)  # the second one dies, too, while it gets everything
        if dies and not answered:
            kill(self.pid)
        answer = exchange(self, request, fds)
        if dies and answered:
            kill(self.pid)
        return answer

    monkeypatch.setattr(Holder, "_exchange", counted)
    contents, more = contents_of(BLOCKS), contents_of(BATCH + 1)
    keep(holder, KEY, contents)
    keep(holder, "m-2/8", more)
    assert kept(holder, KEY) == as_kept(contents)
    assert kept(holder, "m-2/8") == as_kept(more)
    assert made[0] > 16


def test_holder_that_is_killed_while_memory_is_given_back(holder: BackedHolder) -> None:
    contents = contents_of(3 * BATCH)
    keep(holder, KEY, contents)
    found: Contents = []
    for blocks, fds in holder.held(KEY):
        found += [(one.address, os.pread(fd, one.bytes, 0)) for one, fd in zip(blocks, fds, strict=True)]
        os.kill(holder.pid, signal.SIGKILL)
    assert found == as_kept(contents)


def test_memory_that_another_process_has_handed_over_is_lost_at_once(holder: BackedHolder) -> None:
    """As that of a filler, on a target. Its process must not wait for the rest."""
    filler, killed = Holder(holder.path, starts=False), list[int]()
    keep(filler, KEY, contents_of(2 * BATCH))

    def kill_while_it_gives() -> None:
        for _ in holder.held(KEY):
            killed.append(holder.pid)
            kill(killed[-1])

    with pytest.raises(GpuFailed, match="gave none"):
        kill_while_it_gives()
    assert len(killed) == 1
    assert holder.kept() == {}
    fd = memory(b"x")
    with pytest.raises(GpuFailed, match="does not answer"):
        filler.keep(KEY, [HeldBlock(0, 1, 0)], [fd])
    filler.keep(KEY, [HeldBlock(0, 1, 0)], [fd])
    os.close(fd)
    filler.drop([KEY])
    filler.close()


def test_child_of_the_daemon_starts_no_holder(tmp_path: Path) -> None:
    filler, fd = Holder(tmp_path / "holder.sock", starts=False), memory(b"x")
    with pytest.raises(GpuFailed, match="does not run"):
        filler.keep(KEY, [HeldBlock(0, 1, 0)], [fd])
    assert not filler.path.exists()
    os.close(fd)


def test_restarted_daemon_takes_duplicates(holder: BackedHolder) -> None:
    contents = contents_of(BLOCKS)
    keep(holder, KEY, contents)
    holder.close()  # as if the daemon had been killed
    holder.adopt(KEY)
    for _ in range(2):
        kill(holder.pid)
        assert kept(holder, KEY) == as_kept(contents)


def test_memory_is_lost_only_with_both(holder: BackedHolder) -> None:
    keep(holder, KEY, [b"content"])
    pid = holder.pid
    holder.close()  # as if the daemon had been killed
    kill(pid)
    assert holder.kept() == {}
    holder.start("test")  # the end of the test looks for its socket


def test_holder_that_is_not_needed_any_more_is_not_replaced(holder: BackedHolder) -> None:
    keep(holder, KEY, [b"content"])
    pid = holder.pid
    holder.leave("test")
    holder.drop([KEY])
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: not any(thread.name == "watch the holder" for thread in threading.enumerate()))
    assert not holder.path.exists()


def test_no_descriptor_is_left(holder: BackedHolder) -> None:
    before = files_here()
    for _ in range(3):
        keep(holder, KEY, contents_of(BLOCKS))
        assert files_here() == before + BLOCKS
        kill(holder.pid)
        assert len(kept(holder, KEY)) == BLOCKS
        until(lambda: files_here() == before + BLOCKS)  # the watch of the one that was killed
        holder.adopt(KEY)
        assert files_here() == before + BLOCKS
        holder.drop([KEY])
        assert files_here() == before


@pytest.mark.parametrize("room", [0, BATCH - 1])
def test_lack_of_descriptors_here_is_an_error_and_leaves_none(holder: BackedHolder, room: int) -> None:
    keep(holder, KEY, contents_of(BATCH))
    fds = [memory(b"x") for _ in range(BATCH)]
    before, (soft, hard) = files_here(), resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.dup(fds[0]) for _ in range(highest - before + 2)]  # no number below the limit is free but these
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + room, hard))
    try:
        with pytest.raises(GpuFailed, match=r"can open no more files.*LimitNOFILE="):
            holder.keep("m-2/8", [HeldBlock(number, 1, 0) for number in range(BATCH)], fds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert files_here() == before
    assert holder.kept() == {KEY: 16 * BATCH}
    holder.keep("m-2/8", [HeldBlock(number, 1, 0) for number in range(BATCH)], fds)
    for fd in fds:
        os.close(fd)
    assert len(kept(holder, "m-2/8")) == BATCH


def test_lack_of_descriptors_there_is_an_error_and_nothing_is_handed_over_halfway(holder: BackedHolder) -> None:
    keep(holder, KEY, contents_of(BATCH))
    resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{holder.pid}/fd")) + 2,) * 2)
    before = files_here()
    with pytest.raises(GpuFailed, match="can open no more files"):
        keep(holder, "m-2/8", contents_of(BATCH))
    assert holder.kept() == {KEY: 16 * BATCH}
    assert files_here() <= before + BATCH  # those of the test
