"""Writes images to the disk, so that they survive a crash of the machine. Blocking."""

from __future__ import annotations

import os
from pathlib import Path


def sync_files(folder: Path) -> None:
    """Writes the content of all files of a folder."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if not entry.is_file(follow_symlinks=False):
            continue
        with open(entry.path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(*folders: Path) -> None:
    """Writes the names in each folder, in this order."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
