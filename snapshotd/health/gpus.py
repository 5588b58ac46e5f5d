"""The GPUs' health from NVML's counters. The judgement is pure; the readings come from a helper process of its own.

Not from the helper that moves use: NVML may hang on a sick GPU, the helper is killed then, and a call of a move that it was
doing would have to be repeated.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from snapshotd.cuda import library
from snapshotd.cuda.helper_pool import HelperPool
from snapshotd.cuda.helper_process import Lost
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters, Rate, Recent

NAMES = ("gpu-lost", "gpu-ecc", "gpu-remap", "gpu-temperature", "gpu-power", "gpu-pcie", "gpu-nvlink")
#: The first query loads the driver where it does not stay loaded, which takes a second or two for each GPU.
READ_LIMIT_S = 60.0
#: After a query that hung: each costs a helper process, which may not be killable.
AGAIN_S = 60.0
_READINGS = 10
_UUID = re.compile(r"GPU-[0-9a-f-]{36}")

_HW_THERMAL, _SW_THERMAL, _POWER_BRAKE = 0x40, 0x20, 0x80
_RESET = "move the ranks of this GPU away, then reset it (nvidia-smi --gpu-reset); replace it if this returns"
_REPLACE = "move the ranks of this node away, power it off and on, and have the GPU and its seat examined"


class Nvlink(msgspec.Struct, frozen=True):
    link: int
    up: int
    errors: int


class Reading(msgspec.Struct, frozen=True):
    """One GPU, as snapshotd/cuda/nvml_health.py describes it. None: it does not have that."""

    index: int
    uuid: str
    lost: str = ""
    pci: str = ""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    remap_pending: int = 0
    remap_failed: int = 0
    retired_pending: int = 0
    temperature_c: int | None = None
    slowdown_c: int | None = None
    slow_reasons: int = 0
    pcie_replays: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    performance_state: int | None = None
    nvlinks: list[Nvlink] = []


@dataclass
class _Windows:
    corrected: Rate
    replays: Rate
    nvlink_errors: Rate
    hot: Recent
    brake: Recent
    narrow: Recent
    links_down: dict[int, Recent] = field(default_factory=dict)
    links_seen_up: set[int] = field(default_factory=set)


class Judge:
    """Readings in, signals out. Pure but for what it remembers."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings, self._counters = settings, counters
        self._windows: dict[str, _Windows] = {}
        self._known: dict[str, int] = {}  # the index of each GPU that was seen

    def judged(self, readings: list[Reading], now: Now) -> list[Signal]:
        found = self._lost(readings)
        for reading in readings:
            if not reading.lost and reading.uuid:
                found += self._one(reading, now)
        return found

    def _lost(self, readings: list[Reading]) -> list[Signal]:
        by_index = {index: uuid for uuid, index in self._known.items()}
        found = []
        for reading in readings:
            if reading.lost:
                uuid = reading.uuid or by_index.get(reading.index, f"index {reading.index}")
                text = f"GPU {reading.index} does not answer: {reading.lost}"
                found.append(Signal("gpu-lost", f"gpu:{uuid}", Severity.CRITICAL, text, _REPLACE))
        self._known |= {reading.uuid: reading.index for reading in readings if reading.uuid}
        present = {reading.uuid for reading in readings}
        silent = {reading.index for reading in readings if not reading.uuid}
        for uuid, index in list(self._known.items()):
            if uuid not in present and index not in silent:
                del self._known[uuid]  # once: an operator who removed it clears the alarm for good
                text = f"GPU {index} is no longer listed by the driver"
                found.append(Signal("gpu-lost", f"gpu:{uuid}", Severity.CRITICAL, text, _REPLACE))
        return found

    def _one(self, gpu: Reading, now: Now) -> list[Signal]:
        window = self._windows.get(gpu.uuid)
        if window is None:
            limit = self._settings.threshold
            window = self._windows[gpu.uuid] = _Windows(
                Rate(limit("gpu_ecc_corrected_per_hour")),
                Rate(limit("gpu_pcie_replays_per_hour")),
                Rate(limit("gpu_nvlink_errors_per_hour")),
                hot=Recent(limit("gpu_slow_readings"), _READINGS),
                brake=Recent(limit("gpu_slow_readings"), _READINGS),
                narrow=Recent(limit("gpu_slow_readings"), _READINGS),
            )
        found = [*self._memory(gpu, window, now), *self._slow(gpu, window)]
        return [*found, *self._pcie(gpu, window, now), *self._nvlink(gpu, window, now)]

    def _increase(self, gpu: Reading, name: str, *, first: int | None = None) -> int:
        value = getattr(gpu, name)
        return 0 if value is None else self._counters.increase(f"gpu:{gpu.uuid}:{name}", value, first=first)

    def _memory(self, gpu: Reading, window: _Windows, now: Now) -> list[Signal]:
        subject, found = f"gpu:{gpu.uuid}", []
        if count := self._increase(gpu, "ecc_uncorrected", first=0):
            text = f"GPU {gpu.index} had {count} uncorrectable errors of memory"
            found.append(Signal("gpu-ecc", subject, Severity.CRITICAL, text, _RESET, count))
        if total := window.corrected.add(now.monotonic_s, self._increase(gpu, "ecc_corrected")):
            text = f"GPU {gpu.index} corrected {total} errors of memory within an hour"
            found.append(Signal("gpu-ecc", subject, Severity.WARNING, text, _RESET, total))
        if gpu.remap_failed:
            text = f"GPU {gpu.index} could not replace a row of its memory"
            found.append(Signal("gpu-remap", subject, Severity.CRITICAL, text, _RESET))
        elif gpu.remap_pending or gpu.retired_pending:
            text = f"GPU {gpu.index} needs a reset to replace damaged memory by spare memory"
            remedy = "move the ranks of this GPU away when it suits, then reset it (nvidia-smi --gpu-reset)"
            found.append(Signal("gpu-remap", subject, Severity.WARNING, text, remedy))
        count = self._increase(gpu, "remapped_uncorrected") + self._increase(gpu, "remapped_corrected")
        if count:
            text = f"GPU {gpu.index} replaced {count} rows of its memory"
            found.append(Signal("gpu-remap", subject, Severity.NOTICE, text, "replace it if this happens often", count))
        return found

    def _slow(self, gpu: Reading, window: _Windows) -> list[Signal]:
        subject, found = f"gpu:{gpu.uuid}", []
        limit, temperature = gpu.slowdown_c, gpu.temperature_c
        too_hot = limit is not None and temperature is not None and 0 < limit <= temperature
        if window.hot.add(too_hot or bool(gpu.slow_reasons & (_HW_THERMAL | _SW_THERMAL))):
            shown = f" at {temperature} °C" if temperature is not None else ""
            text = f"GPU {gpu.index} is slowed down because of its temperature{shown}"
            remedy = "examine the cooling of this node: fans, air flow, temperature of the room"
            found.append(Signal("gpu-temperature", subject, Severity.WARNING, text, remedy, temperature or 0))
        if window.brake.add(bool(gpu.slow_reasons & _POWER_BRAKE)):
            text = f"GPU {gpu.index} is slowed down by the power brake of the chassis"
            remedy = "examine the power supplies of this node and the limits of its rack"
            found.append(Signal("gpu-power", subject, Severity.WARNING, text, remedy))
        return found

    def _pcie(self, gpu: Reading, window: _Windows, now: Now) -> list[Signal]:
        subject, found = f"gpu:{gpu.uuid}", []
        remedy = "have the seat of the GPU and its riser examined; move its ranks away if this persists"
        if total := window.replays.add(now.monotonic_s, self._increase(gpu, "pcie_replays")):
            text = f"GPU {gpu.index} repeated {total} transfers on PCIe within an hour"
            found.append(Signal("gpu-pcie", subject, Severity.WARNING, text, remedy, total))
        narrow = _less(gpu.pcie_width, gpu.pcie_width_max)
        # An idle GPU lowers the speed to save power, the width never.
        slow = gpu.performance_state == 0 and _less(gpu.pcie_generation, gpu.pcie_generation_max)
        if window.narrow.add(narrow or slow):
            now_, could = (
                (gpu.pcie_width, gpu.pcie_width_max) if narrow else (gpu.pcie_generation, gpu.pcie_generation_max)
            )
            unit = "lanes" if narrow else "generation"
            text = f"GPU {gpu.index} is connected by PCIe with {unit} {now_} instead of {could}"
            found.append(Signal("gpu-pcie", subject, Severity.WARNING, text, remedy, now_ or 0))
        return found

    def _nvlink(self, gpu: Reading, window: _Windows, now: Now) -> list[Signal]:
        subject, found = f"gpu:{gpu.uuid}", []
        remedy = "move the ranks of this node away, reset all its GPUs, and have the link examined if this returns"
        down = []
        for each in gpu.nvlinks:
            if each.up:
                window.links_seen_up.add(each.link)
            recent = window.links_down.setdefault(each.link, Recent(2, 3))
            if recent.add(not each.up and each.link in window.links_seen_up):
                down.append(each.link)
        if down:
            text = f"GPU {gpu.index} lost its NVLink {', '.join(map(str, down))}"
            found.append(Signal("gpu-nvlink", subject, Severity.CRITICAL, text, remedy, len(down)))
        increase = sum(
            self._counters.increase(f"gpu:{gpu.uuid}:nvlink:{each.link}", each.errors) for each in gpu.nvlinks
        )
        if total := window.nvlink_errors.add(now.monotonic_s, increase):
            text = f"GPU {gpu.index} had {total} errors of NVLink within an hour"
            found.append(Signal("gpu-nvlink", subject, Severity.WARNING, text, remedy, total))
        return found


