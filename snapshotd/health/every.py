"""Makes the checks of this node."""

from __future__ import annotations

from pathlib import Path

from snapshotd.health import dcgm
from snapshotd.health.check import Group
from snapshotd.health.gpus import Gpus
from snapshotd.health.host import Clock, Edac, Pressure, ReadOnly
from snapshotd.health.kernel_log import KernelLog
from snapshotd.health.links import Ethernet, InfiniBand
from snapshotd.health.plugins import Plugin
from snapshotd.health.programs import Programs
from snapshotd.health.settings import Settings
from snapshotd.health.windows import Counters


def groups(settings: Settings, library_dir: str, counters: Counters) -> list[Group]:
    root = Path(settings.root or "/")
    gpus = Gpus(root, library_dir, settings, counters)
    log = KernelLog(root, counters, gpus.at)

    def is_native(uuid: str, name: str) -> bool:
        return log.is_read if name == "kernel-log" else gpus.reads(uuid, name)

    made: list[Group] = [
        gpus,
        log,
        Ethernet(root, settings, counters),
        InfiniBand(root, settings, counters),
        Edac(root, settings, counters),
        Pressure(root, settings),
        Clock(settings),
        ReadOnly(root, settings),
    ]
    if settings.dcgm.url and dcgm.CHECK not in settings.off:
        # In a lab as well: listeners are those of the daemon's own network namespace.
        made.append(dcgm.Dcgm(Path("/"), settings, counters, is_native))
    made += [Plugin(name, settings) for name in dict.fromkeys(settings.entry_points)]
    return [*made, Programs(root, settings)] if settings.programs_dir else made
