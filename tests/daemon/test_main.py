"""The daemon as a process: its sockets, lock, signals and exit codes."""

from __future__ import annotations

import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd import main as daemon_main
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import BadConfig, Busy, Denied, Full, Unreachable
from snapshotd.sandbox import filter as seccomp
from tests.daemon.test_config import fake_criu, toml
from tests.descriptors import open_links
from tests.served import Certificates

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")


@dataclass
class Place:
    """A node's directories, its configuration, and the socket of a fake systemd."""

    folder: Path  # in memory, and short: sockets live here
    port: int
    metrics_port: int
    systemd: socket.socket
    environment: dict[str, str]
    started: list[subprocess.Popen[str]]

    @property
    def config(self) -> Path:
        return self.folder / "snapshotd.toml"

    @property
    def admin(self) -> Path:
        return self.folder / "run" / "admin.sock"

    def start(self, stub: str = "", **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.stub_daemon", "--config", str(self.config)],
            cwd=REPO,
            env={**self.environment, "STUB": stub, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def hear(self, wanted: str) -> str:
        """The next notification that begins with `wanted`; others are skipped."""
        while True:
            message = self.systemd.recv(4096).decode()
            if message.startswith(wanted):
                return message


@pytest.fixture
def place(tmp_path: Path, certificates: Certificates) -> Iterator[Place]:
    folder = Path("/dev/shm") / f"snapshotd-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        port, metrics_port = first.getsockname()[1], second.getsockname()[1]
    (folder / "snapshotd.toml").write_text(
        toml(
            certificates,
            fake_criu(folder),
            listen=f'listen = "127.0.0.1:{port}"',
            image_dir=f'run_dir = "{folder}/run"',
            rest=f'state_dir = "{folder}/state"\nmetrics_listen = "127.0.0.1:{metrics_port}"\n'
            f'health = {{ root = "{folder}/health" }}',
        )
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(90)
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
        there = Place(folder, port, metrics_port, systemd, environment, [])
        yield there
        for process in there.started:
            process.kill()
            process.communicate()
    shutil.rmtree(folder)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_daemon_starts_serves_and_stops(place: Place, certificates: Certificates) -> None:
    process = place.start(WATCHDOG_USEC="200000")
    assert place.hear("READY=1") == f"READY=1\nSTATUS=node node-1, listening on 127.0.0.1:{place.port}"
    assert mode(place.admin) == 0o600
    assert mode(place.folder / "run") == 0o755
    assert mode(place.folder / "run" / "images") == 0o700
    assert mode(place.folder / "state") == 0o700

    async with DaemonClient(f"unix:{place.admin}") as root:
        assert (await root.node.GetNode(pb.GetNodeRequest(), timeout_s=5)).name == "node-1"
    operator = DaemonClient(f"127.0.0.1:{place.port}", credentials=certificates.operator, node="node-1")
    async with operator:
        assert (await operator.node.GetNode(pb.GetNodeRequest(), timeout_s=5)).name == "node-1"
        with socket.create_connection(("127.0.0.1", place.metrics_port), 5) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert scraper.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(2):
            place.hear("WATCHDOG=1")

        # With a client still connected: it must not delay the end.
        process.send_signal(signal.SIGTERM)
        assert place.hear("STOPPING=1").startswith("STOPPING=1\nSTATUS=")
        status, out, err = ended(process)
    assert status == 0, err
    assert out == "handed over within 20 s\n"
    assert "Traceback" not in err
    assert "started as node node-1, listening on" in err
    assert not place.admin.exists()


async def test_second_daemon_is_refused_and_the_first_keeps_running(place: Place) -> None:
    first = place.start()
    place.hear("READY=1")
    status, _, err = ended(place.start())
    assert status == Busy.exit_code
    assert err.startswith(f"snapshotd: another snapshotd (pid {first.pid}) already serves {place.folder}/run\nremedy: ")
    async with DaemonClient(f"unix:{place.admin}") as root:
        assert (await root.node.GetNode(pb.GetNodeRequest(), timeout_s=5)).name == "node-1"


async def test_leftovers_of_a_killed_daemon_do_not_prevent_the_next_start(place: Place) -> None:
    first = place.start()
    place.hear("READY=1")
    first.kill()
    assert ended(first)[0] == -signal.SIGKILL
    assert place.admin.exists()
    place.start()
    place.hear("READY=1")
    async with DaemonClient(f"unix:{place.admin}") as root:
        assert (await root.node.GetNode(pb.GetNodeRequest(), timeout_s=5)).name == "node-1"


def test_second_sigterm_exits_at_once(place: Place) -> None:
    process = place.start("hang")
    place.hear("READY=1")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "exiting at once" in err


def test_sigint_is_a_clean_exit(place: Place) -> None:
    process = place.start()
    place.hear("READY=1")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 0


def test_sighup_looks_for_certificates_and_stops_nothing(place: Place) -> None:
    process = place.start()
    place.hear("READY=1")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 0, err
    assert "received SIGHUP: looking for new certificates" in err


def test_failed_start_exits_with_the_code_of_the_error(place: Place) -> None:
    status, _, err = ended(place.start("refuse"))
    assert status == Full.exit_code
    assert "snapshotd: no room for the journal\nremedy: free memory" in err
    assert not place.admin.exists()


def test_failed_stop_is_not_a_clean_exit(place: Place) -> None:
    process = place.start("fail")
    place.hear("READY=1")
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 1
    assert "RuntimeError: stop failed" in err


def test_port_in_use_is_reported(place: Place) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.port))
        other.listen()
        status, _, err = ended(place.start())
    assert status == BadConfig.exit_code, err
    assert f"listen: cannot listen on 127.0.0.1:{place.port}: Address already in use" in err


def test_metrics_port_in_use_is_reported(place: Place) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.metrics_port))
        other.listen()
        status, _, err = ended(place.start())
    assert status == BadConfig.exit_code, err
    assert f"metrics_listen: cannot listen on 127.0.0.1:{place.metrics_port}" in err


