"""Tests of a rank at a terminal: its pseudo-terminal behaves like the real one, whose modes are restored."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from collections.abc import Iterator

import pytest

from tests.keeper.nodes import Node, python, until
from tests.keeper.screens import Screen

MOVE = "m-0123456789ab"

TALKER = """
import os, signal, sys
size = os.get_terminal_size()
signal.signal(signal.SIGWINCH, lambda n, f: os.write(1, b"now %d %d|" % os.get_terminal_size()[::-1]))
print("tty", *[os.isatty(fd) for fd in range(3)], size.lines, size.columns, end="|", flush=True)
for line in sys.stdin:
    print("got", line.strip(), end="|", flush=True)
print("end", end="|", flush=True)
"""


@pytest.fixture
def screen() -> Iterator[Screen]:
    opened = Screen()
    yield opened
    opened.close()


async def test_terminal_carries_input_output_and_window_sizes(node: Node, screen: Screen) -> None:
    before = screen.modes()
    keeper = await screen.launch(node, *python(TALKER))
    await screen.shows(b"tty True True True 31 97|")
    assert screen.modes() != before, "raw while the rank runs"
    screen.type(b"hello\r")
    await screen.shows(b"hello\r\n")  # the rank's own terminal echoes
    await screen.shows(b"got hello|")
    screen.resize(40, 120)
    await screen.shows(b"now 40 120|")
    screen.type(b"\x04")
    await screen.shows(b"end|")
    assert await keeper.wait() == 0
    assert screen.modes() == before


async def test_control_c_reaches_the_rank_and_the_terminal_is_restored(node: Node, screen: Screen) -> None:
    before = screen.modes()
    keeper = await screen.launch(node, *python(TALKER))
    await screen.shows(b"tty True")
    screen.type(b"\x03")
    await screen.shows(b"KeyboardInterrupt")
    assert await keeper.wait() == -signal.SIGINT
    assert screen.modes() == before


async def test_output_to_a_pipe_while_typing_at_the_terminal(node: Node, screen: Screen) -> None:
    keeper = await screen.launch(node, "cat", stdout=asyncio.subprocess.PIPE)
    assert keeper.stdout is not None
    await node.reported("connected")
    await until(lambda: screen.modes()[3] & termios.ICANON == 0)
    screen.type(b"line\r")
    await screen.shows(b"line\r\n")
    assert await keeper.stdout.readline() == b"line\n"
    screen.type(b"\x04")
    assert await keeper.wait() == 0


async def test_terminal_of_a_launcher_in_the_same_group_keeps_its_modes(node: Node, screen: Screen) -> None:
    """In a shell script's process group Ctrl-C must reach the script too, so the keeper does not set raw mode."""
    before = screen.modes()
    keeper = await screen.launch(node, *python(TALKER), wrap=("sh", "-c", '"$@"; echo script $?', "sh"))
    await screen.shows(b"tty True True True 31 97|")
    assert screen.modes() == before
    screen.type(b"hello\n")
    await screen.shows(b"hello\r\n")
    await screen.shows(b"got hello|")
    screen.type(b"\x03")
    await screen.shows(b"KeyboardInterrupt\r\n")
    assert await keeper.wait() in (-signal.SIGINT, 130)


async def test_keeper_in_the_background_does_not_read_the_terminal(node: Node, screen: Screen) -> None:
    slave = screen.slave
    keeper = await node.launch("cat", stdin=slave, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    await node.reported("connected")
    screen.type(b"for the shell\n")
    await keeper_has_settled(node)
    os.set_blocking(slave, False)
    assert os.read(slave, 100) == b"for the shell\n"
    keeper.terminate()
    assert await keeper.wait() == -signal.SIGTERM


async def keeper_has_settled(node: Node) -> None:
    link = await node.reported("connected")
    await link.hold(MOVE)
    await link.resume(MOVE)


async def test_unread_typed_input_is_restored_without_a_second_echo(node: Node, screen: Screen) -> None:
    program = "import os, sys, time\nprint('ready|', end='', flush=True)\nos.kill(os.getpid(), 19)\n" + TALKER
    await screen.launch(node, *python(program))
    await screen.shows(b"ready|")
    link = await node.reported("connected")
    rank = link.rank
    assert rank is not None
    screen.type(b"whole line\rpart")
    await screen.shows(b"whole line\r\npart")
    await link.hold(MOVE)
    state = await link.drain(MOVE)
    assert state.input.unread == b"whole line\npart"
    (channel,) = state.channels
    facts = os.stat(f"/proc/{rank.pid}/fd/0")
    assert channel.key == f"tty[{facts.st_rdev:x}:{facts.st_dev:x}]"
    assert channel.size == (31, 97)
    await link.resume(MOVE)
    screen.type(b"ly\r")
    rank.signal(signal.SIGCONT)
    await screen.shows(b"got whole line|")
    await screen.shows(b"got partly|")
    screen.type(b"\x04")


async def test_control_z_stops_keeper_and_rank_and_fg_continues_them(node: Node, screen: Screen) -> None:
    keeper = await screen.launch(node, *python(TALKER))
    await screen.shows(b"tty True")
    link = await node.reported("connected")
    rank = link.rank
    assert rank is not None
    raw = screen.modes()
    keeper.send_signal(signal.SIGTSTP)
    await until(lambda: _state(keeper.pid) == "T" and _state(rank.pid) == "T")
    assert screen.modes() != raw
    keeper.send_signal(signal.SIGCONT)
    await until(lambda: _state(rank.pid) == "S")
    screen.type(b"again\r")
    await screen.shows(b"got again|")
    assert screen.modes() == raw
    screen.type(b"\x04")
    assert await keeper.wait() == 0


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
