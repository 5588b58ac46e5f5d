"""Stripes whose files are windows: nothing is received too far ahead, and nothing refers to bytes that were removed."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from snapshotd.transport.device.control_socket import Control
from snapshotd.transport.device.records import Kind
from snapshotd.transport.device.send import Sender
from tests.transport.device.channel import MIB, Nodes, noise, until

CONTENT = noise(12 * MIB)


async def test_no_more_is_received_than_the_window_allows(nodes: Nodes) -> None:
    sizes = nodes.fill({"a": CONTENT})
    async with (
        nodes.incoming(["a"], ahead_bytes=3 * MIB) as incoming,
        nodes.outgoing(incoming.port, incoming.key, ["a"]) as outgoing,
    ):
        outgoing.advance("a", len(CONTENT))
        outgoing.finish(sizes)
        await until(lambda: incoming.position("a") > 3 * MIB)  # it says so before it waits
        size = (nodes.there / "a").stat().st_size
        assert size == incoming.position("a") <= 4 * MIB
        incoming.consumed("a", 2 * MIB)
        await until(lambda: incoming.position("a") > 5 * MIB)
        assert (nodes.there / "a").stat().st_size <= 6 * MIB
        incoming.consumed("a", len(CONTENT))
        await asyncio.gather(incoming.wait(60), outgoing.wait())
    assert nodes.arrived(["a"]) == {"a": CONTENT}
    assert not (nodes.there / "a.done").exists(), "a daemon that restarts must not take a window for a whole stripe"


def test_equal_bytes_are_referred_to_only_within_the_window(tmp_path: Path) -> None:
    one, other = noise(MIB), noise(MIB)
    path = tmp_path / "a"
    path.write_bytes(one + other + one + other * 3 + one + one)
    ours, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    grown = os.eventfd(0)
    control = Control.__new__(Control)
    control._line = ours
    found = {}
    with ours, daemon:
        for window_bytes in (0, 2 * MIB):
            sender = Sender(control, str(path), grown, window_bytes)
            records = []
            for number in range(8):
                sender._offset = number * MIB
                records.append(sender._record(MIB))
            found[window_bytes] = [one.twin // MIB if one.kind is Kind.SAME else None for one in records]
            os.close(sender._file)
    os.close(grown)
    assert found[0] == [None, None, 0, 1, 1, 1, 0, 0]
    assert found[2 * MIB] == [None, None, 0, 1, None, 4, None, 6]
