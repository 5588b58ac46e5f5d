"""Broken connections, damaged bytes, dead processes and full disks."""

from __future__ import annotations

import asyncio
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
from snapshotd.transport.device.connection import read_reply
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.device.records import HEADER_BYTES, RECORD_BYTES, REPLY_BYTES, Kind, Record, reply
from snapshotd.transport.routes import Route, routes_to
from snapshotd.transport.sealed import TAG_BYTES, Connection
from tests.transport.device.channel import (
    MIB,
    TARGET,
    Alter,
    Nodes,
    Proxy,
    children,
    children_of,
    flip,
    flipped,
    given_to,
    noise,
    until,
)

CONTENT = noise(6 * MIB + 5)
SIZES = {"a": len(CONTENT)}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time after which a lost connection is given up."""
    monkeypatch.setattr("snapshotd.transport.device.incoming.LOST_S", 2.0)
    monkeypatch.setattr("snapshotd.transport.device.outgoing.REOPEN_S", 2.0)


@pytest.fixture(autouse=True)
def filled(request: pytest.FixtureRequest) -> None:
    for name in ("nodes", "plain"):
        if name in request.fixturenames:
            request.getfixturevalue(name).fill({"a": CONTENT})


def cut_at(position: int, connections: int) -> Alter:
    """Cuts each of the first `connections` connections after `position` bytes."""
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
def files_end_at(size: int) -> Iterator[None]:
    """Limits the file size for processes that are started inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def arrives(nodes: Nodes, alter: Alter) -> int:
    """Sends CONTENT. Returns the number of connections that this took."""
    async with nodes.both(["a"], alter) as (incoming, outgoing, proxy):
        outgoing.finish(SIZES)
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert await incoming.wait(30) == SIZES
    assert nodes.arrived(["a"]) == {"a": CONTENT}
    return proxy.connections


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize("position", [2 * MIB + 1000, 5 * MIB])
async def test_cut_connection_is_replaced_and_transfer_continues(nodes: Nodes, position: int) -> None:
    passed_again = 0

    def cut(number: int, passed: int, part: bytes) -> bytes | None:
        nonlocal passed_again
        passed_again += len(part) if number else 0
        return cut_at(position, 1)(number, passed, part)

    assert await arrives(nodes, cut) == 2
    assert passed_again < len(CONTENT) - position + 2 * MIB  # it did not start over


async def test_connection_may_break_three_times(nodes: Nodes) -> None:
    assert await arrives(nodes, cut_at(MIB + 200_000, 3)) == 4


@pytest.mark.usefixtures("impatient")
async def test_connection_that_breaks_every_time_is_unreachable(nodes: Nodes) -> None:
    async with nodes.both(["a"], cut_at(20_000, 99)) as (incoming, outgoing, proxy):
        outgoing.finish(SIZES)
        with pytest.raises(Unreachable, match="a to node node-2: "):
            await outgoing.wait()
        with pytest.raises(Unreachable, match="a from node node-1: "):
            await incoming.wait(30)
        assert outgoing.failed is not None
        assert incoming.failed is not None
        assert proxy.connections == 4


