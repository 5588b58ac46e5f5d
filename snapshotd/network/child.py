"""Starts the network process, hands it what needs root, and starts it again when it ends. In the daemon.

Invariant: the network process never outlives the daemon: the kernel kills it then, and its link ends. If one does live on,
the next daemon ends it before it starts its own (orphan.py). It has no descriptor of the daemon's but the link. Whatever it
does, the daemon goes on: open calls fail as if the connections broke.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
from pathlib import Path

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Internal, SnapshotError, from_wire
from snapshotd.api.revocation import revocations_of
from snapshotd.config import Config
from snapshotd.network import orphan
from snapshotd.network.dispatch import Services
from snapshotd.network.frames import FROM_NETWORK, Files, Listening, NotListening, Settings, Stop
from snapshotd.network.link import Control, Link
from snapshotd.network.link_channel import LinkChannel
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.child_process import environment

log = logging.getLogger(__name__)

_START_S = 60.0
_FIRST_WAIT_S, _LONGEST_WAIT_S, _STABLE_S = 0.1, 5.0, 30.0
#: How often the files of certificates are looked at.
_LOOK_S = 1.0


class NetworkProcess:
    def __init__(self, config: Config, services: Services) -> None:
        self._config, self._services = config, services
        self._user = pwd.getpwnam(config.network_user)
        self._files = LatestFiles(config.credentials)
        self._link = self._new_link()
        self._listening = asyncio.Event()
        self._refused: SnapshotError | None = None
        self._stopping = False
        self._channels = itertools.count(1)
        self._folder = config.run_dir
        self._pidfd = self._pid = -1
        self._running: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._look = asyncio.Event()

    async def start(self) -> None:
        """Returns once it listens. Raises BadConfig with the reason if it cannot.

        The caller holds the lock of run_dir, and has ended the network process of an earlier daemon.
        """
        try:
            await in_thread(self._files.read)
        except OSError as error:
            raise BadConfig(f"tls: {error}") from error
        for left in self._config.run_dir.glob("network-*"):  # of a daemon that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._running = asyncio.create_task(self._keep(), name="network process")
        listening = asyncio.create_task(self._listening.wait())
        done, _ = await asyncio.wait((self._running, listening), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._running in done:
            listening.cancel()
            self._running.result()
        if not done:
            self._running.cancel()
            raise Internal(f"the network process did not start within {_START_S:.0f} s")
        self._watching = asyncio.create_task(self._watch_files(), name="files of certificates")

    async def stop(self, grace_s: float) -> None:
        """Open calls may end within `grace_s`."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
        if self._running is None:
            return
        self._link.send_soon(Stop(grace_s))
        await asyncio.wait([self._running], timeout=grace_s + 2)
        self._running.cancel()
        await asyncio.wait([self._running])

    def connect(self, node: str, endpoint: str) -> LinkChannel:
        """A new connection to another daemon. It connects with the first call."""
        return LinkChannel(lambda: self._link, next(self._channels), node, endpoint)

    async def _keep(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            began_s = time.monotonic()
            try:
                reason = await self._once()
            except OSError as error:  # such as no memory for another process
                reason = str(error)
            if not self._listening.is_set():
                raise self._refused or BadConfig(f"the network process did not start: {reason}")
            if self._stopping:
                return
            if time.monotonic() - began_s > _STABLE_S:
                wait_s = _FIRST_WAIT_S
            refusal = f": {self._refused.message}" if self._refused is not None else ""
            log.error("the network process has ended (%s)%s; starting it again in %.1f s", reason, refusal, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    async def _once(self) -> str:
        """Runs one network process until it ends, and returns why."""
        self._folder = Path(tempfile.mkdtemp(prefix="network-", dir=self._config.run_dir))
        os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._refused = None
        link = self._new_link()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "snapshotd.network.process"),
                *(str(self._user.pw_uid), str(self._user.pw_gid), str(self._folder)),
                *(self._config.log_format, self._config.log_level),
                stdin=theirs.fileno(),
                cwd=self._folder,  # the user may not be able to reach it from "/"
                env={**environment(site_packages=True), "LANG": "C.UTF-8"},
            )
        self._pid = process.pid
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(process.pid)
            orphan.record(self._config.run_dir, process.pid)
        try:
            await link.attach(ours)
            self._link = link
            link.send_soon(self._settings())
            link.send_soon(self._files.frame)
            reason = await link.run()
        finally:
            self._kill()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1
            status = await process.wait()
            with contextlib.suppress(OSError, RecursionError):  # gone once it listened
                shutil.rmtree(self._folder)
        return reason if status == -signal.SIGKILL else f"{reason}, status {status}"

    def _new_link(self) -> Link:
        link = Link(FROM_NETWORK, self._services.serve, self._control, first=2)

        def hangs() -> None:
            log.error("the network process does not respond: killing it")
            self._kill()

        link.silent = hangs
        return link

    def _kill(self) -> None:
        """Not with asyncio's own `kill`, which may take the exit status from asyncio's own `wait`."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _settings(self) -> Settings:
        config = self._config
        return Settings(config.listen, "admin.sock", config.metrics_listen)

    def _control(self, frame: Control) -> None:
        if isinstance(frame, NotListening):
            self._refused = from_wire(frame.error)
        elif isinstance(frame, Listening):
            try:
                self._publish_admin_socket()
            except (OSError, SnapshotError) as error:
                self._refused = error if isinstance(error, SnapshotError) else Internal(f"admin.sock: {error}")
            else:
                self._listening.set()
                log.info("the network process listens on %s", self._config.listen)
                return
        self._link.close()

    def _publish_admin_socket(self) -> None:
        """Takes the directory away from the network process, then makes its socket root's and puts it in its place.

        In a directory of root no other user can replace what was examined, or connect to it. It must be a socket on which
        this network process listens, and nothing but that.
        """
        place, name = self._config.admin_socket, "admin.sock"
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = -1
        try:
            os.fchown(folder, 0, 0)
            os.fchmod(folder, 0o700)
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            about = os.fstat(found)
            own = stat.S_ISSOCK(about.st_mode) and about.st_uid == self._user.pw_uid and about.st_nlink == 1
            if not own or os.listdir(folder) != [name]:
                raise Internal("the network process made something else than its socket")
            if _listener(f"/proc/self/fd/{found}") != self._pid:
                raise Internal("the socket that the network process made belongs to another process")
            os.chown(f"/proc/self/fd/{found}", 0, 0)
            os.chmod(f"/proc/self/fd/{found}", 0o600)
            os.rename(name, place, src_dir_fd=folder)
            self._folder.rmdir()
        finally:
            for descriptor in (folder, found):
                if descriptor >= 0:
                    os.close(descriptor)

    def look_at_files(self) -> None:
        """Uses certificates that were replaced now, not within the next second. Called from the event loop."""
        self._look.set()

    async def _watch_files(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):  # not wait_for: see snapshotd/moves/moving.py
                    await self._look.wait()
            self._look.clear()
            if await in_thread(self._files.replaced):
                self._link.send_soon(self._files.frame)


def _listener(path: str) -> int:
    """The process that listens on a unix socket. Raises OSError if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        probe.connect(path)
        # struct ucred { pid_t pid; uid_t uid; gid_t gid; }
        pid: int = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


class LatestFiles:
    """The certificates and revoked serial numbers, as last read. What cannot be used is logged once and left out."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._stamp: object = None
        self._serials: frozenset[int] = frozenset()
        self.frame = Files(b"", b"", b"", [])

    def read(self) -> None:
        """Raises BadConfig, or OSError if a file has gone."""
        self._stamp = self._credentials.stamp()
        contents = self._credentials.read_pair()
        self._serials = revocations_of(self._credentials.ca).serials()
        self.frame = Files(*contents, [f"{serial:x}" for serial in self._serials])

    def replaced(self) -> bool:
        try:
            stamp = self._credentials.stamp()
            serials = revocations_of(self._credentials.ca).serials()
            if stamp == self._stamp and serials is self._serials:
                return False
            self._stamp = stamp
            self.read()
        except (BadConfig, OSError) as error:  # such as a certificate whose key is still being copied
            log.warning("the certificate that was replaced is not used yet: %s", error)
            return False
        log.info("%s and the list of revoked certificates are used for new connections", self._credentials.cert)
        return True
