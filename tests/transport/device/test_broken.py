"""Connections that break, bytes that change, processes that die, disks that are full."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotd.api.errors import Damaged, Full, Internal, SnapshotError, Unreachable
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device.child import Child
from snapshotd.transport.device.connection import TAG_BYTES, Connection, read_reply
from snapshotd.transport.device.records import HEADER_BYTES, REPLY_BYTES, Kind, Record, reply
from tests.transport.device.lane import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MIB,
    Ends,
    Meddle,
    Meddler,
    children,
    children_of,
    flip,
    flipped,
    noise,
    until,
)

CONTENT = noise(6 * MIB + 5)
SIZES = {"a": len(CONTENT)}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is given up soon."""
    monkeypatch.setattr("snapshotd.transport.device.incoming.LOST_S", 0.3)
    monkeypatch.setattr("snapshotd.transport.device.outgoing.REOPEN_S", 0.3)


@pytest.fixture(autouse=True)
def filled(request: pytest.FixtureRequest) -> None:
    for name in ("ends", "plain"):
        if name in request.fixturenames:
            request.getfixturevalue(name).fill({"a": CONTENT})


def cut_at(position: int, connections: int) -> Meddle:
    """The first `connections` connections, each so far from its own beginning."""
    return lambda number, passed, part: None if number < connections and passed + len(part) > position else part


def children_named(program: str) -> list[int]:
    found = []
    for pid in children():
        with contextlib.suppress(OSError):
            if program in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return sorted(found)


def one_child(program: str) -> int:
    (found,) = children_named(program)
    return found


@contextmanager
def given_to(child: Child) -> Iterator[socket.socket]:
    """A plain connection's other end."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child.say({}, [theirs.fileno()])
        yield ours


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """For processes that are started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def arrives(ends: Ends, meddle: Meddle) -> int:
    """How many connections that took."""
    async with ends.both(["a"], meddle) as (incoming, outgoing, meddler):
        outgoing.finish(SIZES)
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert await incoming.wait(30) == SIZES
    assert ends.arrived(["a"]) == {"a": CONTENT}
    return meddler.connections


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize("position", [2 * MIB + 1000, 5 * MIB])
async def test_a_connection_that_is_cut_is_opened_again_and_goes_on(ends: Ends, position: int) -> None:
    passed_again = 0

    def cut(number: int, passed: int, part: bytes) -> bytes | None:
        nonlocal passed_again
        passed_again += len(part) if number else 0
        return cut_at(position, 1)(number, passed, part)

    assert await arrives(ends, cut) == 2
    assert passed_again < len(CONTENT) - position + 2 * MIB  # it did not begin from the beginning


async def test_a_connection_may_break_three_times(ends: Ends) -> None:
    assert await arrives(ends, cut_at(MIB + 200_000, 3)) == 4


@pytest.mark.usefixtures("impatient")
async def test_one_that_breaks_again_and_again_is_unreachable(ends: Ends) -> None:
    async with ends.both(["a"], cut_at(GREETING_BYTES + 20_000, 99)) as (incoming, outgoing, meddler):
        outgoing.finish(SIZES)
        with pytest.raises(Unreachable, match="a to node node-2: "):
            await outgoing.wait()
        with pytest.raises(Unreachable, match="a from node node-1: "):
            await incoming.wait(30)
        assert outgoing.failed is not None
        assert incoming.failed is not None
        assert meddler.connections == 4


@pytest.mark.usefixtures("impatient")
async def test_a_target_that_is_gone_is_unreachable(ends: Ends) -> None:
    async with ends.both(["a"]) as (incoming, outgoing, meddler):
        await meddler.__aexit__()  # first: who came between the two would wait for an answer, and not be refused
        await incoming.close()
        outgoing.finish(SIZES)
        with pytest.raises(Unreachable, match="Connection refused"):
            await outgoing.wait()
    with pytest.raises(Unreachable, match="node node-2 at 127"):
        async with ends.outgoing(meddler.port, incoming.key, ["a"]):
            pass


async def test_who_missed_the_last_word_hears_it_again(ends: Ends) -> None:
    async with ends.both(["a"]) as (incoming, outgoing, meddler):
        meddler.deaf = True
        outgoing.finish(SIZES)
        assert await incoming.wait(30) == SIZES
        meddler.deaf = False
        meddler.cut()
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert meddler.connections == 2


