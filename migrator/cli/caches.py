"""Where programs of a rank keep caches that they expect to find again after a move.

A cache on storage that all nodes share is there, and one below /tmp moves with the rank. Triton's is in the home directory:
if that is on a disk of this node, it is moved to /tmp.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Mapping
from pathlib import Path

TRITON_VARIABLE = "TRITON_CACHE_DIR"
#: Names of this directory are predictable, so it may belong to somebody else already. Then it is not used.
_PLACE = "/tmp"
#: statfs(2) of file systems that belong to one node: ext2 to ext4, xfs, btrfs, f2fs, zfs, tmpfs, overlay.
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630})


def presets(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for caches that would otherwise be on this node only."""
    home = environment.get("HOME")
    if not home or TRITON_VARIABLE in environment or "TRITON_HOME" in environment or not is_local(Path(home)):
        return {}
    cache = Path(_PLACE, f"triton_{os.geteuid()}")
    return {TRITON_VARIABLE: str(cache)} if _own(cache) else {}


def is_local(path: Path) -> bool:
    """Whether the path is known to be on storage of this node alone."""
    buffer = (ctypes.c_long * 32)()  # struct statfs; f_type is its first word, which os.statvfs does not have
    return ctypes.CDLL(None).statfs(os.fsencode(path), buffer) == 0 and buffer[0] & 0xFFFFFFFF in _LOCAL


def _own(folder: Path) -> bool:
    """Makes a directory that no other user can write to, unless there is one."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
