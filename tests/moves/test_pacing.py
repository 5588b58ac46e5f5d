"""Which streams are limited by which bucket, and what a limit is taken off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.diagnosis.copies import copy_limit
from snapshotd.moves.jobs.pacing import Pacing
from snapshotd.moves.jobs.sending import Sending
from snapshotd.net import link_speed
from snapshotd.net.link_speed import Link
from snapshotd.selfcheck.finding import State
from snapshotd.transport import sockets
from snapshotd.transport.image.bulk_sender import BulkStream
from snapshotd.transport.image.frame import Frame, raw_frame
from snapshotd.transport.image.limited_stream import LimitedStream
from snapshotd.transport.pace import Bucket

IMAGE = "m-000000000001"
LINKS = {"10.1.0.1": Link("eth0", 1e9), "10.2.0.1": Link("eth1", 2e9), "10.3.0.1": Link("veth0", 0.0)}


class Stream(BulkStream):
    """A connection that notes what it gets."""

    def __init__(self, own_address: str) -> None:
        self.own_address, self.got = own_address, list[Frame]()

    async def send(self, frame: Frame) -> bool:
        self.got.append(frame)
        return True


def config(limit: str, **more: Any) -> Any:
    return SimpleNamespace(**{"copy_limit": limit, "advertise": "10.1.0.1:7070", "data_addresses": (), **more})


def buckets(pacing: Pacing, limit: str, *hosts: str) -> list[Bucket | None]:
    with pacing.copy(IMAGE) as copy:
        found = pacing.limited(copy, [Stream(host) for host in hosts], config(limit), LINKS)
        assert [one for one in found if isinstance(one, LimitedStream)] == copy.streams
    return [one._bucket if isinstance(one, LimitedStream) else None for one in found]


def test_all_copies_share_a_limit_in_bytes() -> None:
    pacing = Pacing()
    found = [*buckets(pacing, "2GB/s", "10.1.0.1", "10.2.0.1"), *buckets(pacing, "2GB/s", "10.3.0.1", "10.9.9.9")]
    assert len(set(found)) == 1
    assert found[0] is not None
    assert found[0].bytes_per_s == 2e9


def test_copies_over_one_interface_share_a_part_of_its_speed() -> None:
    pacing = Pacing()
    first, second, unknown = buckets(pacing, "30%", "10.1.0.1", "10.2.0.1", "10.3.0.1")
    assert unknown is None, "the speed of veth0 is not known"
    assert first is not None
    assert second is not None
    assert [first.bytes_per_s, second.bytes_per_s] == pytest.approx([3e8, 6e8])
    assert buckets(pacing, "30%", "10.2.0.1", "10.1.0.1") == [second, first]


def test_without_a_limit_streams_stay_as_they_are() -> None:
    assert buckets(Pacing(), "", "10.1.0.1", "10.2.0.1") == [None, None]


async def test_limited_stream_counts_what_it_sends_and_waits_until_the_limit_is_lifted() -> None:
    pacing = Pacing()
    never = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        await never.wait()

    with pacing.copy(IMAGE) as copy:
        (stream,) = pacing.limited(copy, [inner := Stream("10.1.0.1")], config("1MB/s"), LINKS)
        assert isinstance(stream, LimitedStream)
        stream._bucket = Bucket(1e6, lambda: 0.0, sleep)
        zeros = raw_frame(1, "pages-1.img", 0, bytes(1 << 20))
        for _ in range(100):  # pages of zeros are not sent: no limit holds them back
            assert await stream.send(zeros)
        assert await stream.send(raw_frame(2, "pages-1.img", 1 << 20, b"x" * (1 << 20)))
        waits = asyncio.create_task(stream.send(raw_frame(3, "pages-1.img", 2 << 20, b"x" * (1 << 20))))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(inner.got) == 101
        assert pacing.lift(IMAGE)
        assert await waits
        assert len(inner.got) == 102
    assert not pacing.lift(IMAGE), "it has been sent"


@pytest.mark.parametrize("committed", [False, True])
async def test_images_that_are_sent_to_resume_a_job_have_no_limit(committed: bool) -> None:
    """Those of a snapshot that counts are sent for a rollback, the others to a buddy."""
    node: Any = SimpleNamespace(config=config("1MB/s", node="a"), store_of=lambda _begin: SimpleNamespace(path=Path))
    move_log: Any = SimpleNamespace(move=IMAGE, committed=committed, begin=None)
    sending = Sending(node, move_log, pb.SendRequest(target_node="b"), pacing := Pacing())

    @asynccontextmanager
    async def opened() -> AsyncIterator[list[Stream]]:
        yield [Stream("127.0.0.1")]

    sink: Any = SimpleNamespace(streams=opened)
    async with sending._streams(sink) as streams:
        assert [isinstance(one, LimitedStream) for one in streams] == [not committed]
        assert pacing.lift(IMAGE) == (not committed)


def test_copies_of_one_image_to_several_buddies_are_lifted_together() -> None:
    pacing = Pacing()
    with pacing.copy(IMAGE) as first:
        with pacing.copy(IMAGE) as second:
            assert pacing.lift(IMAGE)
            assert first.lifted.is_set()
            assert second.lifted.is_set()
        with pacing.copy(IMAGE) as third:  # sent again
            assert not third.lifted.is_set()
        assert pacing.lift(IMAGE), "the first one is still on its way"
    assert not pacing.lift(IMAGE)


def test_speed_of_a_link_is_read_where_it_is_known(tmp_path: Path) -> None:
    for name, content in {"eth0": "25000\n", "down": "-1\n", "odd": "fast"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(content)
    found = [link_speed.bytes_per_s(name, tmp_path) for name in ("eth0", "down", "odd", "none", "../eth0")]
    assert found == [25e9 / 8, 0, 0, 0, 0]
    assert link_speed.links()["127.0.0.1"] == Link("lo", 0.0)
    assert link_speed.normal("fe80::0001%eth0") == "fe80::1"


def test_doctor_says_which_limit_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "links", lambda: LINKS)
    assert copy_limit(config("")) == []
    (fixed,) = copy_limit(config("2GB/s"))
    assert (fixed.state, "2 GB/s" in fixed.text) == (State.OK, True)
    (part,) = copy_limit(config("30%"))
    assert (part.state, "eth0 with 0.3 GB/s" in part.text) == (State.OK, True)
    found = copy_limit(config("30%", data_addresses=("10.2.0.1", "10.3.0.1", "10.9.9.9")))
    assert [one.state for one in found] == [State.OK, State.WARNING, State.WARNING]
    assert "the speed of veth0 is not known" in found[1].text


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_copies_have_a_low_priority(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as endpoint:
        sockets.go_last(endpoint)
        level, option = (
            (socket.IPPROTO_IP, socket.IP_TOS)
            if family == socket.AF_INET
            else (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        )
        assert endpoint.getsockopt(level, option) >> 2 == 8, "CS1"
        assert endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 2
