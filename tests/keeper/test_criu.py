"""Guest keepers with the real CRIU: a program is dumped under its home keeper and continues under a guest keeper."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.proc.tree import find_child
from tests.keeper.guests import Guest, Way, alive
from tests.keeper.nodes import REPOSITORY, Node, python, until
from tests.keeper.screens import Screen

PREFIX = REPOSITORY / ".criu"
MOVE = "m-0123456789ab"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="CRIU needs root"),
    pytest.mark.skipif(not (PREFIX / "criu").exists(), reason="no CRIU of our own: run `make setup`"),
]

#: Counts what it reads, so that a repeated or lost step of the program is detected.
STEPS = """
import os
step = 0
while data := os.read(0, 1):
    step += 1
    os.write(1, b"%d%s " % (step, data))
os.write(2, b"end of input")
os._exit(9)
"""


def _rpc() -> Any:
    sys.path.insert(0, str(PREFIX / "python"))
    try:
        return importlib.import_module("pycriu.rpc_pb2")
    finally:
        sys.path.pop(0)


def _ask(talk: socket.socket, request: Any) -> Any:
    rpc = _rpc()
    talk.send(request.SerializeToString())
    while True:
        answer = rpc.criu_resp()
        answer.ParseFromString(talk.recv(65536))
        if answer.type != rpc.NOTIFY:
            return answer
        talk.send(rpc.criu_req(type=rpc.NOTIFY, notify_success=True).SerializeToString())


def _request(kind: int, images: Path, log: str) -> Any:
    rpc = _rpc()
    request = rpc.criu_req(type=kind)
    # By path: criu would look for a descriptor in /proc/PEER/fd, and in another pid namespace its peer is pid 0.
    request.opts.images_dir_fd = -1
    request.opts.images_dir = str(images)
    request.opts.log_level = 4
    request.opts.log_file = log
    request.opts.manage_cgroups_mode = rpc.IGNORE
    return request


def _errors(images: Path, log: str) -> str:
    return "\n".join(line for line in (images / log).read_text(errors="replace").splitlines() if "Error" in line)


async def dump(link: KeeperLink, state: StdioState, images: Path, pid: int, enter: int = 0) -> None:
    """Dumps and kills, with the terminals among the channels declared as external. `enter`: whose namespaces to be in."""
    rpc = _rpc()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wrap = ["nsenter", f"--target={enter}", "--mount", "--pid"] if enter else []
    criu = subprocess.Popen([*wrap, str(PREFIX / "criu"), "swrk", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    request = _request(rpc.DUMP, images, "dump.log")
    request.opts.pid = pid
    request.opts.external.extend(channel.key for channel in state.channels if channel.kind == "pty")
    answer = await asyncio.to_thread(_ask, ours, request)
    assert answer.success, _errors(images, "dump.log")
    ours.close()
    await asyncio.to_thread(criu.wait)


async def restore(guest: Guest, images: Path) -> None:
    rpc = _rpc()
    request = _request(rpc.RESTORE, images, "restore.log")
    request.opts.rst_sibling = True
    for inherit in guest.link.info.inherit:
        request.opts.inherit_fd.add(key=inherit.key, fd=inherit.fd)
    answer = await asyncio.to_thread(_ask, guest.criu, request)
    assert answer.success, _errors(images, "restore.log")
    guest.criu.close()
    await guest.link.restored(answer.restore.pid)


async def move(
    source: KeeperLink, home: KeeperLink, target: Node, move_id: str, images: Path, *, guest_is_source: bool
) -> Guest:
    images.mkdir()
    rank = source.rank or find_child(source.keeper.pid, RANK_PIDS[home.uid])
    await source.hold(move_id)
    rank.signal(signal.SIGSTOP)
    await until(lambda: _state(rank.pid) in "Tt")
    state = await source.drain(move_id)
    inner = RANK_PIDS.setdefault(home.uid, rank.pid)
    await dump(source, state, images, inner, enter=source.keeper.pid if guest_is_source else 0)
    guest = await Guest.start(target, home, move_id, state, criu=str(PREFIX / "criu"))
    await restore(guest, images)
    await guest.link.activated(move_id)
    if guest_is_source:
        await source.away(move_id, target.name)
        await source.kill()
    await home.away(move_id, target.name)
    find_child(guest.keeper_pid, inner).signal(signal.SIGCONT)
    return guest


#: The rank's pid in its own namespace, which no move changes.
RANK_PIDS: dict[str, int] = {}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(autouse=True)
def _forget_pids() -> None:
    RANK_PIDS.clear()


async def test_rank_moves_away_and_back_under_real_criu(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = await Node(folder, "node-2").start()
    keeper = await node.launch(*python(STEPS))
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    home = await node.reported("connected")
    keeper.stdin.write(b"ab")
    assert await keeper.stdout.readuntil(b"2b ") == b"1a 2b "

    guest = await move(home, home, other, MOVE, tmp_path / "first", guest_is_source=False)
    way = Way(node, other, home.uid)
    await way.open()
    keeper.stdin.write(b"cd")
    assert await keeper.stdout.readuntil(b"4d ") == b"3c 4d "

    back = await move(guest.link, home, node, "m-ba9876543210", tmp_path / "second", guest_is_source=True)
    await until(lambda: not alive(guest.keeper_pid))
    await way.cut()
    way = Way(node, node, home.uid)
    await way.open()
    keeper.stdin.write(b"ef")
    keeper.stdin.close()
    output, errors = await keeper.communicate()
    assert (output, errors, keeper.returncode) == (b"5e 6f ", b"end of input", 9)
    await until(lambda: not alive(back.keeper_pid))
    await way.cut()
    await other.clean()


async def test_rank_with_a_terminal_moves_under_real_criu(node: Node, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGWINCH, lambda n, f: os.write(1, b'now %d|' % os.get_terminal_size().columns))\n"
        "print('tty', *[os.isatty(fd) for fd in range(3)], end='|', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print('got', line.strip(), os.get_terminal_size().columns, open('/dev/tty').isatty(), end='|', flush=True)\n"
    )
    screen = Screen()
    keeper = await screen.launch(node, *python(program))
    home = await node.reported("connected")
    await screen.shows(b"tty True True True|")
    screen.type(b"one\r")
    await screen.shows(b"got one 97 True|")
    screen.type(b"unfinished")
    await screen.shows(b"unfinished")
    guest = await move(home, home, node, MOVE, tmp_path / "images", guest_is_source=False)
    way = Way(node, node, home.uid)
    await way.open()
    screen.type(b" line\r")
    await screen.shows(b"got unfinished line 97 True|")
    screen.resize(20, 44)
    await screen.shows(b"now 44|")
    screen.type(b"two\r")
    await screen.shows(b"got two 44 True|")
    back = await move(guest.link, home, node, "m-ba9876543210", tmp_path / "again", guest_is_source=True)
    await way.cut()
    way = Way(node, node, home.uid)
    await way.open()
    screen.type(b"three\r")
    await screen.shows(b"got three 44 True|")
    screen.type(b"\x03")
    await screen.shows(b"KeyboardInterrupt")
    assert await keeper.wait() == -signal.SIGINT
    await until(lambda: not alive(back.keeper_pid))
    await way.cut()
    screen.close()
