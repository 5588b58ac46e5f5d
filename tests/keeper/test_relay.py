"""Tests that the launcher sees no difference when the rank is on another node, whatever the connection loses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from asyncio.subprocess import Process
from pathlib import Path

import msgspec
import pytest

from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.stdio_state import StdioState
from tests.descriptors import open_links
from tests.keeper.guests import Guest, Way, alive
from tests.keeper.nodes import Node, python, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="a guest keeper makes namespaces, which needs root"),
]

MOVE = "m-0123456789ab"

#: Copies its stdin to its stdout until EOF.
ECHO = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]"


async def freeze(link: KeeperLink) -> StdioState:
    """The source's part of a move, with SIGSTOP instead of the freezer."""
    assert link.rank is not None
    await link.hold(MOVE)
    link.rank.signal(signal.SIGSTOP)
    rank = link.rank
    await until(lambda: Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return await link.drain(MOVE)


async def move_away(node: Node, other: Node, argv: tuple[str, ...]) -> tuple[Guest, Way]:
    """Moves the rank of `node`'s only keeper; on the other node it continues as `argv`."""
    link = await node.reported("connected")
    guest = await Guest.start(other, link, MOVE, await freeze(link))
    await guest.restore(argv)
    way = Way(node, other, link.uid)
    await guest.activate()
    await way.open()  # the guest keeper's sync arrives before the home keeper knows the outcome
    await link.away(MOVE, "node-2")
    assert link.rank is not None
    link.rank.signal(signal.SIGKILL)
    return guest, way


async def test_output_before_and_after_the_move_is_one_stream(node: Node, other: Node) -> None:
    keeper = await node.launch(*python("import time\nprint('here', flush=True)\ntime.sleep(1000)"))
    assert keeper.stdout is not None
    assert await keeper.stdout.readline() == b"here\n"
    guest, way = await move_away(node, other, ("sh", "-c", "echo there; echo aside >&2; exit 3"))
    output, errors = await keeper.communicate()
    assert (output, errors, keeper.returncode) == (b"there\n", b"aside\n", 3)
    await other.reported("exited", 3 << 8)
    await other.reported("closed", False)
    await until(lambda: not alive(guest.keeper_pid))
    await way.cut()


async def _pour(keeper: Process, data: bytes) -> None:
    assert keeper.stdin is not None
    for start in range(0, len(data), 1 << 18):
        keeper.stdin.write(data[start : start + (1 << 18)])
        await keeper.stdin.drain()
    keeper.stdin.close()


@pytest.mark.parametrize("accident", ["none", "cuts", "losses", "restarts"])
async def test_no_byte_is_lost_or_duplicated(node: Node, other: Node, accident: str) -> None:
    data = random.Random(2).randbytes(10 << 20)
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    assert keeper.stdout is not None
    _, way = await move_away(node, other, python(ECHO))
    pouring = asyncio.create_task(_pour(keeper, data))
    received = bytearray()

    async def receive(size: int) -> None:
        assert keeper.stdout is not None
        while len(received) < size and (piece := await keeper.stdout.read(1 << 16)):
            received.extend(piece)

    for round_number in range(1, 5):
        await receive(round_number << 20)
        if accident == "cuts":
            await way.cut()
            await way.open()
        elif accident == "losses":
            way.lose_every = 41
        elif accident == "restarts":
            restarted = node if round_number % 2 else other
            count = 1 + len([1 for _, event in restarted.events if event == ("connected",)])
            await restarted.stop()
            await restarted.start()
            await restarted.reported("connected", count=count)
    way.lose_every = 0
    await receive(len(data) + 1)
    await pouring
    assert bytes(received) == data
    assert await keeper.wait() == 0
    await way.cut()


#: Writes to stdout as fast as it is read. For each line of input, and for SIGUSR2, there is one word on stderr; then it ends.
FLOOD = """
import os, signal, sys, threading
words = []
def say(word):
    words.append(word)
    os.write(2, word)
signal.signal(signal.SIGUSR2, lambda number, frame: say(b"signal "))
threading.Thread(target=lambda: [say(b"input ") for _ in sys.stdin.buffer], daemon=True).start()
while len(words) < 2:
    os.write(1, b"x" * 4096)
os._exit(0)
"""


async def test_what_is_lost_is_sent_again_while_output_flows(node: Node, other: Node) -> None:
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    _, way = await move_away(node, other, python(FLOOD))
    assert await keeper.stdout.readexactly(1 << 20)
    way.lose_once = {"sig", "in", "out:2"}
    keeper.send_signal(signal.SIGUSR2)
    keeper.stdin.write(b"line\n")
    output, errors = await asyncio.wait_for(keeper.communicate(), 60)
    assert sorted(errors.split()) == [b"input", b"signal"]
    assert set(output) == {ord("x")}
    assert not way.lose_once
    await way.cut()


async def test_unread_stdin_moves_with_the_rank(node: Node, other: Node) -> None:
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    link = await node.reported("connected")
    keeper.stdin.write(b"before ")
    await keeper.stdin.drain()
    assert link.rank is not None
    rank_pid = link.rank.pid
    await until(lambda: _unread_bytes(rank_pid) == 7)
    _, way = await move_away(node, other, ("cat",))
    keeper.stdin.write(b"after")
    keeper.stdin.close()
    assert await keeper.stdout.read() == b"before after"
    await way.cut()


def _unread_bytes(pid: int) -> int:
    import fcntl
    import struct
    import termios

    with open(f"/proc/{pid}/fd/0", "rb") as stdin:
        return int(struct.unpack("i", fcntl.ioctl(stdin, termios.FIONREAD, b"\0" * 4))[0])


async def test_each_signal_arrives_once_across_interruptions(node: Node, other: Node) -> None:
    program = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [10, 12, 15])\n"
        "print('ready', flush=True)\n"
        "print([int(signal.sigwait([10, 12, 15])) for _ in range(3)], flush=True)\n"
        "print(signal.sigtimedwait([10, 12, 15], 0.3))"
    )
    keeper = await node.launch(*python("import time\ntime.sleep(1000)"))
    assert keeper.stdout is not None
    _, way = await move_away(node, other, python(program))
    assert await keeper.stdout.readline() == b"ready\n"
    keeper.send_signal(signal.SIGUSR1)
    await way.cut()
    keeper.send_signal(signal.SIGUSR2)
    await way.open()
    keeper.send_signal(signal.SIGTERM)
    first, twice = (await keeper.stdout.read()).splitlines()
    assert sorted(json.loads(first)) == [10, 12, 15]
    assert twice == b"None"
    assert await keeper.wait() == 0
    await way.cut()


