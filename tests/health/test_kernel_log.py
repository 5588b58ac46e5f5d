"""What the kernel's log says: the lines as drivers write them, and nothing that users could write there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.health import xids
from snapshotd.health.alarms import Severity
from snapshotd.health.check import Now, Unable
from snapshotd.health.kernel_log import FIRST_S, NAMES, KernelLog, Record, judged, parse
from snapshotd.health.settings import CHECKS
from snapshotd.health.windows import Counters

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NOW = Now(1_800_000_000.0, 50_000.0)


def _uuid(address: str) -> str:
    return UUID if address == "0000:65:00" else ""


@pytest.mark.parametrize(
    ("text", "check", "subject", "severity"),
    [
        ("NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus.", "gpu-xid", f"gpu:{UUID}", 3),
        ("NVRM: Xid (PCI:0000:b3:00): 63, pid=1896, Row Remapper: New row", "gpu-xid", "gpu:0000:b3:00", 2),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "gpu-xid", "gpu:0000:03:00", 2),
        ("NVRM: Xid (PCI:0000:65:00): 31, pid=4711, name=python, Ch 00000008", "gpu-xid", f"gpu:{UUID}", 1),
        ("NVRM: Xid (PCI:0000:65:00): 154, GPU recovery action changed from 0x0 to 0x1", "gpu-xid", f"gpu:{UUID}", 3),
        ("I/O error, dev nvme0n1, sector 1048576 op 0x0:(READ) flags 0x80700", "disk-errors", "disk:nvme0n1", 2),
        ("blk_update_request: I/O error, dev sda, sector 2048", "disk-errors", "disk:sda", 2),
        ("critical medium error, dev sdb, sector 1234 op 0x0:(READ)", "disk-errors", "disk:sdb", 2),
        ("Buffer I/O error on dev dm-0, logical block 7, async page read", "disk-errors", "disk:dm-0", 2),
        ("nvme nvme1: controller is down; will reset: CSTS=0xffffffff", "disk-errors", "disk:nvme1", 3),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "disk-read-only", "disk:sda1", 3),
        ("XFS (dm-3): Corruption detected. Shutting down filesystem", "disk-read-only", "disk:dm-3", 3),
        (
            "BTRFS info (device nvme0n1p2 state E): forced readonly",
            "disk-read-only",
            "disk:nvme0n1p2",
            3,
        ),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#0_DIMM#0", "host-mce", "host", 3),
        ("mce: [Hardware Error]: Machine check events logged", "host-mce", "host", 2),
        ("Memory failure: 0x5bd1e: recovery action for dirty LRU page: Recovered", "host-mce", "host", 3),
        ("Out of memory: Killed process 4711 (python) total-vm:1234kB", "host-oom", "host", 2),
        ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", "host-oom", "host", 1),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]", "host-hang", "host", 3),
        ("INFO: task python:4711 blocked for more than 120 seconds.", "host-hang", "host", 2),
    ],
)
def test_lines_of_drivers_are_recognised(text: str, check: str, subject: str, severity: int) -> None:
    signal = judged(Record(1, 0.0, text), _uuid)
    assert signal is not None
    assert (signal.check, signal.subject, signal.severity) == (check, subject, severity)
    assert signal.remedy
    assert check in NAMES


@pytest.mark.parametrize(
    "text",
    [
        "eth0: link becomes ready",
        "I/O error, dev loop7, sector 0 op 0x0:(READ)",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake",
        "traps: NVRM: Xid (PCI:0000:65:00): 79[4711] trap divide error",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "mce: CPU supports 20 MCE banks",
    ],
)
def test_other_lines_are_not(text: str) -> None:
    assert judged(Record(1, 0.0, text), _uuid) is None


#: What kernels wrote about processes of user 1500 that had given themselves, their program or their cgroup such a name.
FORGED = [
    "EDAC a: 1 UE [4449]: unhandled exception: DABT (lower EL), level 0 translation fault in libc.so.6[9e6d0]",
    "EDAC MC0: 1 UE [4449]: segfault at 0 ip 0000000000401136 sp 00007ffd5e8a5f10 error 4 in x on CPU (page:0x1[401000+1000]",
    "XFS (sda1): [7397]: unhandled exception: DABT (lower EL), level 0 translation fault in Shutting down Filesystem[780]",
    "XFS (sda1): : page allocation failure: order:0, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset=Shutting down filesystem",
    "BTRFS a[12]: segfault at 0 ip 000000 sp 0000 error 4 in (device sda) forced readonly[401000+1000]",
    "I/O error, dev invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "a b error, dev (12): drop_caches: 3",
    "INFO: task a[123]: segfault at 0 ip 00401136 sp 7ffd5e8a5f10 error 4 in x:1 blocked for more than 9 seconds[1000+1000]",
    "NVRM: Xid (0): [12]: segfault at 0 ip 00401136 sp 7ffd5e8a5f10 error 4 in x[1000+1000]",
]


@pytest.mark.parametrize("text", FORGED)
def test_what_a_user_can_have_the_kernel_write_is_no_alarm(text: str) -> None:
    assert judged(Record(1, 0.0, text), _uuid) is None


_CRASH = "import ctypes, os; os.setgid(1500); os.setuid(1500); ctypes.CDLL(None).prctl(15, {!r}); ctypes.string_at(0)"


@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/dev/kmsg", os.R_OK), reason="needs root and the kernel's log")
@pytest.mark.parametrize("name", [b"EDAC MC0: 1 UE ", b"XFS (sda1): ", b"NVRM: Xid (0): "])
async def test_a_crash_of_a_users_process_is_no_alarm(name: bytes) -> None:
    log = KernelLog(Path("/"), Counters(), _uuid)
    while await log.read(Now.taken()):
        pass
    assert subprocess.run([sys.executable, "-c", _CRASH.format(name)], check=False).returncode == -signal.SIGSEGV
    # Other programs of this machine may fail too, so only what has the name counts.
    found = await log.read(Now.taken())
    assert [each.text for each in found if name.decode() in each.text] == []
    await log.close()


def test_only_records_of_the_kernel_itself_count() -> None:
    assert parse("3,101,5000000,-;NVRM: Xid") == Record(101, 5.0, "NVRM: Xid")
    assert parse("12,102,5000000,-;NVRM: Xid") is None, "facility 1: a program wrote it"
    assert parse(" SUBSYSTEM=pci") is None
    assert parse("no record") is None


def test_the_catalogue_is_complete_and_an_unknown_code_is_a_warning() -> None:
    found = xids.catalogue()
    assert {48, 63, 64, 74, 79, 92, 94, 95, 119} <= set(found)
    assert all(xid.meaning and xid.remedy for xid in found.values())
    assert found[79].severity is Severity.CRITICAL
    assert found[13].severity is Severity.NOTICE, "a program's own error moves no rank"
    assert xids.of(9999).severity is Severity.WARNING
    assert set(NAMES) <= set(CHECKS)


def written(root: Path, *lines: str) -> None:
    (root / "dev").mkdir(exist_ok=True)
    with (root / "dev/kmsg").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def xid(sequence: int, code: int = 79, at_s: float = NOW.monotonic_s) -> str:
    return f"4,{sequence},{int(at_s * 1e6)},-;NVRM: Xid (PCI:0000:65:00): {code}, pid=1"


async def test_each_record_is_read_once_also_across_restarts(tmp_path: Path) -> None:
    written(tmp_path, xid(5), " SUBSYSTEM=pci", xid(6, 48))
    counters = Counters()
    log = KernelLog(tmp_path, counters, _uuid)
    assert [signal.value for signal in await log.read(NOW)] == [79.0, 48.0]
    assert await log.read(NOW) == []
    written(tmp_path, xid(7, 63))
    assert [signal.value for signal in await log.read(NOW)] == [63.0]
    await log.close()
    written(tmp_path, xid(8, 94))
    again = KernelLog(tmp_path, Counters(counters.values), _uuid)
    assert [signal.value for signal in await again.read(NOW)] == [94.0]
    await again.close()


async def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    written(tmp_path)
    log = KernelLog(tmp_path, Counters(), _uuid)
    with (tmp_path / "dev/kmsg").open("a") as file:
        file.write(xid(1)[:20])
    assert await log.read(NOW) == []
    with (tmp_path / "dev/kmsg").open("a") as file:
        file.write(xid(1)[20:] + "\n")
    assert [signal.value for signal in await log.read(NOW)] == [79.0]
    await log.close()


async def test_at_the_first_start_old_records_do_not_count(tmp_path: Path) -> None:
    written(tmp_path, xid(1, 48, at_s=NOW.monotonic_s - FIRST_S - 10), xid(2, 79, at_s=NOW.monotonic_s - 10))
    log = KernelLog(tmp_path, Counters(), _uuid)
    assert [signal.value for signal in await log.read(NOW)] == [79.0]
    await log.close()


async def test_a_log_that_cannot_be_opened_is_a_reason_and_is_tried_again(tmp_path: Path) -> None:
    log = KernelLog(tmp_path, Counters(), _uuid)
    with pytest.raises(Unable, match="dev/kmsg cannot be read"):
        await log.read(NOW)
    written(tmp_path, xid(1))
    assert len(await log.read(NOW)) == 1
    await log.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="this machine's log cannot be read")
async def test_the_real_log_can_be_read_to_its_end() -> None:
    log = KernelLog(Path("/"), Counters(), _uuid)
    for _ in range(50):
        await log.read(Now.taken())
    await log.close()
