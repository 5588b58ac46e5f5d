"""The children of the daemon, each started once as the daemon starts it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec

from snapshotd.api.errors import SnapshotError
from snapshotd.config import Config
from snapshotd.cuda.helper_pool import INIT_S, HelperPool
from snapshotd.cuda.helper_process import Lost
from snapshotd.cuda.inventory import QUERY_S
from snapshotd.cuda.library import driver_loaded
from snapshotd.network.child import NetworkProcess
from snapshotd.network.dispatch import Services
from snapshotd.selfcheck.finding import Finding, failed, ok

_STOP_S = 1.0


async def gpu(config: Config) -> Finding:
    remedy = "see `nvidia-smi` and `dmesg` on this node; the driver must be 570 or newer"
    pool = HelperPool(config.gpu_library_dir)
    try:
        helper = await pool.current()
        answer = await helper.ask("inventory", QUERY_S)
        if answer.get("no_gpu") and not driver_loaded():
            return ok("gpu", "no GPU: the CUDA helper starts, and only ranks without GPUs can be moved")
        if problem := answer.get("unusable") or answer.get("error") or answer.get("problem"):
            return failed("gpu", str(problem), remedy)
        started = await helper.ask("init", INIT_S)
        if problem := started.get("unusable") or started.get("error"):
            return failed("gpu", f"the CUDA driver cannot be used: {problem}", remedy)
    except (Lost, TimeoutError, SnapshotError) as error:
        return failed("gpu", str(error), remedy)
    finally:
        await pool.close()
    return ok("gpu", f"{len(answer['gpus'])} GPUs, driver {answer['driver_version']}")


async def network(config: Config, daemon_pid: int | None) -> Finding:
    """Starts the network process with a run_dir of its own. `daemon_pid`: that of the daemon that has the ports already."""
    ports = " and ".join(filter(None, (config.listen, config.metrics_listen)))
    if daemon_pid is not None:
        return ok("network", f"snapshotd (pid {daemon_pid}) listens on {ports}")
    with tempfile.TemporaryDirectory(prefix="snapshotd-check-", dir=_short_place(config)) as folder:
        os.chmod(folder, 0o755)
        process = NetworkProcess(msgspec.structs.replace(config, run_dir=Path(folder), log_level="error"), Services())
        try:
            await process.start()
        except SnapshotError as error:
            return failed("network", error.message, error.advice)
        finally:
            await process.stop(_STOP_S)
            await asyncio.sleep(0)
    return ok("network", f"listened on {ports} as user {config.network_user}")


def _short_place(config: Config) -> str:
    """The path of a socket may have about a hundred bytes."""
    return "/run" if Path("/run").is_dir() else str(config.run_dir.parent)
