"""The C library keeps freed blocks while images are transferred, and returns them afterwards."""

from __future__ import annotations

from pathlib import Path

from snapshotd.transport.image.malloc_tuning import freed_blocks_kept


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_freed_blocks_are_kept_until_the_last_user_leaves() -> None:
    with freed_blocks_kept():
        with freed_blocks_kept():
            blocks = [b"x" * (4 << 20) for _ in range(12)]
            full_bytes = resident_bytes()
            del blocks
        assert resident_bytes() > full_bytes - (8 << 20)
    assert resident_bytes() < full_bytes - (32 << 20)
