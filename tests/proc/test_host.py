"""Facts about this machine, compared with other sources."""

from __future__ import annotations

import os
import re
from pathlib import Path

import snapshotd
from snapshotd.proc import host


def test_facts() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}", host.boot_id())
    assert host.kernel() == os.uname().release
    assert host.architecture() == os.uname().machine
    assert host.cpu_features() == tuple(sorted(set(host.cpu_features())))
    assert host.cpu_features()
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host.memory_available_bytes() <= total_bytes
    assert snapshotd.__version__ == host.DAEMON_VERSION


def test_boottime_counts_from_boot() -> None:
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    assert abs(host.boottime_s() - uptime_s) < 5


def test_ram_backed_agrees_with_the_mount_table(tmp_path: Path) -> None:
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kinds[left.split()[4]] = right.split()[0]
    for place in ("/", "/dev/shm", "/proc", "/sys"):
        if place in kinds:
            assert host.is_ram_backed(Path(place)) == (kinds[place] in ("tmpfs", "ramfs")), place
    if kinds.get("/dev/shm") == "tmpfs":
        assert host.is_ram_backed(Path("/dev/shm/not/there/yet"))
