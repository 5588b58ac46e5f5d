"""A guest keeper whose move has ended does not stay: not if the daemon says so, and not if no daemon ever answers."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE

import pytest

from snapshotd.api.errors import NotFound
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.listener import NotWanted
from snapshotd.keepers.stdio_state import StdioState
from tests.keeper.guests import Guest, alive
from tests.keeper.nodes import Node, python, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="a guest keeper makes namespaces, which needs root"),
]

MOVE = "m-0123456789ab"


async def frozen(node: Node) -> tuple[KeeperLink, StdioState]:
    """A home keeper whose rank is stopped, and its stdio."""
    await node.launch(*python("import time; time.sleep(1000)"))
    link = await node.reported("connected")
    assert link.rank is not None
    await link.hold(MOVE)
    link.rank.signal(signal.SIGSTOP)
    return link, await link.drain(MOVE)


async def connects_again(other: Node, refusal: NotFound) -> None:
    """The daemon of the guest keeper is restarted, and refuses the keeper."""
    await other.stop()
    seen, other.refusal = len(other.hellos), refusal
    await other.start()
    await until(lambda: len(other.hellos) > seen)


async def test_guest_keeper_that_is_not_wanted_ends(node: Node, other: Node) -> None:
    link, state = await frozen(node)
    guest = await Guest.start(other, link, MOVE, state)
    await connects_again(other, NotWanted("its move was aborted"))
    await until(lambda: not alive(guest.keeper_pid))
    guest.criu.close()


async def test_guest_keeper_that_is_only_refused_tries_again(node: Node, other: Node) -> None:
    link, state = await frozen(node)
    guest = await Guest.start(other, link, MOVE, state)
    guest.criu.close()
    await connects_again(other, NotFound("not registered yet"))
    seen = len(other.hellos)
    await until(lambda: len(other.hellos) > seen + 1)
    assert alive(guest.keeper_pid)


async def test_activated_rank_outlives_a_daemon_that_has_lost_its_state(node: Node, other: Node) -> None:
    link, state = await frozen(node)
    guest = await Guest.start(other, link, MOVE, state)
    await guest.restore(("sleep", "1000"))
    await guest.activate()
    await connects_again(other, NotWanted("unknown"))
    seen = len(other.hellos)
    await until(lambda: len(other.hellos) > seen + 1)
    assert alive(guest.keeper_pid)


async def test_guest_keeper_without_criu_and_without_a_welcome_ends(node: Node, other: Node) -> None:
    """Its daemon was killed when it had started the keeper, and is not started again."""
    home, state = await frozen(node)
    await other.stop()
    program = ("-c", "from shim.keeper import guest; guest.WELCOME_S = 0.1; guest.main()")
    keeper, orders, ours = await Guest.begin(other, home, MOVE, state, program=program, stderr=PIPE)
    ours.close()  # criu ends, as with its daemon
    async with asyncio.timeout(60):
        await keeper.communicate(orders)  # until the last process with this stderr has ended: the keeper
