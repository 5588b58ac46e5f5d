"""A dump that fails leaves no descriptor open in the source daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.client import DaemonClient
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Refused, SnapshotError, Unreachable
from snapshotd.config import Config
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.journal import Journal
from snapshotd.moves.record import Begin
from snapshotd.moves.rules import Mark
from snapshotd.moves.source.dump import Dump
from snapshotd.proc import cgroup, host
from snapshotd.proc.cgroup import Cgroup
from snapshotd.proc.tree import Process
from tests.preflight.ranks import Child, start

MOVE = "m-0123456789ab"
STDIO = {"channels": [], "in": {"o": 0, "unread": "", "eof": False}, "signals": {"last": 0, "queued": []}}


@pytest.fixture
def child() -> Iterator[Child]:
    if os.geteuid() != 0:
        pytest.skip("a rank's cgroup is made by root")
    child = start("")
    group = Cgroup(cgroup.of_process(os.getpid()) / f"test-dump-{os.getpid()}").create()
    (group.path / "cgroup.procs").write_text(str(child.pid))
    yield child
    group.kill(10)
    child.end()
    group.remove()


def dump_of(child: Child, tmp_path: Path) -> Dump:
    """The dump of this process. Its target does not answer, and its criu does not exist."""
    nowhere = tmp_path / "none"
    config = Config(
        node="node-1",
        listen="127.0.0.1:1",
        credentials=Credentials(nowhere, nowhere, nowhere),
        image_dir=tmp_path / "images",
        criu=str(nowhere),
    )
    node: Any = SimpleNamespace(config=config)
    node.client = lambda name, _endpoint: DaemonClient(f"unix:{nowhere}", credentials=None, node=name)
    begin = Begin(
        MOVE, "source", "job-0", "job", 0, "node-1", "a:1", "spare-1", "127.0.0.1:1", "ab" * 32, "boot", 1.0, 30.0
    )
    log = Journal(tmp_path).begin(begin)
    me, root = Process.of(os.getpid()), Process.of(child.pid)
    log.mark(Mark.FROZEN, stdio=STDIO)
    entry = RankEntry(
        uid="job-0",
        job="job",
        rank=0,
        role="home",
        keeper_pid=me.pid,
        keeper_start_ticks=me.start_ticks,
        cgroup=str(cgroup.of_process(child.pid)),
        home_node="node-1",
        home_endpoint="a:1",
        relay_key="",
        boot_id=host.boot_id(),
        user_id=0,
        pid=root.pid,
        start_ticks=root.start_ticks,
    )
    facts, _ = child.inspect()
    return Dump(node, log, entry, facts)


def open_descriptors() -> dict[str, str]:
    folder = "/proc/self/fd"
    found = {}
    for number in os.listdir(folder):
        try:
            found[number] = os.readlink(f"{folder}/{number}")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


async def leaked(dump: Dump, expected: type[SnapshotError]) -> dict[str, str]:
    """What a failing dump leaves open. Its first run opens what the daemon keeps, such as gRPC's own descriptors."""
    with pytest.raises(expected):
        await dump.run()
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(expected):
            await dump.run()
    return {number: link for number, link in open_descriptors().items() if number not in before}


async def test_refusal_after_the_freeze_leaves_no_descriptor(child: Child, tmp_path: Path) -> None:
    dump = dump_of(child, tmp_path)
    dump.facts.identity.user_id += 1  # as if the rank had another user in preflight
    left = await leaked(dump, Refused)
    assert [link for link in left.values() if str(tmp_path) in link] == []


async def test_target_that_does_not_answer_leaves_no_descriptor(child: Child, tmp_path: Path) -> None:
    left = await leaked(dump_of(child, tmp_path), Unreachable)
    assert [link for link in left.values() if str(tmp_path) in link] == []


async def test_criu_that_cannot_be_started_leaves_no_descriptor(child: Child, tmp_path: Path) -> None:
    dump = dump_of(child, tmp_path)
    with pytest.raises(BadConfig):
        await dump._criu(asyncio.Event(), {})
    before = open_descriptors()
    with pytest.raises(BadConfig):
        await dump._criu(asyncio.Event(), {})
    assert [link for number, link in open_descriptors().items() if number not in before] == []
