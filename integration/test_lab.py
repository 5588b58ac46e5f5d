"""The nodes of a lab are isolated from each other where real nodes are. Bringing labs up and down: test_lab_up_down.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from integration.harness import PATIENCE_S
from integration.stand_in_lab import LAUNCHER, REPOSITORY, make, output, probe
from migrator.lab import Lab, processes
from migrator.lab.inside import start_ticks
from snapshotd.api.errors import NotFound, Timeout, Usage, WrongState

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

ECHO_SERVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    while True:
        connection, peer = server.accept()
        while data := connection.recv(100):
            connection.sendall(data)
"""
#: One command per line: "connect HOST TIMEOUT_S", "send WORD", "receive TIMEOUT_S"; one answer per line.
ECHO_CLIENT = """
import socket, sys
for line in sys.stdin:
    verb, *rest = line.split()
    try:
        if verb == "connect":
            connection = socket.create_connection((rest[0], 5000), timeout=float(rest[1]))
            answer = "connected"
        elif verb == "send":
            connection.sendall(rest[0].encode())
            answer = "sent"
        else:
            connection.settimeout(float(rest[0]))
            answer = connection.recv(100).decode() or "closed"
    except OSError as error:
        answer = type(error).__name__
    print(answer, flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = make("shared")
    lab.up(["node-1", "node-2", "spare-1"])
    yield lab
    lab.down()


class Client:
    """An echo client in a node, driven line by line."""

    def __init__(self, lab: Lab, node: str) -> None:
        pipe = subprocess.PIPE
        self.process = lab.spawn(node, [sys.executable, "-c", ECHO_CLIENT], stdin=pipe, stdout=pipe, text=True)

    def connect(self, host: str, timeout_s: float = PATIENCE_S) -> str:
        return self.ask(f"connect {host} {timeout_s}")

    def receive(self, timeout_s: float = PATIENCE_S) -> str:
        return self.ask(f"receive {timeout_s}")

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline().strip())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def echo(lab: Lab) -> Iterator[None]:
    """An echo server on every node."""
    servers = []
    for node in lab.nodes:
        servers.append(lab.spawn(node, [sys.executable, "-c", ECHO_SERVER], stdout=subprocess.PIPE, text=True))
        assert servers[-1].stdout is not None
        assert servers[-1].stdout.readline() == "listening\n"
    yield
    for server in servers:
        server.kill()
        server.communicate()


# ---------------------------------------------------------------- isolation of nodes


def test_nodes_have_separate_identities(lab: Lab) -> None:
    assert [output(lab, node, "uname", "-n") for node in lab.nodes] == ["node-1", "node-2", "spare-1"]
    boot_ids = {output(lab, node, "cat", "/proc/sys/kernel/random/boot_id") for node in lab.nodes}
    assert len(boot_ids) == 3
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() not in boot_ids
    assert len({lab.address(node) for node in lab.nodes}) == 3


def test_nodes_resolve_each_other(lab: Lab) -> None:
    program = "import socket; print(*(socket.gethostbyname(n) for n in ('node-1', 'node-2', 'spare-1', 'localhost')))"
    expected = f"{lab.address('node-1')} {lab.address('node-2')} {lab.address('spare-1')} 127.0.0.1"
    assert {output(lab, node, sys.executable, "-c", program) for node in lab.nodes} == {expected}


@pytest.mark.parametrize("folder", ["/run", "/tmp", "/dev/shm"])
def test_run_tmp_and_shm_are_private_to_a_node(lab: Lab, folder: str) -> None:
    name = f"{folder}/{lab.name}"
    output(lab, "node-1", "sh", "-c", f"test $(stat -f -c %T {folder}) = tmpfs && touch {name}")
    assert output(lab, "node-1", "ls", name) == name
    output(lab, "node-2", "test", "!", "-e", name)
    assert not Path(name).exists()


def test_other_folders_are_shared(lab: Lab) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        output(lab, "node-1", "touch", f"{folder}/seen")
        assert output(lab, "node-2", "ls", folder) == "seen"
        assert output(lab, "node-2", "pwd", cwd=folder) == folder


def test_mounts_in_a_node_stay_there(lab: Lab) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    output(lab, "node-1", "sh", "-c", "mkdir -p /run/x && mount -t tmpfs x /run/x")
    assert "/run/x" in output(lab, "node-1", "cat", "/proc/mounts")
    assert "/run/x" not in output(lab, "node-2", "cat", "/proc/mounts")
    assert Path("/proc/self/mountinfo").read_text() == before
    output(lab, "node-1", "umount", "/run/x")


def test_command_runs_although_its_working_directory_is_missing_in_the_node(lab: Lab) -> None:
    """The working directory of the caller is in /tmp, and each node has its own /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        assert output(lab, "node-1", "pwd", cwd=Path(folder)) == "/"


