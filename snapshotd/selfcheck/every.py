"""Runs all checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial

from snapshotd.config import Config
from snapshotd.runtime.blocking import Reader, in_thread
from snapshotd.selfcheck import kernel, parts, processes
from snapshotd.selfcheck.finding import Finding, failed
from snapshotd.selfcheck.spilling import CHECK, spilling

#: How long the disk of snapshots has to write one MiB. Its check cannot be ended, so as long as it hangs no other begins.
DISK_S = 20.0
_disk, _asking = Reader("the disk of snapshots"), asyncio.Lock()

_AGAIN = "mend what the other lines say, then check again"


async def findings(config: Config) -> list[Finding]:
    """The results in the order of the package's documentation. At most a few seconds; needs root."""
    daemon_pid = kernel.holder_of_lock(config.run_dir)
    waiting: dict[str, Awaitable[Finding | list[Finding]]] = {
        "imports": in_thread(parts.imports),
        "criu": in_thread(parts.criu, config),
        "shim": in_thread(parts.shim_libraries),
        "gpu": processes.gpu(config),
        "certificates": in_thread(parts.certificate, config),
        "network": processes.network(config, daemon_pid),
        "images": in_thread(kernel.images, config),
        CHECK: _spilling(config),
        "cgroup": in_thread(kernel.cgroups),
        "kernel": in_thread(kernel.features),
        "time-namespace": in_thread(kernel.time_namespace),
        "descriptors": in_thread(kernel.descriptors),
    }
    gathered = await asyncio.gather(*(_result(name, check) for name, check in waiting.items()))
    return [each for result in gathered for each in result]


async def _spilling(config: Config) -> Finding:
    try:
        async with _asking:
            return await _disk.run(partial(spilling, config), DISK_S)
    except TimeoutError:
        why = f"{config.snapshot_spill_dir} does not answer: nothing was written there within {DISK_S:.0f} s"
        return failed(CHECK, why, "check that disk: `dmesg` says more")


async def _result(name: str, check: Awaitable[Finding | list[Finding]]) -> list[Finding]:
    """What a check has found. One that fails itself, as for want of a Python package, must not hide the others."""
    try:
        found = await check
    except Exception as error:  # noqa: BLE001  (whatever it is, the other checks have results)
        return [failed(name, f"the check itself fails: {type(error).__name__}: {error}", _AGAIN)]
    return found if isinstance(found, list) else [found]
