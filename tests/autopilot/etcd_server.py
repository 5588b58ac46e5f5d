"""A real etcd for tests, on free ports of the loopback interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from migrator.autopilot.etcd import Etcd, Settings
from snapshotd.api.errors import SnapshotError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ROOT = Path(__file__).parents[2]
#: The machine's own, or the one that tools/setup has unpacked.
PROGRAM = shutil.which("etcd") or str(ROOT / ".setup/etcd/usr/bin/etcd")


def must_be_installed(request: pytest.FixtureRequest) -> None:
    if not Path(PROGRAM).exists() and not request.config.getoption("--whole"):
        pytest.skip("etcd is not installed (apt-get install etcd-server): make test-all")


class EtcdServer:
    """`inside` is a command that runs it elsewhere, as in the network of a lab; then nothing here can reach it."""

    def __init__(self, folder: Path, inside: Sequence[str] = (), settings: Settings | None = None) -> None:
        """`settings` are those of a client, with certificates that the server uses too."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._inside = folder, inside
        self.settings = settings or Settings((f"http://127.0.0.1:{free_port()}",))
        self.url, self._peer = self.settings.endpoints[-1], f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *self._inside,
            *(PROGRAM, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
            *("--initial-cluster", f"default={self._peer}", "--unsafe-no-fsync"),
        ]
        if self.settings.tls:
            files = {
                "cert-file": self.settings.cert,
                "key-file": self.settings.key,
                "trusted-ca-file": self.settings.ca,
            }
            command += [f"--{option}={path}" for option, path in files.items()] + ["--client-cert-auth"]
        # Debian's etcd for arm64 wants to be told that this is meant.
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        if self._inside:
            self._await_log("ready to serve client requests")
        else:
            self._await_answer()

    def _await_log(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in (self.folder / "log").read_text():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _await_answer(self) -> None:
        etcd, deadline = Etcd(self.settings), time.monotonic() + 60
        try:
            while True:
                try:
                    etcd.get(b"x")
                    return
                except SnapshotError:
                    assert time.monotonic() < deadline, (self.folder / "log").read_text()
        finally:
            etcd.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None
