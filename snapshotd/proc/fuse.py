"""File systems that a process of a user serves (FUSE): such a process may never answer, and a thread that waits for it hangs.

Invariant: nothing here waits for such a process. Mounts are read as text, and attributes as the kernel has them in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

from snapshotd.proc import mountinfo
from snapshotd.proc.files import read_text

_CONNECTIONS = "/sys/fs/fuse/connections"
_AT_NO_AUTOMOUNT, _AT_DONT_SYNC, _BASIC_STATS = 0x800, 0x4000, 0x7FF
#: struct statx: mask, block size, attributes, links, user, group, mode, inode, size, blocks; then four times and the devices.
_HEAD, _TIME, _DEVICES = struct.Struct("=IIQIIIHxxQQQQ"), struct.Struct("=qIxxxx"), struct.Struct("=IIII")

_libc = ctypes.CDLL(None, use_errno=True)


def devices_of_users(pid: int) -> frozenset[int]:
    """The devices (st_dev) of the FUSE file systems that a process can see and that root did not mount."""
    found = set()
    text = read_text(f"/proc/{pid}/mountinfo")
    if " - fuse" in text:
        for mount in mountinfo.parse(text):
            if mount.kind.partition(".")[0] in {"fuse", "fuseblk"} and "user_id=0" not in mount.options:
                found.add(mount.device)
    with contextlib.suppress(OSError):  # also those that are unmounted and still in use; not mounted everywhere
        for name in os.listdir(_CONNECTIONS):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"{_CONNECTIONS}/{name}").st_uid != 0:
                    found.add(int(name))
    return frozenset(found)


def stat_in_memory(path: str) -> os.stat_result:
    """stat(2), without asking a server. For links of /proc/PID, which lead to files that are in use. Raises OSError."""
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_NO_AUTOMOUNT | _AT_DONT_SYNC
    if _libc.statx(-100, os.fsencode(path), flags, _BASIC_STATS, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    _, block, _, links, user, group, mode, inode, size, blocks, _ = _HEAD.unpack_from(buffer)
    at = _HEAD.size
    (accessed, a_ns), _, (changed, c_ns), (modified, m_ns) = (_TIME.unpack_from(buffer, at + 16 * i) for i in range(4))
    r_major, r_minor, major, minor = _DEVICES.unpack_from(buffer, at + 64)
    more = {
        "st_atime_ns": accessed * 10**9 + a_ns,
        "st_mtime_ns": modified * 10**9 + m_ns,
        "st_ctime_ns": changed * 10**9 + c_ns,
        "st_blksize": block,
        "st_blocks": blocks,
        "st_rdev": os.makedev(r_major, r_minor),
    }
    fields = (mode, inode, os.makedev(major, minor), links, user, group, size, accessed, modified, changed)
    return os.stat_result(fields, more)


def stat_link(path: str, users_devices: frozenset[int]) -> os.stat_result:
    """stat(2) of a link of /proc/PID. Of a file on one of these devices, as the kernel has it in memory."""
    if users_devices:
        found = stat_in_memory(path)
        if found.st_dev in users_devices:
            return found
    return os.stat(path)
