"""What tests need of the kernel. tests/lanes.py says which of these reasons a lane may have."""

from __future__ import annotations

import os

import pytest


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


#: PAGEMAP_SCAN, and userfaultfd's asynchronous write protection.
needs_page_scans = pytest.mark.skipif(
    _release() < (6, 7), reason="needs Linux 6.7, which tells which pages are written"
)
