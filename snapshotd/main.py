"""The daemon as a process: it starts, serves until a signal stops it, and stops. snapshotd/service.py is what it serves.

Invariant: at most one daemon serves a run_dir (the kernel releases its lock with the process). READY is reported once
everything listens. Stopping never touches a rank: the next daemon reads the journal and continues.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import math
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from snapshotd.api import certificates
from snapshotd.api.access import Access
from snapshotd.api.channel import COMMON_OPTIONS
from snapshotd.api.errors import BadConfig, Busy, Denied, SnapshotError
from snapshotd.api.revocation import revocations_of
from snapshotd.config import DEFAULT_PATH, Config, split_address
from snapshotd.proc import host
from snapshotd.runtime import logs, metrics, sd_notify
from snapshotd.runtime.blocking import in_thread

if TYPE_CHECKING:
    from snapshotd.service import Daemon

LOG = logging.getLogger(__name__)

#: Time limits at stop: first for steps in progress to end or to be handed over, then for calls that are still open.
STOP_GRACE_S = 20.0
CALLS_GRACE_S = 1.0
#: How often the daemon's own certificate is looked at, and how often its near end is logged.
LOOK_AGAIN_S, WARN_AGAIN_S = 600.0, 86_400.0

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # otherwise a second daemon on the same port would silently receive half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def main(argv: Sequence[str] | None = None) -> None:
    """`snapshotd --config FILE`. Exits with 0 after SIGTERM, else with the exit code of the error's class."""
    parser = argparse.ArgumentParser(prog="snapshotd", description="Run the per-node daemon that moves ranks.")
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_PATH, metavar="FILE", help="configuration file (default: %(default)s)"
    )
    parser.add_argument("--check-config", action="store_true", help="list the problems of the configuration and exit")
    parser.add_argument("--version", action="version", version=f"snapshotd {host.DAEMON_VERSION}")
    options = parser.parse_args(argv)
    try:
        config = Config.load(options.config)
        if options.check_config:
            print(f"{options.config} is valid: node {config.node}, CRIU {config.criu_version} at {config.criu}")
            for warning in certificates.warnings(config.credentials):
                print(f"warning: {warning}")
            return
        if os.geteuid() != 0:
            raise Denied("snapshotd must run as root", remedy="start it with systemd or sudo")
        logs.set_up(config.log_format, config.log_level)
        make_directories(config)
        _raise_descriptor_limit()
        with one_daemon(config.run_dir):
            asyncio.run(serve(config))
    except SnapshotError as error:
        sd_notify.notify(f"STATUS={error.message}")
        print(f"snapshotd: {error.message}\nremedy: {error.advice}", file=sys.stderr)
        sys.exit(error.exit_code)


def make_directories(config: Config) -> None:
    """Users can enter run_dir, to reach keeper.sock. Only root can read the journal and the images."""
    private = (config.state_dir, config.image_dir, config.spool_dir)
    for place, mode in ((config.run_dir, 0o755), *((place, 0o700) for place in private)):
        try:
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(mode)
        except OSError as error:
            raise BadConfig(f"{place} cannot be created: {error.strerror}") from error


def _raise_descriptor_limit() -> None:
    """Every keeper needs two descriptors. Restored ranks get the limits that they had."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def one_daemon(run_dir: Path) -> Iterator[None]:
    """Holds the lock of run_dir. Raises Busy if another daemon has it. The kernel releases it when the process ends."""
    descriptor = os.open(run_dir / "snapshotd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Busy(
                f"another snapshotd (pid {holder}) already serves {run_dir}",
                remedy="stop it first (`systemctl stop snapshotd`), or set another run_dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


async def serve(config: Config) -> None:
    """Serves until a signal arrives. The caller holds the lock."""
    from snapshotd.service import Daemon

    stop = asyncio.Event()
    _stop_on_signals(stop)
    daemon = Daemon(config)
    access = Access(revocations_of(config.credentials.ca))
    server = grpc.aio.server(interceptors=[access], options=SERVER_OPTIONS)
    _listen(server, config)
    watchdog = _start_watchdog()
    watching = asyncio.create_task(_watch_certificate(config), name="expiry of the certificate")
    try:
        if config.metrics_listen:
            await metrics.serve(*split_address(config.metrics_listen))
        await daemon.start(server)
        await server.start()
        _report_started(config)
        await stop.wait()
    finally:
        sd_notify.stopping("finishing or handing over moves in progress")
        LOG.info("stopping")
        try:
            await _stop(daemon, server)
        finally:
            watchdog.cancel()
            watching.cancel()
            config.admin_socket.unlink(missing_ok=True)
    LOG.info("stopped")


async def _stop(daemon: Daemon, server: grpc.aio.Server) -> None:
    """Stops the daemon's own work first, because it may still need to answer calls."""
    try:
        await daemon.stop(STOP_GRACE_S)
    finally:
        await server.stop(CALLS_GRACE_S)
        await metrics.close()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT stops the daemon, the second ends it at once. Nothing is lost: the journal is on disk."""

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            LOG.warning("second %s: exiting at once", number.name)
            os._exit(128 + number)
        LOG.info("received %s", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _listen(server: grpc.aio.Server, config: Config) -> None:
    """Binds admin.sock and the TLS port. At no time can users other than root connect to admin.sock."""
    _remove_stale_socket(config.admin_socket)
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{config.admin_socket}")
    except RuntimeError as error:
        raise BadConfig(f"cannot listen on {config.admin_socket}: {error}") from error
    finally:
        os.umask(umask)
    try:
        server.add_secure_port(config.listen, config.credentials.for_server())
    except RuntimeError as error:
        reason = _why_not_bound(config.listen) or str(error)
        raise BadConfig(f"listen: cannot listen on {config.listen}: {reason}") from error


def _remove_stale_socket(path: Path) -> None:
    """Removes the socket of a killed daemon. gRPC would also remove one that a process still listens on."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise BadConfig(f"{path} exists and is not a socket", remedy="remove it, or set another run_dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise Busy(
        f"another process listens on {path}", remedy="find it with `ss -xlp` and stop it, or set another run_dir"
    )


def _why_not_bound(address: str) -> str:
    """Why the address cannot be bound: gRPC does not report it, so the bind is repeated here."""
    name, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _start_watchdog() -> asyncio.Task[None]:
    interval_s = sd_notify.watchdog_interval_s()
    return asyncio.create_task(sd_notify.keep_watchdog(interval_s) if interval_s else asyncio.sleep(0), name="watchdog")


async def _watch_certificate(config: Config) -> None:
    """Keeps the metric of the certificate's expiry up to date, and logs once a day when it is near."""
    logged_s = -math.inf
    while True:
        expiry = await in_thread(certificates.expiry, config.credentials)
        metrics.certificate_expires(expiry.timestamp() if expiry is not None else 0.0)
        if time.monotonic() > logged_s + WARN_AGAIN_S:
            logged_s = time.monotonic()
            for warning in await in_thread(certificates.warnings, config.credentials):
                LOG.warning("%s", warning)
        await asyncio.sleep(LOOK_AGAIN_S)


def _report_started(config: Config) -> None:
    if host.is_ram_backed(config.state_dir):
        LOG.warning("state_dir %s is in memory: a reboot during a move would lose its outcome", config.state_dir)
    LOG.info(
        "snapshotd %s started as node %s, listening on %s and %s, CRIU %s at %s",
        *(host.DAEMON_VERSION, config.node, config.listen, config.admin_socket, config.criu_version, config.criu),
    )
    sd_notify.ready(f"node {config.node}, listening on {config.listen}")


if __name__ == "__main__":
    main()
