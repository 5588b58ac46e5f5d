"""The process that keeps device memory: it outlives its clients, and ends when it keeps nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.holder.client import Holder
from snapshotd.holder.process import BATCH
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device.hold import let_go
from tests.shim.jobs import until


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "holder.sock"


@pytest.fixture
def holder(place: Path) -> Iterator[Holder]:
    holder = Holder(place)
    yield holder
    holder.drop(list(holder.kept()))
    holder.close()
    until(lambda: not place.exists())


def memory(content: bytes) -> int:
    fd = os.memfd_create("memory")
    os.write(fd, content)
    return fd


def keep(holder: Holder, key: str, contents: list[bytes]) -> None:
    for at in range(0, len(contents), BATCH):
        some = contents[at : at + BATCH]
        fds = [memory(content) for content in some]
        holder.keep(key, [HeldBlock((at + number) << 21, len(one), 0) for number, one in enumerate(some)], fds)
        for fd in fds:
            os.close(fd)


def kept(holder: Holder, key: str) -> list[tuple[int, bytes]]:
    return [
        (block.address, os.pread(fd, block.bytes, 0))
        for blocks, fds in holder.held(key)
        for block, fd in zip(blocks, fds, strict=True)
    ]


def test_memory_is_given_back_in_its_order(holder: Holder) -> None:
    contents = [os.urandom(16) for _ in range(3 * BATCH + 1)]
    keep(holder, "m-1/7", contents)
    keep(holder, "m-2/8", [b"other"])
    assert kept(holder, "m-1/7") == [(number << 21, content) for number, content in enumerate(contents)]
    assert holder.kept() == {"m-1/7": 16 * len(contents), "m-2/8": 5}
    holder.drop(["m-1/7"])
    assert kept(holder, "m-1/7") == []
    assert holder.kept() == {"m-2/8": 5}


def test_memory_outlives_the_daemon(holder: Holder, place: Path) -> None:
    keep(holder, "m-1/7", [b"content"])
    holder.close()  # as if its daemon had ended
    again = Holder(place)
    assert kept(again, "m-1/7") == [(0, b"content")]
    again.close()


def test_signals_for_the_daemon_do_not_end_it(holder: Holder) -> None:
    keep(holder, "m-1/7", [b"content"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(holder.pid, number)
    assert kept(holder, "m-1/7") == [(0, b"content")]


def test_it_ends_with_its_last_client_if_it_keeps_nothing(place: Path) -> None:
    holder = Holder(place)
    assert holder.kept() == {}
    assert not place.exists(), "nothing was started to ask that"
    holder.start("m-1")
    pid = holder.pid
    holder.close()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not place.exists()


def test_it_ends_although_it_was_asked_about_a_move_that_has_ended(holder: Holder, place: Path) -> None:
    """The question opens a connection, which would keep it running."""
    keep(holder, "m-1/7", [b"content"])
    other = Holder(place)
    assert other.kept()
    holder.drop(["m-1/7"])
    holder_pid = other.pid
    let_go(other, "m-1")
    until(lambda: not Path(f"/proc/{holder_pid}").exists())


def test_it_runs_as_long_as_a_move_may_need_it(holder: Holder) -> None:
    holder.start("m-1")
    pid = holder.pid
    keep(holder, "m-2/7", [b"content"])
    let_go(holder, "m-2")
    assert holder.pid == pid, "another move is about to hand its memory over"
    let_go(holder, "m-1")
    assert not holder.pid
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_connection_to_a_holder_that_is_ending_is_made_again(holder: Holder, place: Path) -> None:
    """It ends because it keeps nothing, with a connection that it has not accepted."""
    ending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ending.bind(str(place))
    ending.listen(8)

    def end() -> None:
        select.select([ending], [], [], 60)  # somebody has connected
        place.unlink()
        ending.close()

    thread = threading.Thread(target=end)
    thread.start()
    keep(holder, "m-1/7", [b"content"])
    thread.join()
    assert kept(holder, "m-1/7") == [(0, b"content")]


def test_holder_that_ends_does_not_remove_the_socket_of_the_next(holder: Holder, place: Path) -> None:
    path = place.with_name(f"{place.name}.lock")

    def waits() -> bool:
        """Whether another process has opened the lock."""
        for link in Path("/proc").glob("[1-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if link.parts[2] != str(os.getpid()) and os.readlink(link) == str(path):
                    return True
        return False

    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place.touch()  # the one that is ending has not removed it yet
        starting = threading.Thread(target=holder._start)
        starting.start()
        until(waits)
        assert not place.is_socket()
        place.unlink()
    starting.join(60)
    assert place.is_socket()
    keep(holder, "m-1/7", [b"content"])
    assert kept(holder, "m-1/7") == [(0, b"content")]


def test_it_keeps_more_blocks_than_the_soft_limit_of_the_daemon(place: Path) -> None:
    """A rank has thousands; the hard limit is that of the daemon's unit."""
    blocks, (soft, hard) = 200 * BATCH, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < blocks + 64:
        pytest.skip(f"needs a hard limit of {blocks + 64} open files, and has {hard}: raise it with `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    holder = Holder(place)
    try:
        keep(holder, "m-1/7", [b"x"] * blocks)
        assert holder.count("m-1/7") == blocks
        assert len(kept(holder, "m-1/7")) == blocks
    finally:
        holder.drop(["m-1/7"])
        holder.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_lack_of_descriptors_is_an_error(holder: Holder) -> None:
    """The kernel drops those that do not fit: memory would be lost."""
    contents = [b"x"] * BATCH
    keep(holder, "m-1/7", contents)
    resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{holder.pid}/fd")) + 2,) * 2)
    with pytest.raises(GpuFailed, match="can open no more files"):
        keep(holder, "m-1/8", contents)
    assert holder.kept() == {"m-1/7": BATCH}
    assert holder.count("m-1/7") == BATCH
    assert holder.count("m-1/8") == 0


def test_killed_holder_is_reported_and_replaced(holder: Holder) -> None:
    keep(holder, "m-1/7", [b"content"])
    pid = holder.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(GpuFailed, match="does not answer"):
        holder.kept()
    keep(holder, "m-1/8", [b"more"])
    assert holder.kept() == {"m-1/8": 4}


def test_wrong_request_is_refused_and_closes_its_descriptors(holder: Holder) -> None:
    holder.start("test")
    before = len(os.listdir(f"/proc/{holder.pid}/fd"))
    fd = memory(b"x")
    with pytest.raises(GpuFailed, match="1 descriptors for 2 blocks"):
        holder.keep("m-1/7", [HeldBlock(0, 1, 0), HeldBlock(1, 1, 0)], [fd])
    os.close(fd)
    assert len(os.listdir(f"/proc/{holder.pid}/fd")) == before
