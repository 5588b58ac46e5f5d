"""The processes of a user on this node: whether there are any, and what they have open or mapped."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator

from snapshotd.api.errors import Timeout
from snapshotd.proc import fuse, maps, privileges, tree
from snapshotd.proc.fd import read_links
from snapshotd.proc.files import GONE

#: For the mappings of one process: reading them takes about a millisecond.
_LIMIT_S = 1.0
#: For all processes of a user, who decides how many there are, and how many files each has open.
_ALL_S = 30.0

File = tuple[int, int]  # device, inode


def has_processes(user_id: int) -> bool:
    """Whether any process has this user among its ids. Zombies do not count, which use nothing any more, nor do children of
    this process, which work for the daemon with that user's rights, or wait for such work."""
    return any(_parent(pid) not in (os.getpid(), None) for pid in _processes(user_id))


def held_files(user_id: int, devices: Collection[int], inside: Collection[int]) -> set[File]:
    """The files on these devices that processes of the user have open or mapped, except the processes `inside`. Only for
    file systems whose device numbers in /proc/PID/maps are those of stat(2), such as tmpfs. Raises Timeout."""
    found: set[File] = set()
    end_s = time.monotonic() + _ALL_S
    for pid in _processes(user_id):
        if pid in inside:
            continue
        _must_be_before(end_s, user_id)
        with contextlib.suppress(*GONE, OSError):
            for number, link, _ in read_links(pid):
                _must_be_before(end_s, user_id)
                if link.startswith("/"):
                    with contextlib.suppress(OSError):
                        seen = fuse.stat_in_memory(f"/proc/{pid}/fd/{number}")
                        found.add((seen.st_dev, seen.st_ino))
        with contextlib.suppress(*GONE, OSError, Timeout):
            found |= maps.parse_inodes(maps.read_raw(pid, _LIMIT_S))
    return {(device, inode) for device, inode in found if device in devices}


def _must_be_before(end_s: float, user_id: int) -> None:
    if time.monotonic() > end_s:
        raise Timeout(
            f"the processes of user {user_id} have too many files open: looking at them took longer than {_ALL_S:.0f} s",
            remedy="end other processes of that user on the source, or set carry_closed_bytes = 0 there",
        )


def _parent(pid: int) -> int | None:
    try:
        return tree.parent(pid)
    except GONE:
        return None


def _processes(user_id: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if user_id in privileges.read(int(name)).all_user_ids and os.readlink(f"/proc/{name}/exe"):
                    yield int(name)
            except (*GONE, OSError):
                continue