def _less(now: int | None, could: int | None) -> bool:
    return now is not None and could is not None and 0 < now < could


class Gpus(Group):
    """Reads the GPUs through a helper process, if this node has NVML."""

    names = NAMES

    def __init__(self, root: Path, library_dir: str, settings: Settings, counters: Counters) -> None:
        self.every_s = settings.interval_s
        self._driver = root / "proc/driver/nvidia/gpus"
        self._library_dir = library_dir
        self._helpers = HelperPool(library_dir)
        self._judge = Judge(settings, counters)
        self._by_pci: dict[str, str] = {}
        self._had_gpus = False
        self._not_before_s = 0.0
        self._silence = ""
        self._latest: dict[str, Reading] = {}
        self._read_s = float("-inf")

    def reads(self, uuid: str, name: str) -> bool:
        """Whether a field of Reading is known of this GPU, from a reading that is not old."""
        is_old = time.monotonic() - self._read_s > max(AGAIN_S, 3 * self.every_s)
        return not is_old and uuid in self._latest and getattr(self._latest[uuid], name) is not None

    def at(self, pci: str) -> str:
        """The UUID of the GPU at an address of PCI as the kernel's log writes it; "" if it is not known."""
        return self._by_pci.get(_address(pci), "") or self._said_by_driver(_address(pci))

    def _said_by_driver(self, address: str) -> str:
        """The same from the driver's own files: of a GPU that was lost before NVML was asked."""
        try:
            for folder in self._driver.iterdir():
                if _address(folder.name) == address:
                    found = _UUID.search((folder / "information").read_text())
                    return found[0] if found else ""
        except (OSError, UnicodeDecodeError):
            pass
        return ""

    async def read(self, now: Now) -> list[Signal]:
        if not library.found(library.NVML, self._library_dir):
            raise Unable(f"this node has no {library.NVML}")
        if now.monotonic_s < self._not_before_s:
            raise Unable(self._silence)
        try:
            helper = await self._helpers.current()
            answer = await helper.ask("health", READ_LIMIT_S)
        except Lost as lost:
            raise Unable(str(lost)) from lost
        except TimeoutError:
            return self._silent(now)
        if "unusable" in answer:
            helper.retire()
            self._not_before_s, self._silence = now.monotonic_s + AGAIN_S, str(answer["unusable"])
            raise Unable(self._silence)
        if answer["error"]:
            raise Unable(str(answer["error"]))
        readings = self._readings(answer)
        self._latest, self._read_s = {each.uuid: each for each in readings if not each.lost}, now.monotonic_s
        return self._judge.judged(readings, now)

    def _readings(self, answer: Mapping[str, Any]) -> list[Reading]:
        readings = msgspec.convert(answer["gpus"], list[Reading])
        self._by_pci |= {_address(each.pci): each.uuid for each in readings if each.pci and each.uuid}
        self._had_gpus = self._had_gpus or bool(readings)
        return readings

    def _silent(self, now: Now) -> list[Signal]:
        """NVML hangs. On a node whose GPUs have answered before, one of them is sick."""
        self._silence = f"NVML did not answer within {READ_LIMIT_S:g} s"
        self._not_before_s = now.monotonic_s + AGAIN_S
        if not self._had_gpus:
            raise Unable(self._silence)
        return [Signal("gpu-lost", "host", Severity.CRITICAL, self._silence, _REPLACE)]

    async def close(self) -> None:
        await asyncio.shield(self._helpers.close())


def _address(pci: str) -> str:
    """domain:bus:device in one form. NVML writes 00000000:65:00.0, the kernel's log 0000:65:00."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0')}:{rest.partition('.')[0]}"
