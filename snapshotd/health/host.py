"""The host besides GPUs and links: memory controllers, memory pressure, the clock, file systems."""

from __future__ import annotations

import re
from pathlib import Path

from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters, Rate, Recent
from snapshotd.runtime.blocking import Reader

READ_LIMIT_S = 10.0
_MEMORY_REMEDY = "move the ranks of this node away, then have its memory tested and replaced"
#: File systems of disks. Others are read-only by intention, or are not of this node.
_ON_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})


class Edac(Group):
    """The counters of the memory controllers."""

    names = ("host-edac",)

    def __init__(self, root: Path, settings: Settings, counters: Counters) -> None:
        self.every_s = settings.interval_s
        self._folder, self._counters = root / "sys/devices/system/edac/mc", counters
        self._limit = settings.threshold("host_edac_corrected_per_hour")
        self._corrected: dict[str, Rate] = {}
        self._reader = Reader("host-edac")

    async def read(self, now: Now) -> list[Signal]:
        found = []
        for name, (corrected, uncorrected) in (await self._reader.run(self._seen, READ_LIMIT_S)).items():
            key = f"host-edac:{name}:"
            if count := self._counters.increase(key + "ue", uncorrected, first=0):
                text = f"the memory controller {name} counted {count} uncorrectable errors"
                found.append(Signal("host-edac", "host", Severity.CRITICAL, text, _MEMORY_REMEDY, count))
            rate = self._corrected.setdefault(name, Rate(self._limit))
            if total := rate.add(now.monotonic_s, self._counters.increase(key + "ce", corrected)):
                text = f"the memory controller {name} corrected {total} errors within an hour"
                found.append(Signal("host-edac", "host", Severity.WARNING, text, _MEMORY_REMEDY, total))
        return found

    def _seen(self) -> dict[str, tuple[int, int]]:
        controllers = sorted(self._folder.glob("mc[0-9]*"))
        if not controllers:
            raise Unable("no driver of a memory controller is loaded (EDAC)")
        return {
            each.name: (int((each / "ce_count").read_text()), int((each / "ue_count").read_text()))
            for each in controllers
        }


class Pressure(Group):
    """How much of the last ten seconds no process ran because all waited for memory."""

    names = ("host-pressure",)

    def __init__(self, root: Path, settings: Settings) -> None:
        self.every_s = settings.interval_s
        self._path = root / "proc/pressure/memory"
        self._limit = settings.threshold("host_pressure_percent")
        self._recent = Recent(settings.threshold("host_pressure_readings"), 10)
        self._reader = Reader("host-pressure")

    async def read(self, now: Now) -> list[Signal]:
        content = await self._reader.run(self._path.read_text, READ_LIMIT_S)
        found = re.search(r"^full avg10=([\d.]+)", content, re.MULTILINE)
        if found is None:
            raise Unable(f"{self._path} has no line that begins with full")
        percent = float(found[1])
        if not self._recent.add(percent >= self._limit):
            return []
        text = f"for {percent:g} % of the last 10 s no process ran, because all waited for memory"
        remedy = "find out which process uses the memory (smem, systemd-cgtop), or move ranks away"
        return [Signal("host-pressure", "host", Severity.WARNING, text, remedy, percent)]


class Clock(Group):
    """Jumps of the clock, seen as a difference between two clocks that should go at the same speed."""

    names = ("host-clock",)
    urgent = True  # it costs nothing, and a pause would not be told from a jump

    def __init__(self, settings: Settings) -> None:
        self.every_s = settings.interval_s
        self._limit_s = settings.threshold("host_clock_jump_s")
        self._ahead_s: float | None = None

    async def read(self, now: Now) -> list[Signal]:
        ahead_s = now.unix_s - now.monotonic_s
        before, self._ahead_s = self._ahead_s, ahead_s
        if before is None or abs(jump_s := ahead_s - before) < self._limit_s:
            return []
        direction = "forwards" if jump_s > 0 else "backwards"
        text = f"the clock jumped {direction} by {abs(jump_s):.1f} s"
        remedy = (
            "look at the time service of this node (chronyc tracking, timedatectl): it should adjust the clock slowly"
        )
        return [Signal("host-clock", "host", Severity.WARNING, text, remedy, jump_s)]


class ReadOnly(Group):
    """File systems on disks that were writable and are not any more."""

    names = ("disk-read-only",)

    def __init__(self, root: Path, settings: Settings) -> None:
        self.every_s = settings.interval_s
        self._path = root / "proc/mounts"
        self._writable: set[str] = set()
        self._reader = Reader("disk-read-only")

    async def read(self, now: Now) -> list[Signal]:
        content = await self._reader.run(self._path.read_text, READ_LIMIT_S)
        mounts = [tuple(line.split()[:4]) for line in content.splitlines() if len(line.split()) >= 4]
        ours = [
            (device, place, set(options.split(","))) for device, place, kind, options in mounts if kind in _ON_DISKS
        ]
        # A writable file system may have further mounts that are read-only by intention.
        writable = {device for device, _, options in ours if "rw" in options}
        self._writable |= writable
        lost = {device: place for device, place, _ in reversed(ours) if device in self._writable - writable}
        return [self._signal(device, place) for device, place in sorted(lost.items())]

    def _signal(self, device: str, place: str) -> Signal:
        text = f"the file system of {device} at {place} has become read-only"
        remedy = "look for the cause in the kernel's log, check the file system (fsck), and mount it for writing again"
        return Signal("disk-read-only", f"disk:{device.rpartition('/')[2]}", Severity.CRITICAL, text, remedy)
