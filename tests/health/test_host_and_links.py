"""Counters of links and of the host, from a folder that looks like /sys and /proc."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.host import Clock, Edac, Pressure, ReadOnly
from snapshotd.health.links import Ethernet, InfiniBand
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters
from snapshotd.runtime.blocking import Reader

SETTINGS = Settings()


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def ethernet(root: Path, name: str = "eth0", state: str = "up", changes: int = 2, errors: int = 0) -> None:
    folder = root / "sys/class/net" / name
    put(folder / "type", 1)
    put(folder / "device/vendor", "0x15b3")
    put(folder / "operstate", state)
    put(folder / "carrier_changes", changes)
    put(folder / "statistics/rx_errors", errors)
    put(folder / "statistics/tx_errors", 0)


async def read(group: Group, at_s: float = 0.0, unix_s: float = 0.0) -> list[tuple[str, Severity, float]]:
    found: list[Signal] = await group.read(Now(unix_s, at_s))
    return [(signal.subject, signal.severity, signal.value) for signal in found]


async def test_a_link_that_goes_down_is_critical_once_it_stays_down(tmp_path: Path) -> None:
    ethernet(tmp_path)
    ethernet(tmp_path, "eth1", state="down")  # without a cable
    put(tmp_path / "sys/class/net/docker0/type", 1)
    put(tmp_path / "sys/class/net/docker0/operstate", "down")
    group = Ethernet(tmp_path, SETTINGS, Counters())
    assert await read(group) == []
    ethernet(tmp_path, state="down")
    assert [await read(group) for _ in range(3)] == [[], [], [("link:eth0", Severity.CRITICAL, 0.0)]]


async def test_a_link_that_flaps_or_has_errors_is_a_warning(tmp_path: Path) -> None:
    ethernet(tmp_path)
    group = Ethernet(tmp_path, SETTINGS, Counters())
    await read(group)
    ethernet(tmp_path, changes=5, errors=999)
    assert await read(group, 10.0) == []
    ethernet(tmp_path, changes=6, errors=1000)
    assert await read(group, 20.0) == [
        ("link:eth0", Severity.WARNING, 4.0),
        ("link:eth0", Severity.WARNING, 1000.0),
    ]


async def test_symbol_errors_of_infiniband(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    put(port / "state", "4: ACTIVE")
    put(port / "counters/symbol_error", 1_000_000)
    group = InfiniBand(tmp_path, SETTINGS, Counters())
    assert await read(group) == [], "what was counted before does not count"
    put(port / "counters/symbol_error", 1_000_120)
    assert await read(group) == [("link:mlx5_0/1", Severity.WARNING, 120.0)]


async def test_a_node_without_infiniband_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(Unable, match="infiniband cannot be read"):
        await InfiniBand(tmp_path, SETTINGS, Counters()).read(Now(0, 0))


async def test_memory_controllers(tmp_path: Path) -> None:
    group = Edac(tmp_path, SETTINGS, Counters())
    with pytest.raises(Unable, match="EDAC"):
        await read(group)
    folder = tmp_path / "sys/devices/system/edac/mc/mc0"
    put(folder / "ce_count", 50)
    put(folder / "ue_count", 0)
    assert await read(group) == []
    put(folder / "ce_count", 149)
    put(folder / "ue_count", 1)
    assert await read(group) == [("host", Severity.CRITICAL, 1.0)]
    put(folder / "ce_count", 150)
    assert await read(group) == [("host", Severity.WARNING, 100.0)]


async def test_memory_pressure_must_persist(tmp_path: Path) -> None:
    path = tmp_path / "proc/pressure/memory"
    put(path, "some avg10=50.00 avg60=0 avg300=0 total=1\nfull avg10=30.50 avg60=0 avg300=0 total=1")
    group = Pressure(tmp_path, SETTINGS)
    assert [await read(group) for _ in range(5)] == [[]] * 5
    assert await read(group) == [("host", Severity.WARNING, 30.5)]
    put(path, "full avg10=1.00 avg60=0 avg300=0 total=1")
    assert await read(group) == []


async def test_a_clock_that_jumps() -> None:
    group = Clock(SETTINGS)
    assert await read(group, at_s=100.0, unix_s=1_000_000.0) == []
    assert await read(group, at_s=110.0, unix_s=1_000_010.5) == [], "half a second is the work of a time service"
    assert await read(group, at_s=120.0, unix_s=999_990.5) == [("host", Severity.WARNING, -30.0)]
    assert await read(group, at_s=130.0, unix_s=1_000_000.5) == []


async def test_a_file_system_that_becomes_read_only(tmp_path: Path) -> None:
    mounts = tmp_path / "proc/mounts"
    put(mounts, "/dev/sda1 / ext4 rw,relatime 0 0\n/dev/sdb1 /usr ext4 ro 0 0\n/dev/sda1 /chroot ext4 ro 0 0")
    group = ReadOnly(tmp_path, SETTINGS)
    assert await read(group) == []
    put(mounts, "/dev/sda1 / ext4 ro,relatime 0 0\n/dev/sdb1 /usr ext4 ro 0 0\n/dev/sda1 /chroot ext4 ro 0 0")
    assert await read(group) == [("disk:sda1", Severity.CRITICAL, 0.0)]


async def test_a_read_that_hangs_is_given_up_and_not_begun_again() -> None:
    reader, go = Reader("sick card"), threading.Event()
    with pytest.raises(TimeoutError, match="not read within"):
        await reader.run(go.wait, 0.05)
    with pytest.raises(TimeoutError, match="has not returned yet"):
        await reader.run(lambda: 1, 60.0)
    go.set()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(TimeoutError):
                assert await reader.run(lambda: 2, 60.0) == 2
                break
            await asyncio.sleep(0.01)
    with pytest.raises(OSError, match="broken"):
        await reader.run(_fail, 60.0)


def _fail() -> None:
    raise OSError("broken")
