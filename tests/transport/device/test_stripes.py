"""What is sent arrives, whatever its content and however it grows. Nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from snapshotd.api.errors import Damaged, Internal, Timeout
from snapshotd.transport.device.outgoing import Totals
from snapshotd.transport.device.records import RECORD_BYTES
from snapshotd.transport.device.stripe_names import MAX_STRIPES, checked, purpose_of
from snapshotd.transport.listener import KEY_BYTES
from tests.transport.device.channel import MIB, Nodes, children, noise, until


async def test_stripes_arrive_while_they_grow(nodes: Nodes) -> None:
    # The last one or two random bytes, which are a separate record, are sometimes zero.
    contents = {f"device-7-{number}": noise(5 * MIB) + b"x" * number for number in range(3)}
    async with nodes.both(list(contents)) as (incoming, outgoing, _):
        for step in range(1, 6):
            for name, content in contents.items():
                with (nodes.here / name).open("ab") as file:
                    file.write(content[(step - 1) * MIB : step * MIB])
                outgoing.advance(name, step * MIB)
            while any((nodes.there / name).stat().st_size < step * MIB for name in contents):
                assert outgoing.failed is None
                await asyncio.sleep(0.01)
            for name, content in contents.items():
                assert (nodes.there / name).read_bytes() == content[: step * MIB]
        sizes = nodes.fill(contents)
        outgoing.finish(sizes)
        totals = await outgoing.wait()
        assert await incoming.wait(30) == sizes
        assert (totals.bytes, totals.sent, totals.zero, totals.same) == (sum(sizes.values()), sum(sizes.values()), 0, 0)
        assert totals.seconds > 0
        assert outgoing.sent_bytes == incoming.received_bytes == totals.bytes
    assert nodes.arrived(list(contents)) == contents
    for name, size in sizes.items():
        assert json.loads((nodes.there / f"{name}.done").read_text()) == {"size": size}
        assert (nodes.there / name).stat().st_mode & 0o777 == 0o600


async def test_zeros_and_repetitions_are_not_sent(nodes: Nodes) -> None:
    size = RECORD_BYTES
    one, two = noise(size), noise(size)
    content = one + bytes(2 * size) + two + one + one + bytes(size - 1) + b"\1" + two + bytes(100)
    nodes.fill({"a": content})
    async with nodes.both(["a"]) as (incoming, outgoing, _):
        outgoing.finish({"a": len(content)})
        totals = await outgoing.wait()
        assert await incoming.wait(30) == {"a": len(content)}
    assert totals == Totals(len(content), 3 * size, 2 * size + 100, 3 * size, totals.seconds)
    assert nodes.arrived(["a"]) == {"a": content}
    assert (nodes.there / "a").stat().st_blocks * 512 <= 7 * size  # zeros are holes


async def test_stripe_may_be_empty(nodes: Nodes) -> None:
    content = noise(10)
    nodes.fill({"a": content})  # b does not exist
    async with nodes.both(["a", "b"]) as (incoming, outgoing, _):
        outgoing.finish({"a": 10, "b": 0})
        assert (await outgoing.wait()).bytes == 10
        assert await incoming.wait(30) == {"a": 10, "b": 0}
    assert nodes.arrived(["a", "b"]) == {"a": content, "b": b""}


async def test_memory_is_reserved_ahead_and_the_surplus_is_released(plain: Nodes) -> None:
    content = noise(2 * MIB)
    nodes = plain
    nodes.fill({"a": content})
    async with nodes.incoming(["a"], expected_bytes=100 * MIB) as incoming:
        assert (nodes.there / "a").stat().st_blocks == 0  # if the source never connects, the image needs the memory
        async with nodes.outgoing(incoming.port, incoming.key, ["a"]) as outgoing:
            await until(lambda: (nodes.there / "a").stat().st_blocks * 512 >= 100 * MIB)
            assert (nodes.there / "a").stat().st_size == 0
            outgoing.finish({"a": len(content)})
            await outgoing.wait()
            await incoming.wait(30)
    assert nodes.arrived(["a"]) == {"a": content}
    assert (nodes.there / "a").stat().st_blocks * 512 < 3 * MIB


async def test_files_of_an_earlier_attempt_are_replaced(plain: Nodes) -> None:
    left = noise(100)
    for name in ("a", "a.done"):
        (plain.there / name).write_bytes(left)
    with (plain.there / "a").open("rb") as reader:
        async with plain.incoming(["a"]):
            assert (plain.there / "a").read_bytes() == b""
            assert not (plain.there / "a.done").exists()
        assert reader.read() == left  # a process that still reads the old file sees all of it


async def test_close_in_the_middle_leaves_nothing(nodes: Nodes) -> None:
    nodes.fill({"a": noise(3 * MIB), "b": noise(MIB)})
    async with nodes.both(["a", "b"]) as (incoming, outgoing, _):
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (nodes.there / "a").stat().st_size >= 2 * MIB)
        assert len(children()) == 4
        waiting = [asyncio.create_task(outgoing.wait()), asyncio.create_task(incoming.wait(30))]
        await asyncio.sleep(0)
        await outgoing.close()
        await incoming.close()
        assert children() == []
        await outgoing.close()
        await incoming.close()
        outgoing.advance("a", 3 * MIB)  # the shim may still be copying
        outgoing.finish({"a": 3 * MIB, "b": 0})
        for task in waiting:  # not taken for success
            with pytest.raises(Internal, match="closed before all stripes had arrived"):
                await task
    assert {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("stripe")} == set()


async def test_number_of_stripes_is_limited_to_what_a_connection_can_name(plain: Nodes) -> None:
    names = [f"device-1-{number}" for number in range(MAX_STRIPES)]
    assert checked(names) == names
    assert purpose_of(MAX_STRIPES - 1, names[-1]) == b"\xffdevice-1-255"
    for wrong in ([*names, "one-more"], []):
        with pytest.raises(
            Internal, match=f"{len(wrong)} stripes: a device-memory channel can have 1 to {MAX_STRIPES}"
        ):
            async with plain.incoming(wrong):
                pass


@pytest.mark.parametrize("names", [["../a"], ["a", "a"], ["a/b"], [""]])
async def test_name_that_is_not_an_image_file_name_is_refused(plain: Nodes, names: list[str]) -> None:
    with pytest.raises(Internal, match="cannot have the names"):
        async with plain.incoming(names):
            pass
    with pytest.raises(Internal, match="cannot have the names"):
        async with plain.outgoing(1, bytes(KEY_BYTES), names):
            pass


async def test_contradictory_sizes_are_damage(plain: Nodes) -> None:
    plain.fill({"a": noise(2 * MIB)})
    async with plain.both(["a"]) as (incoming, outgoing, _):
        with pytest.raises(Internal, match="final sizes of"):
            outgoing.finish({"b": 1})
        outgoing.advance("a", 2 * MIB)
        await until(lambda: (plain.there / "a").stat().st_size >= 2 * MIB)
        outgoing.finish({"a": MIB})
        with pytest.raises(Damaged, match="should end at 1048576, but 2097152 bytes of it were sent"):
            await outgoing.wait()
    async with plain.both(["a"]) as (incoming, outgoing, _):
        outgoing.finish({"a": 2 * MIB + 1})
        with pytest.raises(Damaged, match="less than the 2097153 bytes"):
            await outgoing.wait()
        with pytest.raises(Timeout, match="a did not arrive"):
            await incoming.wait(0)
    os.unlink(plain.here / "a")
    async with plain.both(["a"]) as (_, outgoing, _):
        outgoing.finish({"a": 1})
        with pytest.raises(Internal, match="No such file"):
            await outgoing.wait()
