"""What moves may use of a machine's memory: no byte is promised twice, and a dead daemon has reserved nothing."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.errors import Full
from snapshotd.proc import cgroup, memory, mountinfo
from snapshotd.proc.memory import OwnRoom
from snapshotd.proc.room import Room
from snapshotd.transport.image.store import ImageStore
from tests.proc.memory_group import limited

GIB = 1 << 30
MOVE, OTHER = "m-00000000000a", "m-00000000000b"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Room]]:
    """The daemons of two nodes of one machine."""
    rooms = [Room(tmp_path / "memory", node) for node in ("node-1", "node-2")]
    yield rooms
    for room in rooms:
        room.close()


def test_what_another_daemon_has_reserved_is_not_free(two: list[Room]) -> None:
    here, there = two
    before = there.free()
    with here.turn():
        here.count("images", lambda: 3 * GIB)
    assert there.free().reserved_bytes == before.reserved_bytes + 3 * GIB
    assert "3072 MiB are reserved for other moves" in str(there.free())
    here.give_up("images")
    assert there.free().reserved_bytes == before.reserved_bytes


def test_what_was_taken_is_no_longer_reserved(two: list[Room]) -> None:
    here, there = two
    untaken = GIB
    here.count("images", lambda: untaken)
    here.state()
    assert there.free().reserved_bytes == GIB
    untaken = 1
    here.state()
    assert there.free().reserved_bytes == 1
    assert (here.free().reserved_bytes, here.free(without="images").reserved_bytes) == (1, 0)


def test_nested_turns_end_with_the_outer_one(two: list[Room], tmp_path: Path) -> None:
    program = (
        "import fcntl, sys\n"
        "with open(sys.argv[1]) as file:\n"
        "    try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError: print('taken')\n"
        "    else: print('free')\n"
    )

    def lock() -> str:
        asked = [sys.executable, "-c", program, str(tmp_path / "memory" / "lock")]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    with two[0].turn():
        with two[0].turn():
            pass
        assert lock() == "taken"
    assert lock() == "free"


def test_reservations_of_a_killed_daemon_do_not_count(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from snapshotd.proc.room import Room\n"
        "room = Room(pathlib.Path(sys.argv[1]), 'node-1')\n"
        "room.count('images', lambda: 5 << 30)\n"
        "room.state()\n"
        "print(room.machine, flush=True)\n"
        "sys.stdin.read()\n"
    )
    folder = tmp_path / "memory"
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        machine = daemon.stdout.readline().strip()
        here = Room(folder, "node-2")
        assert here.free().reserved_bytes == 5 * GIB
        assert here.machine == machine
        daemon.kill()
        daemon.wait()
        assert here.free().reserved_bytes == 0
        assert [path.name for path in folder.glob("claim-node-1*")] == []
        here.close()


def test_two_nodes_of_a_machine_do_not_promise_the_same_memory(two: list[Room], tmp_path: Path) -> None:
    stores = [ImageStore(tmp_path / f"images-{number}", room=room) for number, room in enumerate(two)]
    free_bytes = 90 * GIB
    for room in two:
        room._own.tightest = lambda: ("this node", free_bytes)  # type: ignore[method-assign]
    for store in stores:
        store._disk_bytes = lambda: 1 << 50  # type: ignore[method-assign]
    stores[0].create(MOVE, 60 * GIB)
    with pytest.raises(Full, match="61440 MiB are reserved for other moves"):
        stores[1].create(OTHER, 60 * GIB)
    stores[0].drop(MOVE)
    two[0].state()
    stores[1].create(OTHER, 60 * GIB)


@pytest.mark.root
def test_own_room_is_that_of_the_tightest_cgroup() -> None:
    program = (
        "from snapshotd.proc.memory import OwnRoom, memory_room\n"
        "import os\n"
        "own = OwnRoom()\n"
        "before, keep = own.tightest(), bytearray(os.urandom(1 << 20)) * 64\n"
        "after = own.tightest()\n"
        "print(before[0].startswith('cgroup'), before[1] <= 256 << 20, before[1] - after[1] > 60 << 20)\n"
    )
    with limited(256 << 20) as command:
        done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


def test_memory_of_ranks_is_not_limited_by_the_daemons_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are charged to cgroups beside the daemon's, below the same slice."""
    slice_bytes, daemon_bytes = 6 << 20, 1 << 20
    for group, limit in (("slice", slice_bytes), ("slice/daemon", daemon_bytes)):
        folder = tmp_path / group
        folder.mkdir()
        for name, text in (("memory.max", f"{limit}"), ("memory.current", "0"), ("memory.stat", "")):
            (folder / name).write_text(text)
    texts = {
        "/proc/self/cgroup": "0::/slice/daemon\n",
        "/proc/self/mountinfo": f"1 0 0:1 / {tmp_path} rw - cgroup2 none rw\n",
    }
    monkeypatch.setattr(memory, "read_text", texts.__getitem__)
    monkeypatch.setattr(mountinfo, "cgroup2_root", lambda mounts=None: tmp_path)
    monkeypatch.setattr(cgroup, "for_guests", lambda: tmp_path / "slice/snapshotd-ranks")
    assert OwnRoom().tightest() == (f"cgroup {tmp_path}/slice/daemon", daemon_bytes)
    assert memory.guests_room() == (f"cgroup {tmp_path}/slice", slice_bytes)
    room = Room(tmp_path / "memory", "a")
    assert room.free().bytes == daemon_bytes
    assert room.free(own_groups=False).bytes > slice_bytes
    room.close()


def test_pressure_is_read_where_the_kernel_measures_it(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    assert memory.stalled_percent(str(file)) == 0
    file.write_text(
        "some avg10=50.00 avg60=1.00 avg300=0.10 total=1\nfull avg10=31.25 avg60=0.00 avg300=0.00 total=1\n"
    )
    assert memory.stalled_percent(str(file)) == 31.25


def test_forgotten_room_keeps_no_descriptor(tmp_path: Path) -> None:
    def opened() -> int:
        """Of the claims and locks of this test, and of what tells how much memory is free."""
        gc.collect()
        found = 0
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the scan itself
                path = os.readlink(entry.path)
                found += path == "/proc/meminfo" or path.startswith(str(tmp_path))
        return found

    before = opened()
    room = Room(tmp_path / "memory", "a")
    assert opened() == before + 3
    del room
    assert opened() == before
    room = Room(tmp_path / "memory", "a")
    room.close()
    room.close()
    assert opened() == before


def test_closed_room_locks_no_file_that_has_its_number_now(tmp_path: Path) -> None:
    room = Room(tmp_path / "memory", "a")
    number = room._turn_fd
    room.close()
    path = tmp_path / "file"
    path.touch()
    opened = os.open(path, os.O_RDWR)
    try:
        os.dup2(opened, number)  # as if it had been opened under that number
        with room.turn(), open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(opened)
        with contextlib.suppress(OSError):
            os.close(number)


def test_reservation_shrinks_by_what_is_taken(two: list[Room]) -> None:
    here, there = two
    taken = [0]
    here.shrink("checkpoint", lambda: taken[0])  # nothing is reserved
    here.count("checkpoint", lambda: 100)
    here.shrink("checkpoint", lambda: taken[0])
    for taken[0], left in ((-5, 100), (30, 70), (400, 0)):
        here.state()
        assert there.free().reserved_bytes == left
    here.give_up("checkpoint")
    assert here.free().reserved_bytes == 0
