"""The daemon as a process: it starts, serves until a signal stops it, and stops. snapshotd/service.py is what it serves.

It has no network of its own: its network process (snapshotd/network) speaks with operators and other daemons.

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

from snapshotd.api import certificates, version
from snapshotd.api.errors import BadConfig, Busy, Denied, SnapshotError
from snapshotd.config import DEFAULT_PATH, Config
from snapshotd.network import orphan
from snapshotd.network.child import NetworkProcess
from snapshotd.network.dispatch import Services
from snapshotd.proc import host
from snapshotd.runtime import heap, logs, metrics, sd_notify
from snapshotd.runtime.blocking import in_thread
from snapshotd.sandbox.enter import missing

if TYPE_CHECKING:
    from snapshotd.service import Daemon

LOG = logging.getLogger(__name__)

#: Time limits at stop: first for steps in progress to end or to be handed over, then for calls that are still open.
STOP_GRACE_S = 20.0
CALLS_GRACE_S = 1.0
#: How often the daemon's own certificate is looked at, and how often its near end is logged.
LOOK_AGAIN_S, WARN_AGAIN_S = 600.0, 86_400.0

#: How long the lock of a daemon that was killed may stay: a child that was being started has it for an instant.
RELEASE_S = 5.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="snapshotd", description="Run the per-node daemon that moves ranks.")
    made.add_argument(
        "--config", type=Path, default=DEFAULT_PATH, metavar="FILE", help="configuration file (default: %(default)s)"
    )
    made.add_argument(
        "--check-config",
        action="store_true",
        help="list the problems of the configuration, then do what --check does, and exit",
    )
    made.add_argument(
        "--check",
        action="store_true",
        help="start every part of the daemon once, list what fails with its remedy, and exit",
    )
    made.add_argument("--version", action="version", version=f"snapshotd {version.described()}")
    verbs = made.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    joining = verbs.add_parser(
        "join",
        help="make this machine a node of a cluster",
        description="Install the file that `migrator cluster add` or `rotate` made for this node: certificates, and a"
        " configuration if there is none. A running daemon uses the new certificates without a restart.",
    )
    joining.add_argument("file", type=Path, metavar="FILE", help="file of this node, or - for standard input")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """`snapshotd --config FILE`. Exits with 0 after SIGTERM, else with the exit code of the error's class."""
    options = parser().parse_args(argv)
    try:
        if options.verb == "join":
            return join_cluster(options.file, options.config)
        if os.geteuid() != 0:  # before the configuration: its certificates are root's, so it would seem to be wrong
            raise Denied("snapshotd must run as root, also to check its parts", remedy="start it with systemd or sudo")
        config = Config.load(options.config)
        if options.check_config:
            print(f"{options.config} is valid: node {config.node}, CRIU {config.criu_version} at {config.criu}")
        if options.check_config or options.check:
            return check(config)
        logs.set_up(config.log_format, config.log_level, node=config.node)
        make_directories(config)
        _raise_descriptor_limit()
        heap.share()
        with one_daemon(config.run_dir):
            asyncio.run(serve(config))
    except SnapshotError as error:
        sd_notify.notify(f"STATUS={error.message}")
        print(f"snapshotd: {error.message}\nremedy: {error.advice}", file=sys.stderr)
        sys.exit(error.exit_code)


def join_cluster(file: Path, config: Path) -> None:
    """Prints what was done and what to do next. Raises SnapshotError."""
    from snapshotd.join import join

    done = join(file, config)
    for path in done.written:
        print(f"wrote {path}")
    for text in done.warnings:
        print(f"warning: {text}")
    if done.runs:
        print(f"node {done.node} has new certificates; the running snapshotd uses them without a restart")
    else:
        print(f"this machine is node {done.node}; next: systemctl enable --now snapshotd")
    if str(file) != "-":
        print(f"{file} contains the node's private key: delete it")


def check(config: Config) -> None:
    """Prints what the checks of the parts have found. Raises BadConfig if one has failed."""
    from snapshotd.selfcheck import every
    from snapshotd.selfcheck.finding import State

    found = asyncio.run(every.findings(config))
    for each in found:
        print(each.lines(), flush=True)
    if failed := [each.check for each in found if each.state is State.FAILED]:
        raise BadConfig(
            f"{len(failed)} of {len(found)} checks failed: {', '.join(failed)}", remedy="follow the remedies above"
        )


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
    """Holds the lock of run_dir. Raises Busy if another daemon has it. The kernel releases it when the daemon has ended."""
    descriptor = os.open(run_dir / "snapshotd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + RELEASE_S
        while not _locked(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() > deadline or Path("/proc", holder, "status").exists():
                raise Busy(
                    f"another snapshotd (pid {holder}) already serves {run_dir}",
                    remedy="stop it first (`systemctl stop snapshotd`), or set another run_dir",
                )
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def serve(config: Config) -> None:
    """Serves until a signal arrives. The caller holds the lock."""
    from snapshotd.service import Daemon

    stop = asyncio.Event()
    _stop_on_signals(stop)
    services = Services(metrics.exposition)
    network = NetworkProcess(config, services)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, network)
    daemon = Daemon(config, network.connect)
    await in_thread(orphan.end, config.run_dir)  # before its sockets are looked at
    _remove_stale_socket(config.admin_socket)
    await network.start()
    watchdog = _start_watchdog()
    watching = asyncio.create_task(_watch_certificate(config), name="expiry of the certificate")
    try:
        await daemon.start(services)
        services.ready = True
        _report_started(config)
        heap.keep()
        await stop.wait()
    finally:
        sd_notify.stopping("finishing or handing over moves in progress")
        LOG.info("stopping")
        try:
            await _stop(daemon, network)
        finally:
            watchdog.cancel()
            watching.cancel()
            config.admin_socket.unlink(missing_ok=True)
    LOG.info("stopped")


async def _stop(daemon: Daemon, network: NetworkProcess) -> None:
    """Stops the daemon's own work first, because it may still need to answer calls."""
    try:
        await daemon.stop(STOP_GRACE_S)
    finally:
        await network.stop(CALLS_GRACE_S)


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


def _reload(network: NetworkProcess) -> None:
    """`systemctl reload snapshotd`. Only certificates are read again; they are looked at every second anyway."""
    LOG.info("received SIGHUP: looking for new certificates")
    network.look_at_files()


def _remove_stale_socket(path: Path) -> None:
    """Removes the socket of a killed daemon, but none that a process still listens on."""
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
    for part in missing():
        LOG.warning("children of this daemon run without a part of their sandbox: the kernel has no %s", part)
    LOG.info(
        "snapshotd %s started as node %s, listening on %s and %s, CRIU %s at %s",
        *(host.DAEMON_VERSION, config.node, config.listen, config.admin_socket, config.criu_version, config.criu),
    )
    sd_notify.ready(f"node {config.node}, listening on {config.listen}")


if __name__ == "__main__":
    main()
