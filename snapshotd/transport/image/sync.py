"""Writes images to the disk, so that they survive a crash of the machine. Blocking."""

from __future__ import annotations

import os
from pathlib import Path


def sync_files(folder: Path) -> None:
    """Writes the content of all files of a folder."""
    for entry in os.scandir(folder):
        with open(entry.path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
