"""What another process has open, read while it opens and closes descriptors."""

from __future__ import annotations

from snapshotd.proc.fd import read_links


def open_links(pid: int) -> dict[int, str]:
    """Number and file of each descriptor. One that is closed meanwhile is left out."""
    return {number: link for number, link, _ in read_links(pid)}