async def test_a_stripe_whose_own_route_is_dead_takes_another(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    sizes = nodes.fill({name: noise(2 * MIB) for name in ("a", "b", "c")})
    names = list(sizes)
    async with nodes.incoming(names, data_addresses=["127.0.0.2", "127.0.0.3"]) as incoming:
        with socket.socket() as dead:
            dead.bind(("127.0.0.4", 0))  # and does not listen
            endpoints = [incoming.endpoints[0], f"127.0.0.4:{dead.getsockname()[1]}", incoming.endpoints[1]]
            routes = routes_to("127.0.0.1:1", 1, endpoints, [])
            async with nodes.outgoing(0, incoming.key, names, routes) as outgoing:
                outgoing.finish(sizes)
                await outgoing.wait()
        assert await incoming.wait(60) == sizes
    assert nodes.arrived(names) == {name: (nodes.here / name).read_bytes() for name in names}
    assert "no connection for device memory: node node-2 at 127.0.0.4" in caplog.text


@pytest.mark.usefixtures("impatient")
async def test_target_that_is_gone_is_unreachable(nodes: Nodes) -> None:
    async with nodes.both(["a"]) as (incoming, outgoing, proxy):
        await (
            proxy.__aexit__()
        )  # first: a connection made between the two would wait for an answer instead of being refused
        await incoming.close()
        outgoing.finish(SIZES)
        with pytest.raises(Unreachable, match="Connection refused"):
            await outgoing.wait()
    with pytest.raises(Unreachable, match="node node-2 at 127"):
        async with nodes.outgoing(proxy.port, incoming.key, ["a"]):
            pass


async def test_opening_is_cancelled_at_once_although_the_target_is_silent(
    plain: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotd.transport.device.outgoing.CONNECT_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        opening = asyncio.create_task(
            Outgoing.open(
                *([Route("127.0.0.1", server.getsockname()[1])], bytes(32), TARGET, plain.source, plain.here, ["a"]),
                encrypted=False,
            )
        )
        accepted, _ = await in_thread(server.accept)
        with accepted:
            assert await in_thread(accepted.recv, 1) == b"\x16"  # the handshake has begun
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(opening, 60)


async def test_sender_that_missed_the_confirmation_gets_it_again(nodes: Nodes) -> None:
    async with nodes.both(["a"]) as (incoming, outgoing, proxy):
        proxy.muted = True
        outgoing.finish(SIZES)
        assert await incoming.wait(30) == SIZES
        proxy.muted = False
        proxy.cut()
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert proxy.connections == 2


async def test_stripe_is_done_only_after_the_sender_was_told(tmp_path: Path, nothing_left: None) -> None:
    settings = {"expected_bytes": 0, "ring_bytes": 0, "path": str(tmp_path / "a")}
    child = await Child.start("snapshotd.transport.device.receive", settings)
    end = Record(Kind.END, 0, 0).header()
    try:
        assert await child.hear() == {"ready": True}
        with given_to(child) as sender:
            assert await in_thread(read_reply, Connection(sender)) == (Kind.HAVE, 0)
            sender.shutdown(socket.SHUT_RD)  # a socket pair: sending the answer fails
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


async def test_new_connection_replaces_one_that_hangs(nodes: Nodes) -> None:
    """The network lost the first one, and neither side noticed."""
    async with nodes.both(["a"]) as (incoming, outgoing, proxy):
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (nodes.there / "a").stat().st_size >= 2 * MIB)
        proxy.cut_source()
        outgoing.finish(SIZES)
        await outgoing.wait()
        assert await incoming.wait(30) == SIZES
        assert proxy.connections == 2
    assert nodes.arrived(["a"]) == {"a": CONTENT}


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("number", "position"),
    [
        (0, 3),  # the header
        (0, HEADER_BYTES - 1),  # its checksum
        (0, HEADER_BYTES + 10),  # its tag, if encrypted
        (0, HEADER_BYTES + 500_000),  # the payload
        (3, HEADER_BYTES + 20),
        (3, -1),  # the last byte of the record before: of its tag, if encrypted
    ],
)
async def test_damaged_record_is_sent_again(nodes: Nodes, number: int, position: int) -> None:
    assert await arrives(nodes, flip(nodes.record(number) + position)) == 2


@pytest.mark.usefixtures("impatient")
async def test_record_damaged_every_time_is_never_stored(nodes: Nodes) -> None:
    def spoil(_number: int, passed: int, part: bytes) -> bytes:
        return flipped(part, nodes.record(0) + HEADER_BYTES + 1000 - passed)

    why = "message 1 of the connection failed authentication" if nodes.encrypted else "the record at 0 arrived damaged"
    async with nodes.both(["a"], spoil) as (incoming, outgoing, _):
        outgoing.finish(SIZES)
        with pytest.raises(Damaged, match=why):
            await outgoing.wait()
        with pytest.raises(Damaged, match=why):
            await incoming.wait(30)
    assert nodes.arrived(["a"]) == {"a": b""}
    assert not (nodes.there / "a.done").exists()


async def test_missing_record_is_detected(nodes: Nodes) -> None:
    begin, end = nodes.record(1), nodes.record(2)

    def leave_out(number: int, passed: int, part: bytes) -> bytes:
        return part[: max(0, begin - passed)] + part[max(0, end - passed) :] if number == 0 else part

    assert await arrives_in_the_end(nodes, leave_out)


