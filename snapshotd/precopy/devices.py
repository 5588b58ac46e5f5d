"""Finds processes whose memory devices may write: no page table, and so no tracking, shows what they write.

A GPU or a network adapter writes into host memory that the process has registered with it. A disk writes into the memory of a
read from a file that is open with O_DIRECT, also some time after the kernel has looked at the page. Such a process is not
followed. Ordinary reads are copies by the kernel, which write through the page tables.
"""

from __future__ import annotations

import contextlib
import os
import stat

from snapshotd.proc.files import GONE

#: Memory devices (null, zero, random …), terminals, pseudo-terminals.
_HARMLESS = {1, 4, 5, *range(136, 144)}


def writers_of(pid: int) -> str:
    """Why devices may write the memory of a process; empty: none can. Blocking. Raises FileNotFoundError if it has ended."""
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(*GONE):
            about = os.stat(f"{folder}/{fd}")
            if stat.S_ISCHR(about.st_mode) and os.major(about.st_rdev) not in _HARMLESS:
                return f"it uses a device, {os.readlink(f'{folder}/{fd}')[:100]}"
            if stat.S_ISREG(about.st_mode) or stat.S_ISBLK(about.st_mode):
                with open(f"/proc/{pid}/fdinfo/{fd}", "rb", buffering=0) as file:
                    flags = next(line for line in file.read(200).splitlines() if line.startswith(b"flags:"))
                if int(flags.split()[1], 8) & os.O_DIRECT:
                    return f"it reads or writes past the page cache, {os.readlink(f'{folder}/{fd}')[:100]}"
    return ""