async def test_home_keeper_ends_by_the_signal_that_ended_the_rank(node: Node, other: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    _, way = await move_away(node, other, ("sh", "-c", "kill -ABRT $$"))
    assert await keeper.wait() == -signal.SIGABRT
    await way.cut()


async def test_rank_continues_while_its_home_node_is_unreachable(node: Node, other: Node) -> None:
    began, done = other.folder / "began", other.folder / "done"
    program = (
        "import os, pathlib, sys\n"
        "sys.stdin.readline()\n"
        f"pathlib.Path({str(began)!r}).touch()\n"
        "data = b''.join(b'%07d\\n' % i for i in range(9 << 17))\n"
        "while data: data = data[os.write(1, data[:65536]):]\n"
        f"pathlib.Path({str(done)!r}).touch()"
    )
    keeper = await node.launch("sleep", "1000")
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    guest, way = await move_away(node, other, python(program))
    keeper.stdin.write(b"go\n")
    await keeper.stdin.drain()
    await until(began.exists)
    await way.cut()
    await until(done.exists)
    assert _has_spooled(guest.keeper_pid)
    await way.open()
    assert await keeper.stdout.read() == b"".join(b"%07d\n" % index for index in range(9 << 17))
    await until(lambda: not alive(guest.keeper_pid))
    await way.cut()


def _has_spooled(keeper_pid: int) -> bool:
    return any("(deleted)" in link for link in open_links(keeper_pid).values())


async def test_second_move_carries_unacknowledged_output(node: Node, other: Node, tmp_path: Path) -> None:
    keeper = await node.launch("sleep", "1000")
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    program = "import os, time\nos.write(1, os.read(0, 5))\nprint('one', flush=True)\ntime.sleep(1000)"
    guest, way = await move_away(node, other, python(program))
    home = await node.reported("connected")
    keeper.stdin.write(b"12345rest")
    await keeper.stdin.drain()
    assert await keeper.stdout.readexactly(9) == b"12345one\n"
    await way.cut()

    folder = tmp_path / "third"
    folder.mkdir()
    third = await Node(folder, "node-3").start()
    second_move = "m-ba9876543210"
    await guest.link.hold(second_move)
    state = await guest.link.drain(second_move)
    keeper.stdin.write(b"-and-more")
    await keeper.stdin.drain()
    keeper.send_signal(signal.SIGUSR1)
    final = (
        "import os, signal\n"
        "got = b''\n"
        "while len(got) < 13: got += os.read(0, 99)\n"
        "os.write(1, got)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n"
        "signal.pause()"  # the home keeper may have read its input before the signal
    )
    next_guest = await Guest.start(third, home, second_move, state)
    await next_guest.restore(python(final))
    await next_guest.activate()
    await guest.link.away(second_move, "node-3")
    await guest.link.kill()
    await until(lambda: not alive(guest.keeper_pid))
    await home.away(second_move, "node-3")
    onward = Way(node, third, home.uid)
    await onward.open()
    assert await keeper.wait() == -signal.SIGUSR1
    assert await keeper.stdout.read() == b"rest-and-more"
    await onward.cut()
    await third.clean()


async def test_kill_ends_the_guest_keeper_and_all_its_processes(node: Node, other: Node) -> None:
    await node.launch("sleep", "1000")
    guest, way = await move_away(node, other, ("sh", "-c", "sleep 1000 & sleep 1000"))
    await guest.link.kill()
    await other.reported("closed", False)
    await until(lambda: not alive(guest.keeper_pid))
    await way.cut()


async def test_exit_before_activation_does_not_end_the_home_keeper(node: Node, other: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    guest = await Guest.start(other, link, MOVE, await freeze(link))
    await guest.restore(("true",))
    guest.let_go()
    await other.reported("died", MOVE, 0)
    await guest.link.kill()
    assert keeper.returncode is None
    await link.resume(MOVE)
    assert link.rank is not None
    link.rank.signal(signal.SIGCONT)
    keeper.terminate()
    assert await keeper.wait() == -signal.SIGTERM


async def test_rollback_that_the_home_keeper_may_not_know_yet_goes_along(node: Node, other: Node) -> None:
    """With the state of a rank that moves on: its home node may have been out of reach since."""
    await node.launch("sleep", "1000")
    home = await node.reported("connected")
    state = msgspec.structs.replace(await freeze(home), run="m-00000000000a", replayed="mark")
    guest = await Guest.start(other, home, MOVE, state)
    await guest.restore(("sleep", "1000"))
    await guest.activate()
    await guest.link.hold("m-ba9876543210")
    handed = await guest.link.drain("m-ba9876543210")
    assert (handed.run, handed.replayed) == ("m-00000000000a", "mark")