async def test_a_stripe_is_done_when_the_sender_was_told(tmp_path: Path, nothing_left: None) -> None:
    settings = {"expected_bytes": 0, "path": str(tmp_path / "a")}
    child = await Child.start("snapshotd.transport.device.receive", settings)
    end = Record(Kind.END, 0, 0).header()
    try:
        assert await child.hear() == {"ready": True}
        with given_to(child) as sender:
            assert await in_thread(read_reply, Connection(sender)) == (Kind.HAVE, 0)
            sender.shutdown(socket.SHUT_RD)  # of a pair: the answer fails
            sender.sendall(end)
            assert await child.hear() == {"connected": 0}
            assert "lost" in await child.hear()
        with given_to(child) as sender:
            assert await in_thread(read_reply, Connection(sender)) == (Kind.HAVE, 0)
            sender.sendall(end)
            assert await child.hear() == {"connected": 0}
            assert await child.hear() == {"done": True, "at": 0}
            assert sender.recv(1000, socket.MSG_DONTWAIT) == reply(Kind.DONE, 0)
    finally:
        await child.close()


async def test_a_new_connection_ends_one_that_hangs(ends: Ends) -> None:
    """The network swallowed the first one: neither end was told."""
    async with ends.both(["a"]) as (incoming, outgoing, meddler):
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (ends.there / "a").stat().st_size >= 2 * MIB)
        meddler.cut_source()
        outgoing.finish(SIZES)
        await outgoing.wait()
        assert await incoming.wait(30) == SIZES
        assert meddler.connections == 2
    assert ends.arrived(["a"]) == {"a": CONTENT}


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("number", "position"),
    [
        (0, 3),  # the header
        (0, HEADER_BYTES - 1),  # its check
        (0, HEADER_BYTES + 10),  # its tag, where it has one
        (0, HEADER_BYTES + 500_000),  # the payload
        (3, HEADER_BYTES + 20),
        (3, -1),  # the last byte of the record before: of its tag, where it has one
    ],
)
async def test_what_arrives_damaged_is_sent_again(ends: Ends, number: int, position: int) -> None:
    assert await arrives(ends, flip(ends.record(number) + position)) == 2


@pytest.mark.usefixtures("impatient")
async def test_what_is_damaged_every_time_is_never_stored(ends: Ends) -> None:
    def spoil(_number: int, passed: int, part: bytes) -> bytes:
        return flipped(part, ends.record(0) + HEADER_BYTES + 1000 - passed)

    why = (
        "message 1 of the connection arrived with a broken seal"
        if ends.encrypted
        else "the record at 0 arrived damaged"
    )
    async with ends.both(["a"], spoil) as (incoming, outgoing, _):
        outgoing.finish(SIZES)
        with pytest.raises(Damaged, match=why):
            await outgoing.wait()
        with pytest.raises(Damaged, match=why):
            await incoming.wait(30)
    assert ends.arrived(["a"]) == {"a": b""}
    assert not (ends.there / "a.done").exists()


async def test_a_record_that_is_left_out_is_missed(ends: Ends) -> None:
    begin, end = ends.record(1), ends.record(2)

    def leave_out(number: int, passed: int, part: bytes) -> bytes:
        return part[: max(0, begin - passed)] + part[max(0, end - passed) :] if number == 0 else part

    assert await arrives_in_the_end(ends, leave_out)


async def test_a_record_that_is_repeated_is_not_stored_twice(ends: Ends) -> None:
    first = b""

    def repeat(number: int, passed: int, part: bytes) -> bytes:
        nonlocal first
        begin, end = ends.record(0) - passed, ends.record(1) - passed
        if number or end <= 0:
            return part
        first += part[max(0, begin) : end]
        return part[:end] + first + part[end:] if end <= len(part) else part

    assert await arrives_in_the_end(ends, repeat)


async def arrives_in_the_end(ends: Ends, meddle: Meddle) -> bool:
    """Or, as nobody but a stranger sends such records, ends the move where nothing is sealed."""
    async with ends.both(["a"], meddle) as (incoming, outgoing, meddler):
        outgoing.finish(SIZES)
        if ends.encrypted:
            await outgoing.wait()
            assert await incoming.wait(30) == SIZES
            assert ends.arrived(["a"]) == {"a": CONTENT}
            return meddler.connections == 2
        with pytest.raises(Damaged, match="DATA record for "):
            await outgoing.wait()
    return CONTENT.startswith(ends.arrived(["a"])["a"])