async def test_repeated_record_is_not_stored_twice(nodes: Nodes) -> None:
    first = b""

    def repeat(number: int, passed: int, part: bytes) -> bytes:
        nonlocal first
        begin, end = nodes.record(0) - passed, nodes.record(1) - passed
        if number or end <= 0:
            return part
        first += part[max(0, begin) : end]
        return part[:end] + first + part[end:] if end <= len(part) else part

    assert await arrives_in_the_end(nodes, repeat)


async def arrives_in_the_end(nodes: Nodes, alter: Alter) -> bool:
    """Encrypted. On a plain connection the transfer fails instead, because no honest peer sends such records."""
    async with nodes.both(["a"], alter) as (incoming, outgoing, proxy):
        outgoing.finish(SIZES)
        if nodes.encrypted:
            await outgoing.wait()
            assert await incoming.wait(30) == SIZES
            assert nodes.arrived(["a"]) == {"a": CONTENT}
            return proxy.connections == 2
        with pytest.raises(Damaged, match="DATA record for "):
            await outgoing.wait()
    return CONTENT.startswith(nodes.arrived(["a"])["a"])


@pytest.mark.usefixtures("impatient")
async def test_stripe_without_end_record_is_not_done(nodes: Nodes) -> None:
    end = nodes.record(len(CONTENT) // RECORD_BYTES) + nodes.travels(HEADER_BYTES, 5)

    def cut_the_end(number: int, passed: int, part: bytes) -> bytes | None:
        if number:
            return cut_at(0, 99)(number, passed, part)
        return part[: max(0, end - passed)]

    async with nodes.both(["a"], cut_the_end) as (incoming, outgoing, proxy):
        outgoing.finish(SIZES)
        await until(lambda: (nodes.there / "a").stat().st_size == len(CONTENT))
        proxy.cut()
        with pytest.raises(Unreachable):
            await incoming.wait(30)
        with pytest.raises(Unreachable):
            await outgoing.wait()
    assert nodes.arrived(["a"]) == {"a": CONTENT}
    assert not (nodes.there / "a.done").exists()


async def test_altered_first_reply_is_rejected(nodes: Nodes) -> None:
    async with nodes.incoming(["a"]) as incoming, Proxy(incoming.port, None, flip(0)) as proxy:
        with pytest.raises(Damaged, match="failed authentication" if nodes.encrypted else "invalid reply"):
            async with nodes.outgoing(proxy.port, incoming.key, ["a"]):
                pass
        assert incoming.failed is None


@pytest.mark.parametrize("position", [0, REPLY_BYTES - 1])
async def test_altered_confirmation_is_requested_again(encrypted: Nodes, position: int) -> None:
    encrypted.fill({"a": CONTENT})
    done = encrypted.travels(REPLY_BYTES)
    async with encrypted.both(["a"], None, flip(done + position)) as (incoming, outgoing, proxy):
        outgoing.finish(SIZES)
        assert (await outgoing.wait()).bytes == len(CONTENT)
        assert await incoming.wait(30) == SIZES
        assert proxy.connections == 2


@pytest.mark.parametrize("said", [reply(Kind.DONE, len(CONTENT)), bytes(REPLY_BYTES)], ids=["done", "zeros"])
async def test_forged_confirmation_is_rejected(encrypted: Nodes, said: bytes) -> None:
    """An attacker passes on the handshake and the first reply, keeps the records, and forges DONE."""
    encrypted.fill({"a": CONTENT})
    first_reply = encrypted.travels(REPLY_BYTES)
    async with encrypted.incoming(["a"]) as incoming:

        def keep(_number: int, _passed: int, _part: bytes) -> bytes:
            return b""

        def answer(_number: int, passed: int, part: bytes) -> bytes:
            return part + said + bytes(TAG_BYTES) if passed + len(part) == first_reply else part

        async with (
            Proxy(incoming.port, keep, answer) as proxy,
            encrypted.outgoing(proxy.port, incoming.key, ["a"]) as outgoing,
        ):
            outgoing.finish(SIZES)
            with pytest.raises(Damaged, match="message 1 of the connection failed authentication"):
                await outgoing.wait()
    assert encrypted.arrived(["a"]) == {"a": b""}


# ---------------------------------------------------------------- processes


@pytest.mark.usefixtures("impatient")
async def test_killed_sender_is_an_error_on_both_nodes(nodes: Nodes) -> None:
    async with nodes.both(["a"]) as (incoming, outgoing, _):
        os.kill(one_child("send"), signal.SIGKILL)
        with pytest.raises(Internal, match="exited with SIGKILL"):
            await outgoing.wait()
        with pytest.raises(Unreachable, match="a from node node-1"):
            await incoming.wait(30)


@pytest.mark.usefixtures("impatient")
async def test_killed_receiver_is_an_error_on_both_nodes(nodes: Nodes) -> None:
    async with nodes.both(["a"]) as (incoming, outgoing, _):
        os.kill(one_child("receive"), signal.SIGKILL)
        with pytest.raises(Internal, match="exited with SIGKILL"):
            await incoming.wait(30)
        with pytest.raises(Unreachable, match="node-2"):
            await outgoing.wait()


async def test_first_failure_ends_all_receivers_and_is_reported(plain: Nodes) -> None:
    plain.fill({"b": CONTENT})
    names = ["a", "b"]
    async with plain.incoming(names) as incoming, plain.outgoing(incoming.port, incoming.key, names) as outgoing:
        first = children_named("receive")[1]
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (plain.there / "a").stat().st_size == 2 * MIB)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not children_named("receive"))
        with pytest.raises(Internal, match=rf"pid {first}\) exited with SIGKILL"):
            await incoming.wait(30)


