"""/proc/meminfo: the memory of this node."""

from __future__ import annotations

from snapshotd.proc.files import parse_fields, read_text


def parse_available(text: str) -> int:
    """MemAvailable in bytes: what can be allocated without swapping. 0 if the kernel does not report it."""
    amount = parse_fields(text).get("MemAvailable", "0 kB")
    return int(amount.split()[0]) * 1024


def available_bytes() -> int:
    return parse_available(read_text("/proc/meminfo"))
