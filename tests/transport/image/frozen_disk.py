"""A file system on a loop device, whose writes hang as long as it is frozen."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class FrozenDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Writes, and what makes files, wait in the kernel until this ends."""
        subprocess.run(["fsfreeze", "-f", self.folder], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", self.folder], check=True)


@contextlib.contextmanager
def made(folder: Path, size_bytes: int = 256 << 20) -> Iterator[FrozenDisk]:
    """Skips without a loop device."""
    file, place = folder / "disk.img", folder / "loop-disk"
    place.mkdir()
    with file.open("wb") as image:
        image.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", file], check=True)
    if subprocess.run(["mount", "-o", "loop", file, place], check=False, capture_output=True).returncode:
        pytest.skip("needs a loop device")
    place.chmod(0o700)
    try:
        yield FrozenDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