async def test_first_failure_ends_all_senders_and_is_reported(plain: Nodes) -> None:
    """Including a stopped one, which would notice nothing by itself."""
    plain.fill({"b": CONTENT})
    names = ["a", "b"]
    async with plain.incoming(names) as incoming, plain.outgoing(incoming.port, incoming.key, names) as outgoing:
        other, first = children_named("send")
        os.kill(other, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not children_named("send"))
        with pytest.raises(Internal, match=rf"pid {first}\) exited with SIGKILL"):
            await outgoing.wait()
        outgoing.advance("a", MIB)  # as the copy that is still running does
        outgoing.finish({"a": len(CONTENT), "b": len(CONTENT)})
    assert (plain.here / "b").read_bytes() == CONTENT


async def test_file_with_another_writer_is_left_alone(plain: Nodes) -> None:
    content = noise(MIB) + bytes(2 * MIB)
    sizes = plain.fill({"a": content})
    async with plain.both(["a"]) as (incoming, outgoing, _):
        outgoing.advance("a", MIB)
        await until(lambda: (plain.there / "a").stat().st_size == MIB)
        (plain.there / "a").write_bytes(CONTENT)
        outgoing.finish(sizes)
        with pytest.raises(Internal, match=rf"another process writes .*/a: it has {len(CONTENT)} bytes, {MIB} were"):
            await outgoing.wait()
        with pytest.raises(Internal, match="another process writes"):
            await incoming.wait(30)
    assert plain.arrived(["a"]) == {"a": CONTENT}


async def test_output_of_a_failed_child_is_quoted(plain: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.transport.device.incoming._RECEIVE", "snapshotd.transport.device.no_such_thing")
    with pytest.raises(
        Internal, match=r"(?s)exited with status 1: .*No module named snapshotd.transport.device.no_such_thing"
    ):
        async with plain.incoming(["a"]):
            pass


async def test_output_of_a_hanging_child_is_quoted(plain: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_children_die_with_their_daemon(tmp_path: Path) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.device.daemon", str(tmp_path)],
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
        assert select.select([pidfd], [], [], 30)[0] == [pidfd]  # it has exited
        os.close(pidfd)


# ---------------------------------------------------------------- full disks


async def test_full_disk_is_reported_on_both_nodes(nodes: Nodes) -> None:
    with files_end_at(2 * MIB):
        opened = nodes.incoming(["a"])
        incoming = await opened.__aenter__()
    try:
        async with nodes.outgoing(incoming.port, incoming.key, ["a"]) as outgoing:
            outgoing.finish(SIZES)
            with pytest.raises(Full, match=r"writing .*/a: "):
                await outgoing.wait()
        with pytest.raises(Full, match=r"writing .*/a: "):
            await incoming.wait(30)
    finally:
        await opened.__aexit__(None, None, None)
    assert CONTENT.startswith((nodes.there / "a").read_bytes())


@pytest.mark.root
async def test_full_tmpfs_is_reported(plain: Nodes) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(plain.there)], check=True)
    try:
        with pytest.raises(Full, match="100 MiB of device memory are expected"):
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
