"""Files of processes whose last name was removed."""

from __future__ import annotations

import contextlib
import os

from snapshotd.proc import maps
from snapshotd.proc.fd import read_links


def count_files(pids: list[int]) -> int:
    """How many distinct unlinked or anonymous shared files the tree has open or mapped, at most."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for mapping in maps.read(pid):
                if mapping.path.endswith(maps.DELETED):
                    found.add(f"{mapping.device}:{mapping.inode}")
        with contextlib.suppress(OSError):
            for number, link, folder in read_links(pid):
                with contextlib.suppress(OSError):
                    if link.endswith(maps.DELETED):
                        file = os.stat(str(number), dir_fd=folder)
                        found.add(f"{file.st_dev}:{file.st_ino}")
    return len(found)
