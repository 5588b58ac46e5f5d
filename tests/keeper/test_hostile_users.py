"""Attacks by ordinary users (1500 and 1501) who talk to the keeper's socket with programs of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shim.keeper.frames import decode, encode
from snapshotd.api.errors import Damaged, Denied, RankGone
from snapshotd.keepers import hello as hellos
from snapshotd.keepers import listener
from snapshotd.keepers.stdio_state import MAX_STATE_BYTES
from snapshotd.proc import status, tree
from snapshotd.proc.credentials import Identity
from tests.installation import readable_copy, readable_python
from tests.keeper.guests import Guest, alive
from tests.keeper.nodes import Node, until
from tests.keeper.strangers import ALICE, BOB, Stranger

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users"),
]

MOVE = "m-0123456789ab"
OWN = ("sh", "-c", "echo; exec sleep 200")


def program_of(open_folder: Path, user_id: int, mode: int) -> str:
    """A program that prints for ever, with a set-uid or set-gid bit."""
    found = shutil.which("yes")
    assert found is not None
    copy = open_folder / f"of-{user_id}-{mode:o}" / "yes"
    copy.parent.mkdir()
    copy.parent.chmod(0o755)
    shutil.copy(Path(found).resolve(), copy)
    os.chown(copy, user_id, user_id)
    copy.chmod(mode)
    return str(copy)


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o4755), (BOB, 0o4755), (0, 0o2755)])
async def test_set_uid_program_cannot_be_registered(node: Node, open_folder: Path, owner: int, mode: int) -> None:
    alice = await Stranger.connect(node, ALICE)
    answer = await alice.hello(pid=await alice.start(program_of(open_folder, owner, mode)))
    assert answer["t"] == "refused"
    assert "file-system" in answer["message"]
    assert node.hellos == []


@pytest.mark.parametrize("mode", [0o4755, 0o2755])
async def test_set_uid_program_cannot_replace_the_rank_at_a_second_hello(
    node: Node, open_folder: Path, mode: int
) -> None:
    alice = await Stranger.connect(node, ALICE)
    welcome = await alice.hello(pid=await alice.start(*OWN))
    assert welcome["t"] == "welcome"
    program = await alice.start(program_of(open_folder, 0, mode))
    await alice.reconnect()
    assert (await alice.hello(uid=welcome["uid"], pid=program))["t"] == "refused"
    assert len(node.hellos) == 1


async def test_groups_of_the_keeper_are_allowed_and_others_are_not(node: Node) -> None:
    """Root starts both ranks here, because only a set-gid program such as newgrp could."""
    for group, answer in ((ALICE, "welcome"), (4711, "welcome"), (4712, "refused")):
        alice = await Stranger.connect(node, 0)
        setpriv = ("setpriv", f"--reuid={ALICE}", f"--regid={group}", "--clear-groups")
        program = (
            "import os, sys, time\n"
            f"if os.fork() == 0: os.execvp('setpriv', {[*setpriv, *OWN]!r})\n"
            f"os.setgroups([4711]); os.setresgid({ALICE}, {ALICE}, {ALICE}); os.setresuid({ALICE}, {ALICE}, {ALICE})\n"
            "time.sleep(200)"
        )
        keeper = await alice.start(sys.executable, "-c", program)
        await until(partial(_is_of_alice, keeper))
        (child,) = tree.children(keeper)
        hello = hellos.parse_hello(
            decode(
                _frame({"t": "hello", "role": "home", "job": "j", "uid": "j-0-1", "relay_key": "0" * 32, "pid": child})
            ),
            ALICE,
        )
        try:
            hellos.rank_process(hello, tree.Process.of(keeper), status.read(keeper))
            found = "welcome"
        except Denied:
            found = "refused"
        assert (group, found) == (group, answer)


def _is_of_alice(pid: int) -> bool:
    return status.read(pid).user_id == ALICE


def _frame(header: dict[str, Any]) -> bytes:
    fields = dict(header)
    return encode(fields.pop("t"), fields)


# ------------------------------------------------------------------ the stdio state


def state(**changes: Any) -> dict[str, Any]:
    pipe = {"name": "1", "kind": "pipe", "fds": [1, 2], "in": False, "out": True, "key": "pipe:[7]", "o": 0, "tail": ""}
    return {
        "channels": [pipe],
        "in": {"o": 0, "unread": "", "eof": True},
        "signals": {"last": 0, "queued": []},
        "report_path": "",
        **changes,
    }


async def drain(node: Node, alice: Stranger, answer: str, *, parts: int = 1) -> Any:
    """What the daemon gets when it asks a keeper that answers with this text."""
    welcome = await alice.hello(pid=await alice.start(*OWN))
    assert welcome["t"] == "welcome"
    link = await node.reported("connected")
    drained = asyncio.create_task(link.drain(MOVE))
    await asyncio.sleep(0)
    size = max(1, -(-len(answer) // parts))
    for part in range(parts):
        more = part < parts - 1
        with contextlib.suppress(ConnectionError):  # the daemon may have had enough
            await alice.send({"t": "stdio", "move": MOVE, "more": more}, answer[part * size : (part + 1) * size])
    return await drained


async def test_keeper_cannot_make_another_node_read_a_file_as_root(node: Node, other: Node, open_folder: Path) -> None:
    secret = open_folder / "secret"
    secret.write_text("only root may read this")
    secret.chmod(0o600)
    alice = await Stranger.connect(node, ALICE)
    found = await drain(node, alice, json.dumps(state(user_id=0, group_id=0, report_path=str(secret))))
    home = node.links.all()[0]
    assert home.rank is not None
    identity = Identity.of(home.rank.pid)
    assert (identity.user_id, identity.group_id) == (ALICE, ALICE)
    guest = await Guest.start(other, home, MOVE, found, identity=identity.to_orders())
    await guest.restore(("sleep", "0"))
    await guest.activate()
    sent = b""
    async with asyncio.timeout(20):
        await guest.link.relay(up=True)
        async for frame in guest.link.relay_frames():
            if decode(frame).type == "sync":
                await guest.link.send_relay(_frame({"t": "sync", "out": {"1": 0}, "shut": [], "win": None}))
            elif decode(frame).type == "exit":
                sent = decode(frame).payload
                break
    assert b"only root" not in sent


async def test_guest_keeper_runs_as_the_ranks_user_and_cannot_be_traced_by_it(node: Node, other: Node) -> None:
    alice = await Stranger.connect(node, ALICE, groups=[4711])
    found = await drain(node, alice, json.dumps(state()))
    home = node.links.all()[0]
    assert home.rank is not None
    guest = await Guest.start(other, home, MOVE, found, identity=Identity.of(home.rank.pid).to_orders())
    # criu would restore it with these ids.
    await guest.restore(("setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--groups=4711", "sleep", "1000"))
    await guest.activate()
    (rank,) = (pid for pid in tree.children(guest.keeper_pid))
    await until(lambda: status.read(rank).user_id == ALICE)
    seen = status.read(guest.keeper_pid)
    assert (seen.user_ids, seen.group_ids, seen.groups) == ((ALICE,) * 4, (ALICE,) * 4, (4711,))
    assert Path(f"/proc/{guest.keeper_pid}/mem").stat().st_uid == 0, "its user could read its memory"
    await other.stop()
    await other.start()  # the keeper reconnects as the user
    link = await other.reported("connected", count=2)
    assert (link.role, link.info.user_id) == ("guest", ALICE)
    await link.kill()
    await until(lambda: not alive(guest.keeper_pid))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        json.dumps(state(channels=[{}])),
        json.dumps(state(channels=[{**state()["channels"][0], "key": "file[1:2]"}])),
        json.dumps(state(channels=[{**state()["channels"][0], "fds": [7]}])),
        json.dumps(state(channels=[{**state()["channels"][0], "o": "0"}])),
        json.dumps(state(channels=state()["channels"] * 2)),
        json.dumps(state(report_path="relative")),
        json.dumps(state(report_path="/a\0b")),
        json.dumps(state(signals={"last": 0, "queued": [99]})),
        json.dumps(state(**{"in": {"o": -1, "unread": "", "eof": True}})),
        json.dumps(state(**{"in": {"o": 0, "unread": "not base64!", "eof": True}})),
        '{"more": ' + "[" * 200_000,
    ],
)
async def test_stdio_state_that_does_not_match_the_schema_is_refused(node: Node, answer: str) -> None:
    alice = await Stranger.connect(node, ALICE)
    with pytest.raises(Damaged, match="stdio state is invalid"):
        await drain(node, alice, answer)


async def test_large_stdio_state_is_refused_before_it_is_parsed(node: Node) -> None:
    alice = await Stranger.connect(node, ALICE)
    text = json.dumps(state(more=["x" * 1000] * (2 * MAX_STATE_BYTES["home"] // 1000)))
    with pytest.raises(RankGone):
        await drain(node, alice, text, parts=-(-len(text) // (1 << 19)))


# ------------------------------------------------------------------ the number of connections

_FLOOD = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
def connect():
    made = socket.socket(socket.AF_UNIX)
    made.connect(sys.argv[1])
    return made
def is_open(one):
    try:
        return one.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
opened = [connect() for _ in range(int(sys.argv[2]))]
print("open", flush=True)
while True:  # what the daemon has closed is opened again
    for index, one in enumerate(opened):
        if not is_open(one):
            one.close()
            opened[index] = connect()
    time.sleep(0.2)
"""


