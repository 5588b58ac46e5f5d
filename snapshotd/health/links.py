"""Ethernet and InfiniBand links, from /sys. Reading a counter may ask the card's firmware, so it can hang.

Only links that were up count: a port without a cable is no failure. Virtual interfaces have no `device`, and are left out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Group, Now, Unable
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters, Rate, Recent
from snapshotd.runtime.blocking import Reader

READ_LIMIT_S = 10.0
_ETHERNET = "1"  # ARPHRD_ETHER
_REMEDY = (
    "examine the cable, the transceiver and the port of the switch; move the ranks of this node away if it persists"
)


@dataclass(frozen=True)
class Link:
    """One reading of a port. `changes`: how often it went up or down; `errors`: by name."""

    name: str
    up: bool
    changes: int
    errors: dict[str, int]


@dataclass
class _Windows:
    flaps: Rate
    down: Recent
    errors: dict[str, Rate] = field(default_factory=dict)
    was_up: bool = False


class Links(Group):
    """What the two kinds of links have in common: judging readings."""

    def __init__(self, check: str, limit: str, root: Path, settings: Settings, counters: Counters) -> None:
        self.names = (check,)
        self.every_s = settings.interval_s
        self._limit = settings.threshold(limit)
        self._root, self._settings, self._counters = root, settings, counters
        self._reader = Reader(check)
        self._windows: dict[str, _Windows] = {}

    async def read(self, now: Now) -> list[Signal]:
        links = await self._reader.run(self.seen, READ_LIMIT_S)
        return [signal for link in links for signal in self.judged(link, now)]

    def seen(self) -> list[Link]:
        """One reading of all links. Blocking. Raises Unable."""
        raise NotImplementedError

    def judged(self, link: Link, now: Now) -> list[Signal]:
        check, subject = self.names[0], f"link:{link.name}"
        window = self._windows.get(link.name)
        if window is None:
            flaps, down = (
                self._settings.threshold("link_flaps_per_hour"),
                self._settings.threshold("link_down_readings"),
            )
            window = self._windows[link.name] = _Windows(Rate(flaps), Recent(down, 5))
        window.was_up = window.was_up or link.up
        found = []
        if window.down.add(window.was_up and not link.up):
            found.append(Signal(check, subject, Severity.CRITICAL, f"the link {link.name} is down", _REMEDY))
        key = f"{check}:{link.name}:"
        if total := window.flaps.add(now.monotonic_s, self._counters.increase(key + "changes", link.changes)):
            text = f"the link {link.name} changed between up and down {total} times within an hour"
            found.append(Signal(check, subject, Severity.WARNING, text, _REMEDY, total))
        for name, value in link.errors.items():
            rate = window.errors.setdefault(name, Rate(self._limit))
            if total := rate.add(now.monotonic_s, self._counters.increase(key + name, value)):
                text = f"the link {link.name} had {total} errors ({name}) within an hour"
                found.append(Signal(check, subject, Severity.WARNING, text, _REMEDY, total))
        return found


class Ethernet(Links):
    def __init__(self, root: Path, settings: Settings, counters: Counters) -> None:
        super().__init__("link-ethernet", "link_errors_per_hour", root, settings, counters)

    def seen(self) -> list[Link]:
        found = []
        for folder in _folders(self._root / "sys/class/net"):
            if _text(folder / "type") != _ETHERNET or not (folder / "device").exists():
                continue
            errors = {name: _number(folder / "statistics" / name) for name in ("rx_errors", "tx_errors")}
            up = _text(folder / "operstate") == "up"
            found.append(Link(folder.name, up, _number(folder / "carrier_changes"), errors))
        return found


class InfiniBand(Links):
    """The name of a link is DEVICE/PORT."""

    def __init__(self, root: Path, settings: Settings, counters: Counters) -> None:
        super().__init__("link-infiniband", "infiniband_symbol_errors_per_hour", root, settings, counters)

    def seen(self) -> list[Link]:
        found = []
        for device in _folders(self._root / "sys/class/infiniband"):
            for port in _folders(device / "ports"):
                counters = port / "counters"
                names = ("symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")
                errors = {name: _number(counters / name) for name in names}
                up = _text(port / "state").endswith("ACTIVE")
                found.append(Link(f"{device.name}/{port.name}", up, _number(counters / "link_downed"), errors))
        return found


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError as error:
        raise Unable(f"{parent} cannot be read: {error.strerror}") from error


def _text(path: Path) -> str:
    """Empty: the file cannot be read. Interfaces disappear, and some drivers have no such counter."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return 0