@pytest.mark.usefixtures("impatient")
async def test_a_stripe_without_its_end_is_not_done(ends: Ends) -> None:
    end = ends.record(6) + ends.travels(HEADER_BYTES, 5)

    def cut_the_end(number: int, passed: int, part: bytes) -> bytes | None:
        if number:
            return cut_at(GREETING_BYTES, 99)(number, passed, part)
        return part[: max(0, end - passed)]

    async with ends.both(["a"], cut_the_end) as (incoming, outgoing, meddler):
        outgoing.finish(SIZES)
        await until(lambda: (ends.there / "a").stat().st_size == len(CONTENT))
        meddler.cut()
        with pytest.raises(Unreachable):
            await incoming.wait(30)
        with pytest.raises(Unreachable):
            await outgoing.wait()
    assert ends.arrived(["a"]) == {"a": CONTENT}
    assert not (ends.there / "a.done").exists()


async def test_a_first_word_that_was_changed_is_not_believed(ends: Ends) -> None:
    async with ends.incoming(["a"]) as incoming, Meddler(incoming.port, None, flip(ANSWER_BYTES)) as meddler:
        with pytest.raises(Damaged, match="broken seal" if ends.encrypted else "makes no sense"):
            async with ends.outgoing(meddler.port, incoming.key, ["a"]):
                pass
        assert incoming.failed is None


@pytest.mark.parametrize("position", [0, REPLY_BYTES - 1])
async def test_a_last_word_that_was_changed_is_asked_for_again(encrypted: Ends, position: int) -> None:
    encrypted.fill({"a": CONTENT})
    done = ANSWER_BYTES + encrypted.travels(REPLY_BYTES)
    async with encrypted.both(["a"], None, flip(done + position)) as (incoming, outgoing, meddler):
        outgoing.finish(SIZES)
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert await incoming.wait(30) == SIZES
        assert meddler.connections == 2


@pytest.mark.parametrize("said", [reply(Kind.DONE, len(CONTENT)), bytes(REPLY_BYTES)], ids=["done", "zeros"])
async def test_a_strangers_last_word_is_not_believed(encrypted: Ends, said: bytes) -> None:
    """Somebody passes on the proofs and the first word, keeps the records for himself, and says that all is well."""
    encrypted.fill({"a": CONTENT})
    first_word = ANSWER_BYTES + encrypted.travels(REPLY_BYTES)
    async with encrypted.incoming(["a"]) as incoming:

        def keep(_number: int, passed: int, part: bytes) -> bytes:
            return part[: max(0, GREETING_BYTES - passed)]

        def answer(_number: int, passed: int, part: bytes) -> bytes:
            return part + said + bytes(TAG_BYTES) if passed + len(part) == first_word else part

        async with (
            Meddler(incoming.port, keep, answer) as meddler,
            encrypted.outgoing(meddler.port, incoming.key, ["a"]) as outgoing,
        ):
            outgoing.finish(SIZES)
            with pytest.raises(Damaged, match="message 1 of the connection arrived with a broken seal"):
                await outgoing.wait()
    assert encrypted.arrived(["a"]) == {"a": b""}


# ---------------------------------------------------------------- processes


@pytest.mark.usefixtures("impatient")
async def test_a_sender_that_is_killed_is_an_error_at_both_ends(ends: Ends) -> None:
    async with ends.both(["a"]) as (incoming, outgoing, _):
        os.kill(one_child("send"), signal.SIGKILL)
        with pytest.raises(Internal, match="ended with SIGKILL"):
            await outgoing.wait()
        with pytest.raises(Unreachable, match="a from node node-1"):
            await incoming.wait(30)


@pytest.mark.usefixtures("impatient")
async def test_a_receiver_that_is_killed_is_an_error_at_both_ends(ends: Ends) -> None:
    async with ends.both(["a"]) as (incoming, outgoing, _):
        os.kill(one_child("receive"), signal.SIGKILL)
        with pytest.raises(Internal, match="ended with SIGKILL"):
            await incoming.wait(30)
        with pytest.raises(Unreachable, match="node-2"):
            await outgoing.wait()


async def test_the_first_failure_ends_all_receivers_and_is_the_one_that_is_told(plain: Ends) -> None:
    plain.fill({"b": CONTENT})
    names = ["a", "b"]
    async with plain.incoming(names) as incoming, plain.outgoing(incoming.port, incoming.key, names) as outgoing:
        first = children_named("receive")[1]
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (plain.there / "a").stat().st_size == 2 * MIB)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not children_named("receive"))
        with pytest.raises(Internal, match=rf"pid {first}\) ended with SIGKILL"):
            await incoming.wait(30)


