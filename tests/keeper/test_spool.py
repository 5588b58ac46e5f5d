"""Tests that the output of ranks that are cut off from their home node cannot fill the disk, and is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shim.keeper import relay
from shim.keeper.spool import STEP_BYTES, Spool
from shim.keeper.tail import Tail
from snapshotd.proc import tree
from tests.keeper.guests import Guest, Way
from tests.keeper.nodes import REPOSITORY, Node, python, until
from tests.keeper.test_relay import MOVE, freeze

KIB = 1 << 10

#: Takes room in the spool as another keeper does, then waits.
_HOLDER = """
import sys
from shim.keeper.spool import Spool
spool = Spool(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 0)
print(spool.take(int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def holder(folder: Path, rank_bytes: int, total_bytes: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", _HOLDER, str(folder), str(rank_bytes), str(total_bytes)]
    return subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_tail_is_full_at_the_limit_of_the_rank_and_keeps_the_order(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), rank_bytes=100, total_bytes=1 << 30, free_bytes=0)
    first, second = Tail(0, spool, memory_bytes=10), Tail(0, spool, memory_bytes=10)
    first.append(bytes(10) + b"a" * 60)
    second.append(bytes(10) + b"b" * 20)
    assert (first.is_full, second.is_full) == (False, False)
    first.append(b"c" * 50)
    assert (first.is_full, second.is_full) == (True, False)
    assert first.read(70, 99) == b"c" * 50
    first.release(70)
    assert not first.is_full
    second.append(b"d" * 60)  # the first has given back its part
    assert not second.is_full


def test_limit_of_all_ranks_counts_the_living_keepers(tmp_path: Path) -> None:
    total_bytes = 100 * KIB
    with holder(tmp_path, 80 * KIB, total_bytes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        mine = Spool(str(tmp_path), 80 * KIB, total_bytes, free_bytes=0)
        assert mine.take(20 * KIB)
        assert not mine.take(1)
        other.kill()
        other.wait()
        assert mine.take(60 * KIB), "a killed keeper holds no room"


def test_free_space_of_the_disk_is_kept(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free_bytes = disk.f_bavail * disk.f_frsize
    assert not Spool(str(tmp_path), 1 << 40, 1 << 40, free_bytes=2 * free_bytes).take(1)
    assert Spool(str(tmp_path), 1 << 40, 1 << 40, free_bytes=free_bytes // 2).take(1)


def test_room_is_given_back_when_the_output_was_received(tmp_path: Path) -> None:
    with holder(tmp_path, KIB, STEP_BYTES * 2) as other:  # it has the first number of the ledger
        assert other.stdout is not None
        other.stdout.readline()
        spool = Spool(str(tmp_path), STEP_BYTES * 4, STEP_BYTES * 2, free_bytes=0)
        assert spool.take(STEP_BYTES)
        assert not spool.take(STEP_BYTES)
        spool.give_back(STEP_BYTES)
        assert spool.take(STEP_BYTES)
        other.kill()


def test_file_does_not_grow_while_its_reader_is_slightly_late(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 1 << 20, 1 << 20, free_bytes=0)
    tail = Tail(0, spool, memory_bytes=1000)
    tail.append(bytes(5000))
    for _ in range(5000):  # far more than the limit in all
        tail.append(bytes(900))
        assert not tail.is_full
        tail.release(tail.end - 800)
    assert spool._used_bytes <= 6000


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="a guest keeper makes namespaces, which needs root")
async def test_rank_that_is_cut_off_waits_at_the_limit_and_loses_nothing(node: Node, other: Node) -> None:
    """Without a limit, one rank fills the disk of the node that it was moved to, and the journal with it."""
    limit_bytes, all_bytes = 8 << 20, 64 << 20
    program = f"import os\nfor _ in range({all_bytes >> 16}): os.write(1, bytes(65536))"
    keeper = await node.launch("sleep", "1000")
    link = await node.reported("connected")
    spool = {"rank_bytes": limit_bytes, "total_bytes": 1 << 30, "free_bytes": 0}
    guest = await Guest.start(other, link, MOVE, await freeze(link), spool=spool)
    await guest.restore(python(program))
    await guest.activate()
    await link.away(MOVE, "node-2")
    assert link.rank is not None
    link.rank.signal(signal.SIGKILL)
    most_bytes = 0

    def spooled_bytes() -> int:
        nonlocal most_bytes
        found = [path for path in Path(f"/proc/{guest.keeper_pid}/fd").iterdir() if _is_spool(path, other.folder)]
        most_bytes = max(most_bytes, sum(path.stat().st_size for path in found))
        return most_bytes

    await until(lambda: spooled_bytes() > limit_bytes // 2, timeout_s=30 + relay.CUT_OFF_S)
    (rank,) = tree.children(guest.keeper_pid)
    # It waits in write(2): its pipe is full, and the keeper reads no more.
    await until(lambda: bool(spooled_bytes()) and "pipe" in Path(f"/proc/{rank}/wchan").read_text())
    assert most_bytes <= limit_bytes
    way = Way(node, other, link.uid)
    await way.open()
    assert keeper.stdout is not None
    output = await keeper.stdout.read()
    assert len(output) == all_bytes
    assert await keeper.wait() == 0
    await way.cut()


def _is_spool(path: Path, folder: Path) -> bool:
    try:
        name = os.readlink(path)
    except OSError:
        return False
    return name.startswith(str(folder)) and name.endswith("(deleted)")
