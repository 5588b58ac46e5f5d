"""Closed files are sent ahead of the freeze; after it only what has changed is sent, and what is gone is not made."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Changed, Full, Where
from snapshotd.moves import closed_manifest
from snapshotd.moves.carry import Carry
from snapshotd.moves.closed_manifest import Placed
from snapshotd.moves.source import closed_files as sending
from tests.moves.closed_move import EARLIER, USER, Move


async def test_only_what_changed_is_sent_after_the_freeze(move: Move) -> None:
    for name in ("same", "rewritten", "removed", "renamed", "replaced"):
        move.write(name, f"{name} before")
    ahead = await move.ahead()
    assert len(ahead.content) == 5
    move.write("rewritten", "again")
    (move.cache / "removed").unlink()
    (move.cache / "renamed").rename(move.cache / "new-name")
    (move.cache / "replaced").unlink()
    move.write("replaced", "replaced 2efore")
    move.write("new", "new")
    listed = await move.rest(ahead)
    assert [file.name for file in listed] == [ahead.pack.name if ahead.pack else ""]
    assert move.sender.sent["late"] == len("again" + "renamed before" + "replaced 2efore" + "new")
    assert move.arrived() == {
        "cache/same": "same before",
        "cache/rewritten": "again",
        "cache/new-name": "renamed before",
        "cache/replaced": "replaced 2efore",
        "cache/new": "new",
    }


async def test_file_that_was_changed_a_moment_ago_is_not_sent_ahead(
    move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same tick of the clock would leave no trace."""
    monkeypatch.setattr(sending, "FRESH_S", 60.0)
    move.write("fresh", "content")
    ahead = await move.ahead()
    assert ahead.content == {}
    assert await move.rest(ahead) == []
    assert move.arrived() == {"cache/fresh": "content"}


async def test_change_through_a_mapping_on_tmpfs_is_seen(move_in_memory: Move) -> None:
    """It changes no time of the file, if its page was read before."""
    move = move_in_memory
    move.write("mapped", "before")
    move.write("same", "same")
    ahead = await move.ahead()
    assert len(ahead.content) == 2
    with (move.cache / "mapped").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert memory[0:6] == b"before"
        memory[0:6] = b"after!"
    await move.rest(ahead)
    assert move.sender.sent["late"] == len("after!")
    assert move.arrived() == {"cache/mapped": "after!", "cache/same": "same"}


async def test_file_that_is_mapped_is_not_sent_ahead(move: Move) -> None:
    """Its pages may be written again without a trace."""
    move.write("mapped", "content")
    move.entry.group = SimpleNamespace(pids=lambda: [os.getpid()])
    with (move.cache / "mapped").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert (await move.ahead()).content == {}


async def test_everything_is_sent_late_by_a_daemon_that_was_restarted(move: Move) -> None:
    move.write("file", "content")
    await move.ahead()
    assert await move.rest(None) == []
    assert move.arrived() == {"cache/file": "content"}


async def test_nothing_changed_sends_no_second_pack(move: Move) -> None:
    move.write("file", "content")
    await move.rest(await move.ahead())
    assert list(move.sender.sent) == [closed_manifest.FILE]
    assert move.arrived() == {"cache/file": "content"}


async def test_rank_without_closed_files_moves(move: Move) -> None:
    move.cache.rmdir()
    assert await move.rest(await move.ahead()) == []
    assert move.arrived() == {}


async def test_target_that_is_full_fails_while_the_rank_runs(move: Move) -> None:
    move.write("file", "x" * 500_000)
    before = os.listdir("/proc/self/fd")
    move.sender.fails = Full("no memory is free", where=Where.SOURCE_FROZEN)
    with pytest.raises(Full) as failure:
        await move.ahead()
    assert failure.value.where is Where.SOURCE_RUNNING
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_files_beyond_the_limit_are_refused_after_the_freeze(move: Move) -> None:
    move.node.config.carry_closed_bytes = 10
    ahead = await move.ahead()
    move.write("large", "x" * 11)
    with pytest.raises(Changed, match="closed-files"):
        await move.rest(ahead)


async def test_limit_of_zero_leaves_closed_files_behind(move: Move) -> None:
    move.node.config.carry_closed_bytes = 0
    move.write("file", "content")
    assert await move.rest(await move.ahead()) == []
    assert move.sender.sent == {}
    assert move.arrived() == {}


def test_preflight_names_the_limit(move: Move) -> None:
    move.write("file", "x" * (3 << 20))
    _, check = sending.look(move.node, move.entry, pb.RankFacts(), sending.scope_of(move.node, move.entry))
    assert check.verdict == pb.Check.REFUSE
    assert "1 MiB (carry_closed_bytes)" in check.reason
    move.node.config.carry_closed_bytes = 4 << 20
    found, check = sending.look(move.node, move.entry, pb.RankFacts(), sending.scope_of(move.node, move.entry))
    assert check.verdict == pb.Check.PASS
    assert found.bytes_by_root() == {str(move.local): 3 << 20}


async def test_older_files_that_a_move_brought_or_found_here_go_on_with_the_rank(move: Move) -> None:
    """They are older than the rank on this node: its clock is behind, or they were there already with the same content."""
    for name in ("brought", "found"):
        folder = move.local / name
        folder.mkdir()
        (folder / "file").write_text("content")
        for path in (folder, folder / "file"):
            os.chown(path, USER.user_id, USER.group_id)
    move.entry.started_unix_s = time.time() + 3600
    assert (await move.ahead()).content == {}
    earlier = move.begin(EARLIER, "target")  # begun in 1970 on this node's clock
    assert {path for _, path in (await move.ahead()).content} == {"brought/file", "found/file"}
    move.journal.remove(EARLIER)
    earlier = move.journal.begin(msgspec.structs.replace(earlier.begin, begun_unix_s=time.time() + 3600))
    closed_manifest.save(earlier.folder / closed_manifest.FILE, Placed([str(move.local)], [], [f"{move.local}/found"]))
    assert {path for _, path in (await move.ahead()).content} == {"found/file"}


async def test_shared_memory_of_another_rank_is_not_sent(move: Move) -> None:
    """Of a user's ranks on one node each has its own in /dev/shm. What another process has open on a disk may be a cache."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        os.chown(memory, USER.user_id, USER.group_id)
        for name in ("open", "mapped", "closed"):
            (memory / name).write_text("content")
            os.chown(memory / name, USER.user_id, USER.group_id)
        move.write("open-on-disk", "content")
        move.node.carry = Carry(memory.parent, ["/dev/shm", str(move.local)])
        move.node.carry.closed.state_dir = move.images
        code = (
            f"import mmap, os, time; a = open('{memory}/open'); b = os.open('{memory}/mapped', os.O_RDONLY);"
            f"c = mmap.mmap(b, 0, prot=mmap.PROT_READ); os.close(b); d = open('{move.cache}/open-on-disk');"
            f"os.setresuid(*[{USER.user_id}] * 3); print(flush=True); time.sleep(600)"
        )
        other = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE)
        assert other.stdout is not None
        try:
            other.stdout.readline()
            ahead = await move.ahead()
        finally:
            other.kill()
            other.wait()
            other.stdout.close()
        assert {Path(path).name for _, path in ahead.content} == {"closed", "open-on-disk"}
    finally:
        shutil.rmtree(memory)
