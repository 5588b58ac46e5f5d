"""The lab, with real namespaces: its nodes are apart where they should be, and nothing of it stays behind.

The daemon here is a stand-in that only answers GetNode over mutual TLS: what is tested is the ground it stands on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from migrator.lab import Lab, processes
from migrator.lab.inside import start_ticks
from migrator.lab.layout import RUN, STATE, SWITCH
from snapshotd.api.errors import Busy, Internal, NotFound, Timeout, Unreachable, Usage, WrongState

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

REPOSITORY = Path(__file__).parents[1]

STAND_IN = """
import asyncio, grpc, pathlib, sys, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[2]).read_text())
ca, cert, key = (pathlib.Path(config["tls"][name]).read_bytes() for name in ("ca", "cert", "key"))
async def get_node(request, context): return b""
async def main():
    server = grpc.aio.server()
    calls = {"GetNode": grpc.unary_unary_rpc_method_handler(get_node)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("snapshotd.v1.Node", calls),))
    server.add_secure_port(config["listen"], grpc.ssl_server_credentials([(key, cert)], ca, True))
    await server.start()
    print("serving", config["node"], flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""
DAEMON = (sys.executable, "-c", STAND_IN)
LAUNCHER = (sys.executable, "-c", "import os, sys; os.execvp(sys.argv[4], sys.argv[4:])")  # --job JOB -- CMD

ECHO_SERVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    while True:
        connection, peer = server.accept()
        while data := connection.recv(100):
            connection.sendall(data)
"""
#: One command per line: "connect HOST", "send WORD", "receive"; one answer per line.
ECHO_CLIENT = """
import socket, sys
for line in sys.stdin:
    verb, *rest = line.split()
    try:
        if verb == "connect":
            connection = socket.create_connection((rest[0], 5000), timeout=1)
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


def make(name: str, **options: Any) -> Lab:
    return Lab(f"test-{name}-{os.getpid() % 100000}", **{"daemon": DAEMON, "launcher": LAUNCHER, **options})


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = make("shared")
    lab.up(["node-1", "node-2", "spare-1"])
    yield lab
    lab.down()


def output(lab: Lab, node: str, *argv: str, **options: Any) -> str:
    with lab.spawn(node, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options) as child:
        text, _ = child.communicate(timeout=20)
    assert child.returncode == 0, text
    return str(text).strip()


class Client:
    """An echo client in a node, driven line by line."""

    def __init__(self, lab: Lab, node: str) -> None:
        pipe = subprocess.PIPE
        self.process = lab.spawn(node, [sys.executable, "-c", ECHO_CLIENT], stdin=pipe, stdout=pipe, text=True)

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


# ---------------------------------------------------------------- nodes are apart


def test_nodes_have_their_own_identity(lab: Lab) -> None:
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
def test_private_folders(lab: Lab, folder: str) -> None:
    name = f"{folder}/{lab.name}"
    output(lab, "node-1", "sh", "-c", f"test $(stat -f -c %T {folder}) = tmpfs && touch {name}")
    assert output(lab, "node-1", "ls", name) == name
    output(lab, "node-2", "test", "!", "-e", name)
    assert not Path(name).exists()


def test_the_rest_is_shared(lab: Lab) -> None:
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


def test_a_missing_folder_is_no_obstacle(lab: Lab, tmp_path: Path) -> None:
    """Where the caller stands is in /tmp, of which a node has its own."""
    assert output(lab, "node-1", "pwd", cwd=tmp_path) == "/"


def test_secrets_stay_outside(lab: Lab) -> None:
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


def test_exit_statuses(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
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
def test_tcp_between_nodes(lab: Lab) -> None:
    with Client(lab, "node-1") as client:
        assert [client.ask(line) for line in ("connect node-2", "send a", "receive 5")] == ["connected", "sent", "a"]
    with Client(lab, "operator") as client:
        assert client.ask(f"connect {lab.address('node-2')}") == "connected"


def test_the_host_cannot_reach_a_node(lab: Lab) -> None:
    with IPRoute() as netlink:
        assert not netlink.get_addr(address=lab.address("node-1"))
        assert not [link for link in netlink.get_links() if link.get_attr("IFLA_IFNAME") == "br0"]


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("end", ["node-1", "operator"])
def test_partition_is_silent_and_heals(lab: Lab, end: str) -> None:
    target, other = lab.address("node-2"), lab.address("spare-1")
    with Client(lab, end) as open_before, Client(lab, end) as late:
        assert open_before.ask(f"connect {target}") == "connected"
        lab.partition(end, "node-2")
        lab.partition("node-2", end)  # again, and the other way round, is the same
        try:
            assert open_before.ask("send x") == "sent"
            assert open_before.ask("receive 0.5") == "TimeoutError", "no answer, and no error either"
            assert late.ask(f"connect {target}") == "TimeoutError"
            assert late.ask(f"connect {other}") == "connected", "only the two are cut off"
            with Client(lab, "node-2") as back:
                assert back.ask(f"connect {lab.address('node-1') if end == 'node-1' else other}") == (
                    "TimeoutError" if end == "node-1" else "connected"
                )
        finally:
            lab.heal(end, "node-2")
        assert open_before.ask("receive 10") == "x", "TCP repeats what was lost"
        assert late.ask(f"connect {target}") == "connected"
        lab.heal(end, "node-2")


def test_bad_partitions(lab: Lab) -> None:
    with pytest.raises(NotFound, match="node-9"):
        lab.partition("node-1", "node-9")
    with pytest.raises(Usage, match="itself"):
        lab.partition("node-1", "node-1")


# ---------------------------------------------------------------- how migrator finds it


def probe(lab: Lab, *nodes: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "migrator.lab.probe", str(lab.cluster_path), "2", *nodes]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)


def test_operator_reaches_every_daemon(lab: Lab) -> None:
    assert probe(lab).returncode == 0
    lab.kill_daemon("node-2")
    done = probe(lab)
    assert (done.returncode, list(json.loads(done.stdout))) == (1, ["node-2"])
    lab.start_daemon("node-2")
    assert probe(lab, "node-2").returncode == 0


def test_migrator_inside_a_node_goes_over_its_own_cable(lab: Lab) -> None:
    argv = [sys.executable, "-m", "migrator.lab.probe", str(lab.cluster_path), "2", "node-2"]
    assert output(lab, "node-1", *argv, cwd=REPOSITORY) == "{}"
    lab.partition("node-1", "node-2")
    try:
        with lab.spawn("node-1", argv, cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
            child.communicate(timeout=20)
        assert child.returncode == 1
    finally:
        lab.heal("node-1", "node-2")


# ---------------------------------------------------------------- daemons


def test_daemon_is_killed_started_restarted(lab: Lab) -> None:
    first = lab.daemon_pid("node-1")
    lab.kill_daemon("node-1")
    assert lab.daemon_pid("node-1") is None
    lab.kill_daemon("node-1")  # there is none: nothing happens
    lab.start_daemon("node-1")
    second = lab.daemon_pid("node-1")
    with pytest.raises(WrongState, match="runs already"):
        lab.start_daemon("node-1")
    lab.restart_daemon("node-1")
    assert len({first, second, lab.daemon_pid("node-1")}) == 3
    assert lab.daemon_log("node-1").read_text().count("serving node-1") >= 3
    with pytest.raises(NotFound):
        lab.restart_daemon("node-9")


def test_stopped_daemon_does_not_end(lab: Lab) -> None:
    lab.kill_daemon("node-1", signal.SIGSTOP)
    with pytest.raises(Timeout, match="SIGTERM"):
        lab.kill_daemon("node-1", signal.SIGTERM, timeout_s=0.1)
    lab.kill_daemon("node-1", signal.SIGCONT)
    lab.kill_daemon("node-1", signal.SIGTERM)
    lab.start_daemon("node-1")


def test_daemon_is_started_where_the_operator_cannot_see_it(lab: Lab) -> None:
    lab.kill_daemon("node-2")
    lab.partition("operator", "node-2")
    lab.start_daemon("node-2", timeout_s=1)
    lab.heal("operator", "node-2")
    assert probe(lab, "node-2").returncode == 0


@pytest.mark.usefixtures("echo")
def test_crash_is_silent_and_boot_is_fresh(lab: Lab) -> None:
    state = lab.layout.state / "node-2/journal"
    state.write_text("on disk")
    boot_id = output(lab, "node-2", "cat", "/proc/sys/kernel/random/boot_id")
    output(lab, "node-2", "touch", "/tmp/gone")
    lab.partition("node-2", "spare-1")
    with Client(lab, "node-1") as client:
        assert client.ask("connect node-2") == "connected"
        inside = processes.in_cgroup(lab.layout.cgroup / "node-2")
        assert inside
        lab.crash("node-2")
        assert client.ask("receive 0.5") == "TimeoutError", "neither FIN nor RST"
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
            assert client.ask("connect node-1") == "connected"
            assert client.ask("connect spare-1") == "TimeoutError", "still cut off"
    finally:
        lab.heal("node-2", "spare-1")


# ---------------------------------------------------------------- ranks


def test_run_gives_each_rank_its_place(lab: Lab, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
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


def test_interrupt_goes_to_the_ranks(lab: Lab) -> None:
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
        rest, _ = child.communicate(timeout=20)
    assert sorted(rest.splitlines()) == ["[0] caught", "[1] caught"]
    assert child.returncode == 3


def test_run_needs_a_node_and_a_command(lab: Lab) -> None:
    with pytest.raises(Usage, match="no command"):
        lab.run("job", [])
    with pytest.raises(Usage, match="no command"):
        lab.exec("node-1", [])


# ---------------------------------------------------------------- up and down


def traces(lab: Lab) -> list[str]:
    """What is left of a lab."""
    left = [str(path) for path in (lab.layout.run, lab.layout.state, lab.layout.cgroup) if path.exists()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return left + [line for line in mounts if lab.name in line]


def host_state() -> tuple[list[str], list[str]]:
    """Mounts and links of the host, which a lab never touches."""
    with IPRoute() as netlink:
        links = sorted(link.get_attr("IFLA_IFNAME") for link in netlink.get_links())
    return Path("/proc/self/mountinfo").read_text().splitlines(), links


def in_its_namespaces(namespaces: set[str]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if str(entry.readlink()) in namespaces:
                found.append(int(entry.parts[2]))
        except OSError:
            continue
    return found


def network_namespaces(lab: Lab) -> set[str]:
    record = lab.layout.load()
    assert record is not None
    return {held.namespaces["net"] for held in record.holders.values()}


def test_down_leaves_nothing() -> None:
    lab = make("down")
    before = host_state()
    lab.down()  # there is none: nothing happens
    assert traces(lab) == []
    lab.up(["node-1", "node-2"])
    try:
        with pytest.raises(Busy, match="up already"):
            lab.up(["node-1"])
        assert host_state() == before
        assert lab.name in Lab.names()
        namespaces = network_namespaces(lab)
        assert len(namespaces) == 3
        ranks = lab.layout.cgroup / "node-1/snapshotd-ranks/some-rank"
        ranks.mkdir(parents=True)
        join = f"echo $$ > {ranks}/cgroup.procs; echo ready; exec sleep 1000"
        rank = lab.spawn("node-1", ["sh", "-c", join], stdout=subprocess.PIPE)
        assert rank.stdout is not None
        rank.stdout.readline()
        (ranks / "cgroup.freeze").write_text("1")
        pids = processes.in_cgroup(lab.layout.cgroup)
        assert len(pids) == 6, "three holders, two daemons, a frozen rank"
    finally:
        lab.down()
    assert rank.wait(timeout=5) == -signal.SIGKILL
    rank.stdout.close()
    assert traces(lab) == []
    assert host_state() == before
    assert in_its_namespaces(namespaces) == []
    assert [pid for pid in pids if start_ticks(pid) is not None] == []
    assert lab.name not in Lab.names()
    lab.down()


def test_down_finds_who_left_the_cgroup() -> None:
    lab = make("escape")
    lab.up(["node-1"])
    try:
        leave = f"echo $$ > {lab.layout.cgroup.parent}/cgroup.procs; echo left; exec sleep 1000"
        pipe = subprocess.PIPE
        by_file_system = lab.spawn("node-1", ["sh", "-c", f"unshare -n sh -c '{leave}'"], stdout=pipe)
        by_network = lab.spawn("operator", ["sh", "-c", leave], stdout=pipe)
        bystander = subprocess.Popen(["sleep", "1000"])
        for process in (by_file_system, by_network):
            assert process.stdout is not None
            assert process.stdout.readline() == b"left\n"
    finally:
        lab.down()
    for process in (by_file_system, by_network):
        assert process.wait(timeout=5) != 0
        assert process.stdout is not None
        process.stdout.close()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert traces(lab) == []


def test_two_labs_do_not_collide() -> None:
    one, two = make("one"), make("two")
    try:
        one.up(["node-1", "node-2"])
        two.up(["node-1", "node-2"])
        assert one.address("node-1") == two.address("node-1")
        output(one, "node-1", "touch", "/tmp/of-one")
        output(two, "node-1", "test", "!", "-e", "/tmp/of-one")
        assert probe(one).returncode == 0
        one.down()
        assert traces(one) == []
        assert probe(two).returncode == 0
        assert output(two, "node-2", "uname", "-n") == "node-2"
    finally:
        one.down()
        two.down()


def test_killed_holders_and_daemons() -> None:
    lab = make("killed")
    lab.up(["node-1", "node-2"])
    try:
        record = lab.layout.load()
        assert record is not None
        os.kill(record.holders["node-1"].pid, signal.SIGKILL)
        assert processes.wait(record.holders["node-1"], 5)
        assert output(lab, "node-1", "uname", "-n") == "node-1", "its daemon is still inside"
        for pid in processes.in_cgroup(lab.layout.cgroup):
            os.kill(pid, signal.SIGKILL)
        for held in (*record.holders.values(), *record.daemons.values()):
            assert processes.wait(held, 5)
        with pytest.raises(WrongState, match="not running"):
            lab.spawn("node-2", ["true"])
        lab.up(["node-1"])  # what is left makes way
        assert lab.nodes == ("node-1",)
        (lab.layout.run / "record.json").write_text("{")
    finally:
        lab.down()
    assert traces(lab) == []


@pytest.mark.parametrize("who", [SWITCH, "up"])
def test_up_is_killed_half_way(who: str) -> None:
    """`up` hangs, because its daemons never answer, and is killed; or what holds its switch is."""
    lab = make("half")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        started = Path(folder, "started")
        os.mkfifo(started)
        daemon = ("sh", "-c", f"echo started > {started}; exec sleep 1000")
        program = f"from migrator.lab import Lab; Lab({lab.name!r}, daemon={daemon!r}).up(['node-1'], timeout_s=2)"
        with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.PIPE) as up:
            assert started.read_text() == "started\n"
            record = lab.layout.load()
            assert record is not None
            os.kill(up.pid if who == "up" else record.holders[SWITCH].pid, signal.SIGKILL)
            up.communicate(timeout=30)
        assert up.returncode == (-signal.SIGKILL if who == "up" else 1)
    assert not lab.cluster_path.exists(), "nobody takes it for a lab that is up"
    assert (traces(lab) != []) == (who == "up"), "only who is killed leaves something behind"
    lab.down()
    assert traces(lab) == []


def test_up_shows_why_a_daemon_does_not_start() -> None:
    lab = make("bad", daemon=("sh", "-c", "echo the port is on fire >&2; exit 1"))
    with pytest.raises(Unreachable, match="the port is on fire"):
        lab.up(["node-1"], timeout_s=20)
    assert traces(lab) == []


def test_up_shows_a_daemon_that_never_answers() -> None:
    lab = make("mute", daemon=("sh", "-c", "echo thinking; exec sleep 1000"))
    with pytest.raises(Unreachable, match=r"(?s)node-1: .*refused.*thinking"):
        lab.up(["node-1"], timeout_s=0.5)
    assert traces(lab) == []


def test_a_daemon_in_tmp_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "daemon"
    program.touch()
    lab = make("hidden", daemon=(str(program),))
    with pytest.raises(Internal, match="not visible in a node"):
        lab.up(["node-1"])
    assert traces(lab) == []


@pytest.mark.parametrize(
    "nodes", [[], ["../x"], ["a", "a"], ["operator"], ["A"], ["x" * 25], [f"n{i}" for i in range(201)]]
)
def test_bad_node_names(nodes: list[str]) -> None:
    lab = make("names")
    with pytest.raises(Usage):
        lab.up(nodes)
    assert traces(lab) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "_switch", "x" * 25, "a\n"])
def test_bad_lab_names(name: str) -> None:
    with pytest.raises(Usage, match="name of a lab"):
        Lab(name)


def test_a_lab_that_is_not_up() -> None:
    lab = make("absent")
    for act in (lambda: lab.nodes, lambda: lab.exec("node-1", ["true"]), lambda: lab.partition("a", "b")):
        with pytest.raises(NotFound, match="not up"):
            act()
    assert not (RUN / lab.name).exists()
    assert not (STATE / lab.name).exists()