async def test_silent_connections_of_one_user_do_not_stop_another(
    node: Node, open_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 600.0)  # not only because their time is over
    flood = await asyncio.create_subprocess_exec(
        *(readable_python(), "-I", "-c", _FLOOD, str(node.socket), "4096"),
        stdout=asyncio.subprocess.PIPE,
        cwd="/",
        user=ALICE,
        group=ALICE,
        extra_groups=[],
    )
    node.keep(flood)
    assert flood.stdout is not None
    async with asyncio.timeout(60):
        assert await flood.stdout.readline() == b"open\n"
    installed = readable_copy(open_folder / "installed")
    keeper = await node.launch(
        *("echo", "from bob"),
        wrap=("setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups"),
        interpreter=readable_python(),
        env={"PYTHONPATH": str(installed)},
        cwd=open_folder,
    )
    output, errors = await keeper.communicate()
    assert (output, keeper.returncode) == (b"from bob\n", 0), errors
    assert [hello.user_id for hello, _, _ in node.hellos] == [BOB]
    about_alice = [record for record in caplog.records if f"user {ALICE}" in record.getMessage()]
    assert 1 <= len(about_alice) <= 10


async def test_silent_connection_is_closed_after_a_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.3)
    reader, writer = await asyncio.open_unix_connection(node.socket)
    writer.write(b"\0\0")  # the beginning of a frame does not help
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_first_frame_must_be_small(node: Node) -> None:
    reader, writer = await asyncio.open_unix_connection(node.socket)
    writer.write((1 << 20).to_bytes(4, "big"))
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_flood_of_events_closes_the_link(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = await Stranger.connect(node, ALICE)
    blocked = asyncio.Event()
    monkeypatch.setattr(node, "_note", lambda link, *event: blocked.wait())
    await node.stop()
    await node.start()
    await alice.reconnect()
    assert (await alice.hello(pid=await alice.start(*OWN)))["t"] == "welcome"
    link = node.links.all()[0]
    for _ in range(2 * listener._MAX_EVENTS):
        await alice.send({"t": "died", "move": MOVE, "status": int(signal.SIGKILL)})
    async with asyncio.timeout(20):
        await link.closed.wait()
    blocked.set()