def test_socket_of_another_listener_is_not_removed(place: Place) -> None:
    place.admin.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place.admin))
        other.listen()
        status, _, err = ended(place.start())
        assert status == Busy.exit_code
        assert f"another process listens on {place.admin}" in err
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place.admin))


def test_file_in_place_of_the_socket_is_not_removed(place: Place) -> None:
    place.admin.parent.mkdir()
    place.admin.write_text("precious")
    status, _, err = ended(place.start())
    assert status == BadConfig.exit_code
    assert "is not a socket" in err
    assert place.admin.read_text() == "precious"


def test_check_config_reports_problems(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    daemon_main.main(["--config", str(place.config), "--check-config"])
    assert "is valid: node node-1, CRIU 4.2.1" in capsys.readouterr().out
    assert not (place.folder / "run").exists()
    place.config.write_text("node = 7\n")
    with pytest.raises(SystemExit) as end:
        daemon_main.main(["--config", str(place.config), "--check-config"])
    assert end.value.code == BadConfig.exit_code
    err = capsys.readouterr().err
    assert "node: must be the name of this node: at most 63 letters" in err
    assert "remedy: correct the file" in err


def test_daemon_requires_root(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as end:
        daemon_main.main(["--config", str(place.config)])
    assert end.value.code == Denied.exit_code
    assert "must run as root" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        daemon_main.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("snapshotd 0.")


def network_process(daemon: int) -> int:
    """The pid of a daemon's network process."""
    (child,) = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    assert Path(f"/proc/{child}/comm").read_text() == "snapshotd-net\n"
    return int(child)


def test_idle_daemon_stays_within_its_memory_budget(place: Place) -> None:
    """The budget of both processes is 100 MiB; the program without its services must stay well below."""
    process = place.start()
    place.hear("READY=1")
    kib = 0
    for pid in (process.pid, network_process(process.pid)):
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += next(int(line.split()[1]) for line in fields if line.startswith("Pss:"))
    assert kib < 80 * 1024


def test_daemon_loads_no_grpc_and_the_network_process_nothing_of_moves() -> None:
    """Otherwise root would run code that parses bytes from the network, and an idle daemon would need more memory."""
    for modules, absent in (
        ("snapshotd.main, snapshotd.service", ["grpc"]),
        ("snapshotd.network.process", ["snapshotd.moves", "snapshotd.criu", "snapshotd.cuda", "snapshotd.config"]),
    ):
        code = f"import sys, {modules}; print([name for name in {absent} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


async def test_network_process_that_is_killed_is_started_again(place: Place) -> None:
    daemon = place.start()
    place.hear("READY=1")
    first = network_process(daemon.pid)
    async with DaemonClient(f"unix:{place.admin}") as root:
        await root.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
        os.kill(first, signal.SIGKILL)
        assert (await root.node.GetNode(pb.GetNodeRequest(), timeout_s=60, retry=True)).name == "node-1"
    assert network_process(daemon.pid) != first
    assert mode(place.admin) == 0o600
    assert place.admin.stat().st_uid == 0
    daemon.send_signal(signal.SIGTERM)
    status, _, err = ended(daemon)
    assert status == 0, err
    assert "the network process has ended (it closed the link); starting it again" in err, err


def test_network_process_ends_with_the_daemon(place: Place) -> None:
    daemon = place.start()
    place.hear("READY=1")
    end = os.pidfd_open(network_process(daemon.pid))
    daemon.kill()
    assert select.select([end], [], [], 20)[0], "it is still there"
    os.close(end)


def test_network_process_has_no_privileges(place: Place) -> None:
    daemon = place.start()
    place.hear("READY=1")
    pid = network_process(daemon.pid)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    nobody = pwd.getpwnam("nobody")
    assert status["Uid"].split() == [str(nobody.pw_uid)] * 4
    assert status["Gid"].split() == [str(nobody.pw_gid)] * 4
    assert status["Groups"].split() == []
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == ("2" if seccomp.available() else "0")
    assert re.search(r"Max core file size +0 +0 ", Path(f"/proc/{pid}/limits").read_text())
    assert Path(f"/proc/{pid}/maps").stat().st_uid == 0, "it is dumpable"
    # It has no file of the daemon. With a descriptor of the lock it could release that, or write another pid into it.
    assert [link for link in open_links(pid).values() if link.startswith(str(place.folder))] == []


@pytest.mark.slow
async def test_unresponsive_daemon_is_detected_before_the_deadline(place: Place, certificates: Certificates) -> None:
    """The daemon is stopped, not dead: its kernel still acknowledges, so only the keepalive detects it."""
    process = place.start()
    place.hear("READY=1")
    async with DaemonClient(f"127.0.0.1:{place.port}", credentials=certificates.operator, node="node-1") as operator:
        await operator.node.GetNode(pb.GetNodeRequest(), timeout_s=5)
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(Unreachable):
            await operator.node.GetNode(pb.GetNodeRequest(), timeout_s=60)
        assert time.monotonic() - began_s < 15
