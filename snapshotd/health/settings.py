"""The table [health] of the daemon's configuration: what is checked, how often, and from which numbers on it is an alarm."""

from __future__ import annotations

import pwd
import re
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from snapshotd.api import toml_file
from snapshotd.progress.schedule import LEAST_PERIOD_S

#: Every check by name, with what it looks at. A program in the drop-in folder is the check program-NAME.
CHECKS: Mapping[str, str] = {
    "gpu-lost": "GPUs that NVML no longer lists, that it reports as lost, or because of which it does not answer",
    "gpu-xid": "errors (Xid) that NVIDIA's driver writes into the kernel's log",
    "gpu-ecc": "errors in the memory of a GPU, corrected and uncorrected",
    "gpu-remap": "rows of GPU memory that were or could not be replaced, retired pages",
    "gpu-temperature": "a GPU that is slowed down by heat",
    "gpu-power": "a GPU that is slowed down by the power brake of the chassis",
    "gpu-pcie": "repeated transfers on PCIe, and a connection that is narrower or slower than it could be",
    "gpu-nvlink": "errors of NVLink, and links that went down",
    "gpu-dcgm": "a dcgm-exporter that is configured and cannot be read",
    "link-ethernet": "Ethernet links that are down, go up and down, or have receive errors",
    "link-infiniband": "InfiniBand links that are down, recover, or have symbol errors",
    "host-mce": "machine checks and memory failures in the kernel's log",
    "host-edac": "errors in the host's memory, as its controllers count them (EDAC)",
    "host-oom": "processes that the kernel killed for memory",
    "host-pressure": "processes that all wait for memory (PSI)",
    "host-hang": "processors and tasks that the kernel reports as stuck",
    "host-clock": "jumps of the clock",
    "disk-errors": "input and output errors of disks in the kernel's log",
    "disk-read-only": "file systems that became read-only",
}
PROGRAM = "program-"
#: An entry point NAME is the check plugin-NAME, and may add checks whose names begin with plugin-NAME-.
PLUGIN = "plugin-"

#: Defaults of [health.thresholds]. An hour counts from the newest reading backwards.
THRESHOLDS: Mapping[str, float] = {
    "gpu_ecc_corrected_per_hour": 100,
    "gpu_pcie_replays_per_hour": 100,
    "gpu_nvlink_errors_per_hour": 100,
    "gpu_slow_readings": 6,  # of the last ten
    "link_flaps_per_hour": 4,
    "link_errors_per_hour": 1000,
    "link_down_readings": 3,  # of the last five
    "infiniband_symbol_errors_per_hour": 120,  # a bit error rate of 1e-12 at 10 Gbit/s lanes is some 36 in an hour
    "host_edac_corrected_per_hour": 100,
    "host_pressure_percent": 20,  # of the last ten seconds, in which no process ran for want of memory
    "host_pressure_readings": 6,  # of the last ten
    "host_clock_jump_s": 1.0,
}

_SECONDS = "a number of seconds from {} to {}"


def _url(text: str) -> str:
    """Raises ValueError."""
    found = urlsplit(text)
    if text and (found.scheme != "http" or not found.hostname or "@" in found.netloc or not text.isprintable()):
        raise ValueError(f"must begin with http:// and name a host, as http://127.0.0.1:9400/metrics, not {text!r}")
    _ = found.port  # raises if it is none
    return text


def _entry_point(text: str) -> str:
    """Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError(text)
    return text


def _user(text: str) -> str:
    """Raises ValueError."""
    try:
        _id(text)
    except KeyError:
        raise ValueError(f"there is no user {text!r}") from None
    return text


def _id(user: str) -> int:
    return int(user) if user.isascii() and user.isdigit() else pwd.getpwnam(user).pw_uid


class Dcgm(msgspec.Struct, frozen=True, kw_only=True):
    """The table [health.dcgm]."""

    url: Annotated[str, toml_file.text("the address of a dcgm-exporter", _url)] = ""  # empty: none
    # An exporter reads the GPUs every 30 s unless it is told otherwise: more often one would see nothing new.
    interval_s: Annotated[float, Meta(ge=1, le=3600, description=_SECONDS.format(1, 3600))] = 30.0
    # Besides root, who may listen on a loopback address of `url`.
    user: Annotated[str, toml_file.text("the name or the number of a user, as a text", _user)] = "root"

    @property
    def user_id(self) -> int:
        return _id(self.user)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One field for each key of the table. A description completes the sentence "KEY must be …"."""

    interval_s: Annotated[float, Meta(ge=0.1, le=3600, description=_SECONDS.format(0.1, 3600))] = 10.0
    # Between two readings of how far ranks have come (snapshotd/progress); 0: they are not read.
    progress_interval_s: Annotated[float, Meta(ge=0, le=60, description="0, or " + _SECONDS.format(0.1, 60))] = 0.5
    off: Annotated[tuple[str, ...], Meta(description="a list of names of checks")] = ()
    thresholds: Annotated[dict[str, float], Meta(description="a table with NAME = NUMBER")] = {}
    # Where /dev, /proc and /sys are looked for, for tests and labs; empty: the machine's own.
    root: Annotated[str, Meta(pattern=r"^(/.*)?\Z", description="an absolute path")] = ""
    programs_dir: Annotated[str, Meta(pattern=r"^(/.*)?\Z", description="an absolute path")] = (
        "/etc/snapshotd/health.d"  # empty: none
    )
    programs_interval_s: Annotated[float, Meta(ge=0.1, le=86400, description=_SECONDS.format(0.1, 86400))] = 60.0
    programs_limit_s: Annotated[float, Meta(ge=0.1, le=600, description=_SECONDS.format(0.1, 600))] = 20.0

    # Names of entry points of other packages (plugins.py). Their code runs as root.
    entry_points: Annotated[tuple[str, ...], toml_file.text("a list of names of entry points", _entry_point)] = ()
    dcgm: Annotated[Dcgm, toml_file.table("a table", Dcgm)] = Dcgm()

    def threshold(self, name: str) -> float:
        return self.thresholds.get(name, THRESHOLDS[name])

    def problems(self) -> list[str]:
        """Of values that have the right type."""
        unknown = [name for name in self.off if name not in CHECKS and not name.startswith((PROGRAM, PLUGIN))]
        found = [f"health.off: there is no check {name!r}; there are {', '.join(CHECKS)}" for name in unknown]
        if 0 < self.progress_interval_s < LEAST_PERIOD_S:
            found.append(f"health.progress_interval_s: must be 0 or at least {LEAST_PERIOD_S}")
        for name, value in self.thresholds.items():
            if name not in THRESHOLDS:
                found.append(f"health.thresholds.{name}: unknown key; there are {', '.join(THRESHOLDS)}")
            elif not 0 < value < 1e12:
                found.append(f"health.thresholds.{name}: must be a positive number, not {value!r}")
        return found