def test_node_sees_only_its_own_key_and_the_operators(lab: Lab) -> None:
    """A node sees its own key and the operator's, not the CA's nor another node's."""
    found = output(lab, "node-1", "find", "/run/migrator-lab", "-name", "*.key").split()
    assert sorted(found) == [f"{lab.layout.run}/node-1/tls.key", f"{lab.layout.run}/operator/tls.key"]
    assert (lab.layout.run / "pki/ca.key").exists()


def test_processes_of_a_node_are_in_its_cgroup(lab: Lab) -> None:
    groups = output(lab, "node-1", "cat", "/proc/self/cgroup").splitlines()
    assert f"0::/{lab.layout.cgroup.name}/node-1/session" in groups
    daemon = lab.daemon_pid("node-1")
    assert daemon in processes.in_cgroup(lab.layout.cgroup / "node-1/daemon")
    assert os.getsid(daemon or 0) == daemon


def test_exit_statuses_are_passed_on(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    assert lab.exec("node-1", ["sh", "-c", "echo hello; exit 7"]) == 7
    assert lab.exec("node-1", ["sh", "-c", "kill -9 $$"]) == 137
    assert lab.exec("node-1", ["no-such-command"]) == 127
    assert lab.exec("node-1", ["/etc"]) == 126
    assert lab.exec("operator", ["true"]) == 0
    text = capfd.readouterr()
    assert text.out == "hello\n"
    assert "no-such-command: No such file" in text.err


# ---------------------------------------------------------------- the network


@pytest.mark.usefixtures("echo")
def test_nodes_connect_to_each_other_over_tcp(lab: Lab) -> None:
    with Client(lab, "node-1") as client:
        assert [client.connect("node-2"), client.ask("send a"), client.receive()] == ["connected", "sent", "a"]
    with Client(lab, "operator") as client:
        assert client.connect(lab.address("node-2")) == "connected"


def test_host_cannot_reach_a_node(lab: Lab) -> None:
    with IPRoute() as netlink:
        assert not netlink.get_addr(address=lab.address("node-1"))
        assert not [link for link in netlink.get_links() if link.get_attr("IFLA_IFNAME") == "br0"]


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("end", ["node-1", "operator"])
def test_partition_is_silent_and_heals(lab: Lab, end: str) -> None:
    target, other = lab.address("node-2"), lab.address("spare-1")
    with Client(lab, end) as open_before, Client(lab, end) as late:
        assert open_before.connect(target) == "connected"
        lab.partition(end, "node-2")
        lab.partition("node-2", end)  # idempotent and symmetric
        try:
            assert open_before.ask("send x") == "sent"
            assert open_before.receive(0.5) == "TimeoutError", "neither an answer nor an error"
            assert late.connect(target, 1) == "TimeoutError"
            assert late.connect(other) == "connected", "only these two are cut off from each other"
            with Client(lab, "node-2") as back:
                if end == "node-1":
                    assert back.connect(lab.address("node-1"), 1) == "TimeoutError"
                else:
                    assert back.connect(other) == "connected"
        finally:
            lab.heal(end, "node-2")
        assert open_before.receive() == "x", "TCP retransmits what was lost, the later the longer it was cut off"
        assert late.connect(target) == "connected"
        lab.heal(end, "node-2")


def test_invalid_partitions_are_refused(lab: Lab) -> None:
    with pytest.raises(NotFound, match="node-9"):
        lab.partition("node-1", "node-9")
    with pytest.raises(Usage, match="itself"):
        lab.partition("node-1", "node-1")


# ---------------------------------------------------------------- how migrator reaches the daemons


def test_operator_reaches_every_daemon(lab: Lab) -> None:
    assert probe(lab).returncode == 0
    lab.kill_daemon("node-2")
    done = probe(lab, "node-2", timeout_s=2)
    assert (done.returncode, list(json.loads(done.stdout))) == (1, ["node-2"])
    assert probe(lab, "node-1", "spare-1").returncode == 0
    lab.start_daemon("node-2")
    assert probe(lab, "node-2").returncode == 0


def test_migrator_inside_a_node_uses_the_link_of_that_node(lab: Lab) -> None:
    argv = [sys.executable, "-m", "migrator.lab.probe", str(lab.cluster_path)]
    assert output(lab, "node-1", *argv, str(PATIENCE_S), "node-2", cwd=REPOSITORY) == "{}"
    lab.partition("node-1", "node-2")
    try:
        with lab.spawn("node-1", [*argv, "2", "node-2"], cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
            child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 1
    finally:
        lab.heal("node-1", "node-2")


# ---------------------------------------------------------------- daemons


def test_daemon_can_be_killed_started_and_restarted(lab: Lab) -> None:
    first = lab.daemon_pid("node-1")
    lab.kill_daemon("node-1")
    assert lab.daemon_pid("node-1") is None
    lab.kill_daemon("node-1")  # no daemon runs: no effect
    lab.start_daemon("node-1")
    second = lab.daemon_pid("node-1")
    with pytest.raises(WrongState, match="runs already"):
        lab.start_daemon("node-1")
    lab.restart_daemon("node-1")
    assert len({first, second, lab.daemon_pid("node-1")}) == 3
    assert lab.daemon_log("node-1").read_text().count("serving node-1") >= 3
    with pytest.raises(NotFound):
        lab.restart_daemon("node-9")


def test_stopped_daemon_does_not_exit_on_sigterm(lab: Lab) -> None:
    lab.kill_daemon("node-1", signal.SIGSTOP)
    with pytest.raises(Timeout, match="SIGTERM"):
        lab.kill_daemon("node-1", signal.SIGTERM, timeout_s=0.1)
    lab.kill_daemon("node-1", signal.SIGCONT)
    lab.kill_daemon("node-1", signal.SIGTERM)
    lab.start_daemon("node-1")


def test_daemon_can_be_started_while_cut_off_from_the_operator(lab: Lab) -> None:
    lab.kill_daemon("node-2")
    lab.partition("operator", "node-2")
    lab.start_daemon("node-2", timeout_s=1)
    lab.heal("operator", "node-2")
    assert probe(lab, "node-2").returncode == 0


@pytest.mark.usefixtures("echo")
def test_crash_sends_no_packet_and_boot_keeps_only_the_disk(lab: Lab) -> None:
    state = lab.layout.state / "node-2/journal"
    state.write_text("on disk")
    boot_id = output(lab, "node-2", "cat", "/proc/sys/kernel/random/boot_id")
    output(lab, "node-2", "touch", "/tmp/gone")
    lab.partition("node-2", "spare-1")
    with Client(lab, "node-1") as client:
        assert client.connect("node-2") == "connected"
        inside = processes.in_cgroup(lab.layout.cgroup / "node-2")
        assert inside
        lab.crash("node-2")
        assert client.receive(0.5) == "TimeoutError", "neither FIN nor RST"
    assert not [pid for pid in inside if start_ticks(pid) is not None]
    with pytest.raises(WrongState, match="not running"):
        lab.exec("node-2", ["true"])
    lab.boot("node-2")
    try:
        assert state.read_text() == "on disk"
        assert output(lab, "node-2", "cat", "/proc/sys/kernel/random/boot_id") != boot_id
        output(lab, "node-2", "test", "!", "-e", "/tmp/gone")
        with pytest.raises(WrongState, match="is running"):
            lab.boot("node-2")
        with Client(lab, "node-2") as client:
            assert client.connect("node-1") == "connected"
            assert client.connect("spare-1", 1) == "TimeoutError", "still cut off"
    finally:
        lab.heal("node-2", "spare-1")


# ---------------------------------------------------------------- ranks


def test_run_sets_the_environment_of_each_rank(lab: Lab, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = (
        'echo $(uname -n) $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT; printf "no end" >&2; exit $RANK'
    )
    assert lab.run("job", ["sh", "-c", program]) == 1
    text = capfdbinary.readouterr()
    port = text.out.split()[-1].decode()
    address = lab.address("node-1")
    lines = sorted(text.out.decode().splitlines())
    assert lines == [f"[0] node-1 0/2 0 {address} {port}", f"[1] node-2 1/2 0 {address} {port}"]
    assert sorted(text.err.decode().splitlines()) == ["[0] no end", "[1] no end"]
    assert lab.run("job", ["true"]) == 0


def test_interrupt_is_forwarded_to_the_ranks(lab: Lab) -> None:
    rank = 'trap "echo caught; exit 3" INT; echo ready; while :; do sleep 0.05; done'
    program = (
        f"import sys; from migrator.lab import Lab\n"
        f"lab = Lab({lab.name!r}, launcher={LAUNCHER!r})\n"
        f"sys.exit(lab.run('job', ['sh', '-c', {rank!r}]))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert sorted(child.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=PATIENCE_S)
    assert sorted(rest.splitlines()) == ["[0] caught", "[1] caught"]
    assert child.returncode == 3


def test_run_needs_a_node_and_a_command(lab: Lab) -> None:
    with pytest.raises(Usage, match="no command"):
        lab.run("job", [])
    with pytest.raises(Usage, match="no command"):
        lab.exec("node-1", [])
