"""What NVML's counters mean: pure, over readings as nvml_health.py makes them."""

from __future__ import annotations

from typing import Any

from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Now
from snapshotd.health.gpus import NAMES, Judge, Nvlink, Reading, _address
from snapshotd.health.settings import CHECKS, Settings
from snapshotd.health.windows import HOUR_S, Counters

CRITICAL, WARNING, NOTICE = Severity.CRITICAL, Severity.WARNING, Severity.NOTICE
QUIET: dict[str, Any] = {
    "ecc_corrected": 7,
    "ecc_uncorrected": 0,
    "remapped_corrected": 1,
    "remapped_uncorrected": 0,
    "temperature_c": 60,
    "slowdown_c": 90,
    "pcie_replays": 3,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "performance_state": 0,
    "nvlinks": [Nvlink(0, 1, 0), Nvlink(1, 0, 0)],
}


class Gpu:
    """One GPU that is read again and again, ten seconds apart."""

    def __init__(self, settings: Settings | None = None, counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self.judge = Judge(settings or Settings(), self.counters)
        self.at_s = 0.0

    def reads(self, **changed: Any) -> list[tuple[str, Severity, float]]:
        self.at_s += 10.0
        return shown(self.judge.judged([Reading(0, "GPU-1", **{**QUIET, **changed})], Now(0.0, self.at_s)))


def shown(signals: list[Signal]) -> list[tuple[str, Severity, float]]:
    return [(signal.check, signal.severity, signal.value) for signal in signals]


def test_a_healthy_gpu_is_quiet_for_a_day() -> None:
    gpu = Gpu()
    for number in range(8640):
        # Some noise: corrected errors and replays now and then, an idle GPU in between, warm moments.
        noise = {"ecc_corrected": 7 + number // 300, "pcie_replays": 3 + number // 200}
        idle = {"performance_state": 8, "pcie_generation": 1} if number % 50 < 20 else {}
        warm = {"slow_reasons": 0x20} if number % 10 == 0 else {}
        assert gpu.reads(**noise, **idle, **warm) == []


def test_an_uncorrectable_error_is_critical_at_once_and_once() -> None:
    gpu = Gpu()
    assert gpu.reads() == []
    assert gpu.reads(ecc_uncorrected=2) == [("gpu-ecc", CRITICAL, 2.0)]
    assert gpu.reads(ecc_uncorrected=2) == []
    restarted = Gpu(counters=Counters(gpu.counters.values))
    assert restarted.reads(ecc_uncorrected=2) == [], "it was reported before the restart"
    assert restarted.reads(ecc_uncorrected=3) == [("gpu-ecc", CRITICAL, 1.0)]


def test_corrected_errors_are_a_warning_at_a_rate() -> None:
    gpu = Gpu()
    gpu.reads(ecc_corrected=0)
    assert gpu.reads(ecc_corrected=99) == []
    assert gpu.reads(ecc_corrected=100) == [("gpu-ecc", WARNING, 100.0)]
    assert Gpu(Settings(thresholds={"gpu_ecc_corrected_per_hour": 5})).reads() == []
    slow = Gpu()
    for number in range(50):
        slow.at_s += HOUR_S / 2
        assert slow.reads(ecc_corrected=number * 40) == []


def test_replaced_memory() -> None:
    gpu = Gpu()
    gpu.reads()
    assert gpu.reads(remapped_uncorrected=1) == [("gpu-remap", NOTICE, 1.0)]
    assert gpu.reads(remapped_uncorrected=1, remap_pending=1) == [("gpu-remap", WARNING, 0.0)]
    assert gpu.reads(remapped_uncorrected=1, remap_failed=1, remap_pending=1) == [("gpu-remap", CRITICAL, 0.0)]
    assert gpu.reads(remapped_uncorrected=1, retired_pending=1) == [("gpu-remap", WARNING, 0.0)]


def test_heat_and_power_brake_must_persist() -> None:
    gpu = Gpu()
    assert [gpu.reads(slow_reasons=0x40) for _ in range(5)] == [[]] * 5
    assert gpu.reads(temperature_c=91) == [("gpu-temperature", WARNING, 91.0)]
    assert gpu.reads() == []
    brake = Gpu()
    assert [brake.reads(slow_reasons=0x80) for _ in range(5)] == [[]] * 5
    assert brake.reads(slow_reasons=0x80) == [("gpu-power", WARNING, 0.0)]


def test_a_narrow_connection_and_a_slow_one_that_works() -> None:
    narrow = Gpu()
    assert [narrow.reads(pcie_width=8) for _ in range(6)][-1] == [("gpu-pcie", WARNING, 8.0)]
    slow = Gpu()
    assert [slow.reads(pcie_generation=3) for _ in range(6)][-1] == [("gpu-pcie", WARNING, 3.0)]
    idle = Gpu()
    assert [idle.reads(pcie_generation=1, performance_state=8) for _ in range(20)] == [[]] * 20
    replays = Gpu()
    replays.reads()
    assert replays.reads(pcie_replays=103) == [("gpu-pcie", WARNING, 100.0)]


def test_a_link_of_nvlink_that_was_up_goes_down() -> None:
    gpu = Gpu()
    assert gpu.reads() == [], "link 1 was never up"
    down = [Nvlink(0, 0, 0), Nvlink(1, 0, 0)]
    assert gpu.reads(nvlinks=down) == []
    assert gpu.reads(nvlinks=down) == [("gpu-nvlink", CRITICAL, 1.0)]
    errors = [Nvlink(0, 1, 60), Nvlink(1, 1, 40)]
    assert gpu.reads(nvlinks=errors) == [("gpu-nvlink", WARNING, 100.0)]


def test_a_gpu_that_is_lost_keeps_its_name() -> None:
    judge = Judge(Settings(), Counters())
    now = Now(0.0, 0.0)
    both = [Reading(0, "GPU-1"), Reading(1, "GPU-2")]
    assert judge.judged(both, now) == []
    (lost,) = judge.judged([both[0], Reading(1, "", lost="GPU is lost")], now)
    assert (lost.check, lost.subject, lost.severity) == ("gpu-lost", "gpu:GPU-2", CRITICAL)
    (gone,) = judge.judged([both[0]], now)
    assert (gone.subject, gone.severity) == ("gpu:GPU-2", CRITICAL)
    assert judge.judged([both[0]], now) == [], "an operator may have removed it"


def test_addresses_of_nvml_and_of_the_log_are_the_same() -> None:
    assert _address("00000000:65:00.0") == _address("0000:65:00") == _address("0000:65:00.0")
    assert _address("00010000:65:00.0") == _address("10000:65:00") != _address("0000:65:00")
    assert set(NAMES) <= set(CHECKS)
