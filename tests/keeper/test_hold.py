"""Tests of a held rank: signals and stdin are queued, unread stdin is taken back, and an exit waits for the outcome."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.errors import RankGone, Timeout
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.stdio_state import InputState
from tests.descriptors import open_links
from tests.keeper.nodes import Node, python, until

MOVE = "m-0123456789ab"

COUNTER = """
import signal
wanted = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
input()
print(*[int(signal.sigwait(wanted)) for _ in wanted])
"""


async def test_signals_are_queued_until_the_outcome_of_the_move(node: Node) -> None:
    keeper = await node.launch(*python(COUNTER))
    assert keeper.stdout is not None
    assert await keeper.stdout.readline() == b"ready\n"
    link = await node.reported("connected")
    await link.hold(MOVE)
    for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR2):
        keeper.send_signal(number)
    await link.hold(MOVE)  # idempotent; when the keeper answers, it has handled the signals
    assert _pending(link) == 0
    await link.resume(MOVE)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.stdin is not None
    keeper.stdin.write(b"\n")
    seen = {int(word) for word in (await keeper.stdout.read()).split()}
    assert seen == {signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR2, signal.SIGTERM}


def _pending(link: KeeperLink) -> int:
    """The signals that have reached the rank, which blocks them: a bit for each."""
    assert link.rank is not None
    with open(f"/proc/{link.rank.pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)


@pytest.mark.parametrize("has_ended", [False, True])
async def test_unread_stdin_is_taken_back_and_restored(node: Node, has_ended: bool) -> None:
    program = (
        "import os, sys\n"
        "first = os.read(0, 5)\n"
        "os.write(1, first)\n"
        "os.kill(os.getpid(), 19)\n"  # stands for the cgroup freezer
        "while data := os.read(0, 4096): os.write(1, data)"
    )
    keeper = await node.launch(*python(program))
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    link = await node.reported("connected")
    keeper.stdin.write(b"first second")
    await keeper.stdin.drain()
    assert await keeper.stdout.readexactly(5) == b"first"
    rank = link.rank
    assert rank is not None
    await until(lambda: _state(rank.pid) == "T")
    if has_ended:
        keeper.stdin.close()
        await until(lambda: _end_has_arrived(keeper.pid, rank.pid))
    await link.hold(MOVE)
    state = await link.drain(MOVE)
    assert state.input == InputState(offset=len(b"first second"), unread=b" second", has_ended=has_ended)
    assert state == await link.drain(MOVE), "asking twice must give the same answer"
    if not has_ended:
        keeper.stdin.write(b" third")
        await keeper.stdin.drain()
    await link.resume(MOVE)
    rank.signal(signal.SIGCONT)
    if not has_ended:
        keeper.stdin.close()
    assert await keeper.stdout.read() == (b" second" if has_ended else b" second third")
    assert await keeper.wait() == 0


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def _end_has_arrived(keeper_pid: int, rank_pid: int) -> bool:
    """Whether the keeper has closed its write end of the rank's stdin."""
    stdin = os.readlink(f"/proc/{rank_pid}/fd/0")
    for fd, link in open_links(keeper_pid).items():
        if link == stdin:
            with open(f"/proc/{keeper_pid}/fdinfo/{fd}") as info:
                flags = int(info.read().split("flags:")[1].split()[0], 8)
            if flags & os.O_ACCMODE == os.O_WRONLY:
                return False
    return True


async def test_the_state_names_every_channel_for_criu(node: Node) -> None:
    keeper = await node.launch("cat")
    link = await node.reported("connected")
    await link.hold(MOVE)
    state = await link.drain(MOVE)
    rank = link.rank
    assert rank is not None
    await until(lambda: Path(f"/proc/{rank.pid}/comm").read_text() == "cat\n")
    for channel in state.channels:
        for fd in channel.fds:
            assert os.readlink(f"/proc/{rank.pid}/fd/{fd}") == channel.key
    assert sorted(fd for channel in state.channels for fd in channel.fds) == [0, 1, 2]
    await link.resume(MOVE)
    await keeper.communicate(b"")


@pytest.mark.parametrize("verdict", ["resume", "away"])
async def test_exit_while_held_is_not_reported_before_the_outcome(node: Node, verdict: str) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    await link.hold(MOVE)
    await link.drain(MOVE)
    assert link.rank is not None
    link.rank.signal(signal.SIGKILL)
    await node.reported("died", MOVE, signal.SIGKILL)
    assert keeper.returncode is None
    if verdict == "resume":
        await link.resume(MOVE)
        assert await keeper.wait() == -signal.SIGKILL
    else:
        await link.away(MOVE, "node-2")
        assert keeper.returncode is None
        await _end_from_afar(link)
        assert await keeper.wait() == 5
    await node.reported("closed", False)


async def _end_from_afar(link: KeeperLink) -> None:
    from shim.keeper.frames import encode

    await link.send_relay(encode("sync", {"in": 0, "sig": 0}))
    await link.send_relay(encode("exit", {"status": 5 << 8}))


async def test_restarted_daemon_learns_the_held_move_and_the_exit_status(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    rank = link.rank
    assert rank is not None
    await link.hold(MOVE)
    await node.stop()
    rank.signal(signal.SIGKILL)
    await until(lambda: not rank.alive())
    await node.start()
    link = await node.reported("connected", count=2)
    assert (link.info.held_move, link.info.exited, link.info.finished) == (MOVE, signal.SIGKILL, False)
    assert link.rank is None
    await link.resume(MOVE)
    assert await keeper.wait() == -signal.SIGKILL


async def test_late_resume_of_an_older_move_is_ignored(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    await link.hold("m-000000000001")
    await link.hold(MOVE)
    keeper.terminate()
    await link.resume("m-000000000001")
    assert link.rank is not None
    assert link.rank.alive()
    await link.resume(MOVE)
    assert await keeper.wait() == -signal.SIGTERM


async def test_request_to_a_keeper_that_is_killed_fails_with_rank_gone(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    keeper.send_signal(signal.SIGSTOP)
    asking = asyncio.create_task(link.hold(MOVE))
    keeper.kill()
    with pytest.raises(RankGone):
        await asking


async def test_request_to_a_stopped_keeper_times_out(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.keepers.link.CONTROL_TIMEOUT_S", 0.2)
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    keeper.send_signal(signal.SIGSTOP)
    with pytest.raises(Timeout):
        await link.hold(MOVE)


async def test_kill_ends_rank_and_keeper(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    await link.kill()
    assert await keeper.wait() == -signal.SIGKILL


def test_handed_over_state_of_a_rank_without_channels() -> None:
    from shim.keeper.loop import Loop
    from shim.keeper.stdio import Stdio

    state: dict[str, Any] = Stdio(Loop(), []).hand_over(tails_too=True)
    assert state == {"channels": [], "in": {"o": 0, "unread": "", "eof": False}}
