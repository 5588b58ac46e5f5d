"""The GPUs' health as a dcgm-exporter reports it, if one is configured: [health.dcgm] url. dcgm.toml says what is looked at.

Invariant: what the daemon reads itself (NVML, the kernel's log) counts, and a field of DCGM counts only as long as the daemon
cannot read the same. So a cause is never counted twice. An exporter that cannot be read is one notice, whatever it had said.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec

from snapshotd.health import xids
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.dcgm_scrape import MAX_GPUS, Exporter, Gpu
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters, Rate, Recent

PATH = Path(__file__).with_name("dcgm.toml")
CHECK = "gpu-dcgm"
SLOWDOWN = "DCGM_FI_DEV_SLOWDOWN_TEMP"
_READINGS = 10
_REMEDY = "look at the exporter on this node, or remove url from [health.dcgm] of the daemon's configuration"


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    check: str
    rule: str
    severity: str = "warning"
    since: str = ""
    threshold: str = ""
    limit: int = 0
    native: str = ""
    text: str = ""
    remedy: str = ""


class _Table(msgspec.Struct, frozen=True):
    remedies: dict[str, str]
    fields: dict[str, Field]


@functools.cache
def table() -> _Table:
    return msgspec.convert(tomllib.loads(PATH.read_text()), _Table)


class Judge:
    """What an exporter says in, signals out. `is_native(uuid, name)`: whether the daemon reads that itself now."""

    def __init__(self, settings: Settings, counters: Counters, is_native: Callable[[str, str], bool]) -> None:
        self._settings, self._counters, self._is_native = settings, counters, is_native
        self._known: set[str] = set()
        self._rates: dict[tuple[str, str], Rate] = {}
        self._recent: dict[tuple[str, str], Recent] = {}

    def judged(self, gpus: dict[str, Gpu], now: Now) -> list[Signal]:
        """Raises Unable if the exporter always names other GPUs."""
        known = self._known | gpus.keys()
        if len(known) > MAX_GPUS:
            raise Unable(f"the dcgm-exporter has named more than {MAX_GPUS} GPUs")
        self._known = known
        found = []
        for uuid, gpu in gpus.items():
            for name, field in table().fields.items():
                if name in gpu.values:
                    signal = self._one(uuid, gpu, name, field, now)
                    if signal is not None and not (field.native and self._is_native(uuid, field.native)):
                        found.append(signal)
        return found

    def _one(self, uuid: str, gpu: Gpu, name: str, field: Field, now: Now) -> Signal | None:
        value, key = gpu.values[name], f"dcgm:{uuid}:{name}"
        if field.rule == "xid":
            before = self._counters.values.get(key, value)  # the error may be from long ago
            self._counters.values[key] = value
            return self._xid(uuid, gpu, value) if value not in (0, before) else None
        shown = value
        match field.rule:
            case "event":
                shown = self._counters.increase(key, value, first=0 if field.since == "start" else None)
            case "rate":
                rate = self._rates.setdefault((uuid, name), Rate(self._settings.threshold(field.threshold)))
                shown = rate.add(now.monotonic_s, self._counters.increase(key, value))
            case "growing":
                shown = int(self._lasts(uuid, name, field, self._counters.increase(key, value) > 0))
            case "hot":
                limit = gpu.values.get(SLOWDOWN, 0) or field.limit
                shown = value if self._lasts(uuid, name, field, value >= limit) else 0
        if not shown:
            return None
        text = f"{gpu.name} {field.text.format(shown)} (says the dcgm-exporter)"
        remedy = table().remedies[field.remedy]
        return Signal(field.check, f"gpu:{uuid}", Severity[field.severity.upper()], text, remedy, shown)

    def _lasts(self, uuid: str, name: str, field: Field, bad: bool) -> bool:
        needed = self._settings.threshold(field.threshold)
        return self._recent.setdefault((uuid, name), Recent(needed, _READINGS)).add(bad)

    def _xid(self, uuid: str, gpu: Gpu, code: int) -> Signal:
        xid = xids.of(code)
        text = f"{gpu.name} had Xid {code}: {xid.meaning} (says the dcgm-exporter)"
        return Signal("gpu-xid", f"gpu:{uuid}", xid.severity, text, xid.remedy, float(code))


class Dcgm(Group):
    """Reads the exporter."""

    def __init__(
        self, root: Path, settings: Settings, counters: Counters, is_native: Callable[[str, str], bool]
    ) -> None:
        self.every_s = settings.dcgm.interval_s
        fields = [*table().fields, SLOWDOWN]
        self.names = (CHECK, *dict.fromkeys(field.check for field in table().fields.values()))
        self._exporter = Exporter(settings.dcgm.url, settings.dcgm.user_id, fields, root)
        self._judge = Judge(settings, counters, is_native)
        self._silent = Recent(3, 5)
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> dict[str, str]:
        return self._reasons

    async def read(self, now: Now) -> list[Signal]:
        try:
            found = self._judge.judged(await self._exporter.read(), now)
        except (Unable, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            self._reasons = dict.fromkeys(self.names, reason)
            lasts = self._silent.add(True)
            return [Signal(CHECK, "host", Severity.NOTICE, reason, _REMEDY)] if lasts else []
        self._reasons = {}
        self._silent.add(False)
        return found