async def test_the_first_failure_ends_all_senders_and_is_the_one_that_is_told(plain: Ends) -> None:
    """Also one that waits for what never comes, which would notice nothing by itself."""
    plain.fill({"b": CONTENT})
    names = ["a", "b"]
    async with plain.incoming(names) as incoming, plain.outgoing(incoming.port, incoming.key, names) as outgoing:
        other, first = children_named("send")
        os.kill(other, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not children_named("send"))
        with pytest.raises(Internal, match=rf"pid {first}\) ended with SIGKILL"):
            await outgoing.wait()
        outgoing.advance("a", MIB)  # as whoever still copies does
        outgoing.finish({"a": len(CONTENT), "b": len(CONTENT)})
    assert (plain.here / "b").read_bytes() == CONTENT


async def test_a_file_that_somebody_else_writes_is_left_to_them(plain: Ends) -> None:
    content = noise(MIB) + bytes(2 * MIB)
    sizes = plain.fill({"a": content})
    async with plain.both(["a"]) as (incoming, outgoing, _):
        outgoing.advance("a", MIB)
        await until(lambda: (plain.there / "a").stat().st_size == MIB)
        (plain.there / "a").write_bytes(CONTENT)
        outgoing.finish(sizes)
        with pytest.raises(Internal, match=rf"somebody else writes .*/a: it has {len(CONTENT)} bytes, {MIB} came"):
            await outgoing.wait()
        with pytest.raises(Internal, match="somebody else writes"):
            await incoming.wait(30)
    assert plain.arrived(["a"]) == {"a": CONTENT}


async def test_a_child_that_breaks_down_is_quoted(plain: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.device.incoming._RECEIVE", "snapshotd.transport.device.no_such_thing")
    with pytest.raises(
        Internal, match=r"(?s)ended with status 1: .*No module named snapshotd.transport.device.no_such_thing"
    ):
        async with plain.incoming(["a"]):
            pass


async def test_a_child_that_hangs_is_given_up_and_quoted(plain: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    async with plain.incoming(["a"]) as incoming:
        monkeypatch.setattr("snapshotd.transport.device.child.READY_S", 0.1)
        monkeypatch.setattr("snapshotd.transport.device.incoming._RECEIVE", "tests.transport.device.silent")
        monkeypatch.setattr("snapshotd.transport.device.outgoing._SEND", "tests.transport.device.silent")
        with pytest.raises(Internal, match="was not ready in"):
            async with plain.incoming(["b"]):
                pass
        with pytest.raises(Internal, match="was not ready in"):
            async with plain.outgoing(incoming.port, incoming.key, ["a"]):
                pass
    begun = plain.there / "begun"
    child = await Child.start("tests.transport.device.silent", {"path": str(begun)})
    try:
        await until(begun.exists)
        with pytest.raises(Internal, match="was not ready in 0 s: the disk does not answer"):
            await child.ready()
    finally:
        await child.close()


def test_children_end_with_their_daemon(plain: Ends) -> None:
    daemon = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("daemon.py")), str(plain.here), str(plain.there)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    with daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "open\n"
        pidfds = [os.pidfd_open(pid) for pid in children_of(daemon.pid)]
        assert len(pidfds) == 2
        daemon.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 30)[0] == [pidfd]  # it has ended
        os.close(pidfd)


# ---------------------------------------------------------------- room


async def test_a_full_disk_is_said_at_both_ends(ends: Ends) -> None:
    with files_end_at(2 * MIB):
        opened = ends.incoming(["a"])
        incoming = await opened.__aenter__()
    try:
        async with ends.outgoing(incoming.port, incoming.key, ["a"]) as outgoing:
            outgoing.finish(SIZES)
            with pytest.raises(Full, match=r"writing .*/a: "):
                await outgoing.wait()
        with pytest.raises(Full, match=r"writing .*/a: "):
            await incoming.wait(30)
    finally:
        await opened.__aexit__(None, None, None)
    assert CONTENT.startswith((ends.there / "a").read_bytes())


@pytest.mark.root
async def test_a_full_tmpfs_is_full(plain: Ends) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(plain.there)], check=True)
    try:
        with pytest.raises(Full, match="100 MiB is to come"):
            async with plain.incoming(["a"], expected_bytes=100 * MIB):
                pass
        failed: list[SnapshotError | None] = []
        async with plain.both(["a"]) as (incoming, outgoing, _):
            outgoing.finish(SIZES)
            with pytest.raises(Full, match="No space left on device"):
                await outgoing.wait()
            failed.append(incoming.failed)
        assert isinstance(failed[0], Full)
    finally:
        subprocess.run(["umount", str(plain.there)], check=True)
