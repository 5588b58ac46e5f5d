"""A node in good health for a day, with the noise that real counters have. All of it stays within the limits of the checks by
construction, whatever is drawn: a burst ends before it is an alarm, and two bursts are far enough apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from snapshotd.health.gpus import Nvlink, Reading

#: Between two readings. The default of a daemon is a third of it, but what counts is readings, and errors in an hour.
STEP_S = 30.0
#: Readings in an hour, and in a day.
HOUR, DAY = 120, 2880
#: What drivers and programs write all day, and what a user's own mistake looks like.
KERNEL_SAYS = (
    "NVRM: Xid (PCI:0000:10:00): 31, pid=4711, name=python, MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted",
    "NVRM: Xid (PCI:0000:10:00): 43, pid=4711, name=python, Ch 00000008",
    "Memory cgroup out of memory: Killed process 4711 (python) total-vm:4194304kB, anon-rss:2097152kB",
    "python[4711]: segfault at 7f0000000000 ip 00007f0000001000 sp 00007ffc00000000 error 4 in libc.so.6",
    "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.",
    "mlx5_core 0000:17:00.0 eth0: Link down",
    "perf: interrupt took too long (2511 > 2500), lowering kernel.perf_event_max_sample_rate to 79500",
)


class Bursts:
    """True for at most `longest` steps at a time, and after that false for at least `apart` steps."""

    def __init__(self, random: Random, longest: int, apart: int) -> None:
        self._steps = self._drawn(random, longest, apart)

    @staticmethod
    def _drawn(random: Random, longest: int, apart: int) -> Iterator[bool]:
        while True:
            yield from [False] * (apart + random.randrange(apart))
            yield from [True] * random.randint(1, longest)

    def __next__(self) -> bool:
        return next(self._steps)


class Counter:
    """Grows by one now and then: so often in an hour, on average."""

    def __init__(self, random: Random, an_hour: float) -> None:
        self._random, self._chance = random, an_hour / HOUR
        self.value = random.randrange(1000)

    def __next__(self) -> int:
        self.value += self._random.random() < self._chance
        return self.value


class Gpu:
    def __init__(self, random: Random, index: int) -> None:
        self.index, self.uuid = index, f"GPU-0000000{index}-0000-0000-0000-000000000000"
        self._random = random
        self._ecc, self._replays, self._nvlink = (Counter(random, rate) for rate in (2, 10, 5))
        # Six of ten readings would be an alarm.
        self._hot, self._brake, self._idle = (Bursts(random, 5, apart) for apart in (20, 100, 30))
        self.uncorrected = 0

    def reading(self) -> Reading:
        hot, idle = next(self._hot), next(self._idle)
        links = [Nvlink(0, 1, next(self._nvlink)), Nvlink(1, 0, 0)]
        return Reading(
            self.index,
            self.uuid,
            ecc_corrected=next(self._ecc),
            ecc_uncorrected=self.uncorrected,
            remapped_corrected=0,
            remapped_uncorrected=0,
            temperature_c=self._random.randint(86, 93) if hot else self._random.randint(35, 85),
            slowdown_c=90,
            slow_reasons=(0x20 if hot else 0) | (0x80 if next(self._brake) else 0),
            pcie_replays=next(self._replays),
            pcie_width=16,
            pcie_width_max=16,
            pcie_generation=1 if idle else 5,
            pcie_generation_max=5,
            performance_state=8 if idle else 0,
            nvlinks=links,
        )


class Host:
    """The files of a node below `root`. `step` changes what has changed."""

    def __init__(self, random: Random, root: Path) -> None:
        self._random, self._root = random, root
        self._known: dict[str, str] = {}
        # Three of five readings would be an alarm, and four changes within an hour.
        self._flap, self._was_up, self._changes = Bursts(random, 2, HOUR), True, 2
        self._pressure, self._spoke = Bursts(random, 5, 20), 0
        self._rx, self._symbols, self._edac = (Counter(random, rate) for rate in (30, 36, 2))
        self._kmsg = root / "dev/kmsg"
        self._kmsg.parent.mkdir(parents=True)
        self._kmsg.touch()

    def step(self, at_s: float) -> None:
        up = not next(self._flap)
        self._changes += up != self._was_up
        self._was_up = up
        net, port, memory = (
            "sys/class/net/eth0",
            "sys/class/infiniband/mlx5_0/ports/1",
            "sys/devices/system/edac/mc/mc0",
        )
        percent = self._random.choice((25.0, 60.0)) if next(self._pressure) else self._random.choice((0.0, 3.5))
        files: dict[str, Any] = {
            f"{net}/type": 1,
            f"{net}/device/vendor": "0x15b3",
            f"{net}/operstate": "up" if up else "down",
            f"{net}/carrier_changes": self._changes,
            f"{net}/statistics/rx_errors": next(self._rx),
            f"{net}/statistics/tx_errors": 0,
            f"{port}/state": "4: ACTIVE",
            f"{port}/counters/link_downed": 1,
            f"{port}/counters/symbol_error": next(self._symbols),
            f"{memory}/ce_count": next(self._edac),
            f"{memory}/ue_count": 0,
            "proc/pressure/memory": f"some avg10=1.00\nfull avg10={percent} avg60=0.00",
            "proc/mounts": "/dev/nvme0n1p2 / ext4 rw,relatime 0 0\n/dev/nvme0n1p2 /usr ext4 ro,relatime 0 0",
        }
        for name, value in files.items():
            if self._known.get(name) != str(value):
                self._known[name] = str(value)
                path = self._root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{value}\n")
        if self._random.random() < 2 / HOUR:
            self._spoke += 1
            with self._kmsg.open("a") as file:
                file.write(f"4,{self._spoke},{int(at_s * 1e6)},-;{self._random.choice(KERNEL_SAYS)}\n")


class Clocks:
    """The clock of the node: slewed by NTP, and now and then stepped by less than a second."""

    def __init__(self, random: Random, unix_s: float) -> None:
        self._random, self.unix_s, self.monotonic_s = random, unix_s, 10_000.0

    def step(self) -> None:
        self.monotonic_s += STEP_S
        self.unix_s += STEP_S * (1 + self._random.uniform(-500e-6, 500e-6))
        if self._random.random() < 1 / HOUR:
            self.unix_s += self._random.uniform(-0.9, 0.9)
