"""Requests that cannot be met fail with the documented exit code and a clear message, and the job is unharmed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.connections import in_node
from integration.harness import PATIENCE_S, Cluster, Job, until
from migrator import pki
from snapshotd.api.errors import Ambiguous, Busy, Denied, NotFound, RankGone, Refused, Undone, Unreachable
from snapshotd.net import sockets
from snapshotd.runtime.faults import Point
from tests.sampling import examples

pytestmark = pytest.mark.root

SOURCE, TARGET, OTHER = "node-1", "spare-1", "node-2"


@pytest.fixture
def job(nodes: Cluster) -> Job:
    """A rank that can move."""
    started = nodes.workload(SOURCE, "chain.py")
    started.await_lines(3)
    return started


def refused(nodes: Cluster, *arguments: str, code: int, says: str, environment: dict[str, str] | None = None) -> str:
    """Fails unless the command exits with `code` and prints `says`. Returns all it prints."""
    asked = subprocess.run(
        [sys.executable, "-m", "migrator.cli", *arguments],
        env=environment or nodes.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    result = asked.stdout + asked.stderr
    assert asked.returncode == code, f"exit {asked.returncode}\n{result}\n{nodes.logs()}"
    assert says in result, result
    assert "Traceback" not in result
    return result


def unharmed(nodes: Cluster, job: Job, at: str = SOURCE) -> None:
    """The job continues where it was, and can be moved."""
    job.await_progress()
    assert [rank["node"] for rank in nodes.ps(job) if rank["place"] == "here"] == [at]
    nodes.move(job, OTHER)
    job.await_progress()


# ---------------------------------------------------------------- names of ranks and nodes


def test_unknown_ranks_jobs_and_nodes_are_reported(nodes: Cluster, job: Job) -> None:
    rank = ("--rank", "0", "--job", job.name)
    for verb in ("move", "check"):
        refused(
            nodes, verb, "--rank", "7", "--job", job.name, "--to", TARGET, code=NotFound.exit_code, says="no rank 7"
        )
        refused(nodes, verb, "--rank", "0", "--job", "night", "--to", TARGET, code=NotFound.exit_code, says="'night'")
        result = refused(nodes, verb, *rank, "--to", "spare-2", code=NotFound.exit_code, says="did you mean spare-1?")
        assert "node-1, node-2, spare-1" in result
        refused(nodes, verb, *rank, "--to", SOURCE, code=Refused.exit_code, says=f"already on {SOURCE}")
    refused(nodes, "move", *rank, "--to", "../etc", code=2, says="is not a valid node name")
    unharmed(nodes, job)


def test_rank_of_two_jobs_is_ambiguous(nodes: Cluster, job: Job) -> None:
    other = nodes.workload(OTHER, "chain.py")
    other.await_lines(1)
    result = refused(nodes, "move", "--rank", "0", "--to", TARGET, code=Ambiguous.exit_code, says="--job")
    assert job.name in result
    assert other.name in result


def test_rank_that_is_moving_is_busy(nodes: Cluster, job: Job) -> None:
    with nodes.moving(job, TARGET, SOURCE, "freeze") as first:
        refused(nodes, "move", "--rank", "0", "--to", OTHER, code=Busy.exit_code, says="being moved already")
    assert first.code == 0
    unharmed(nodes, job, at=TARGET)


def test_target_daemon_that_does_not_answer_is_unreachable(nodes: Cluster, job: Job) -> None:
    nodes.lab.kill_daemon(TARGET)
    for verb in ("move", "check"):
        refused(nodes, verb, "--rank", "0", "--to", TARGET, code=Unreachable.exit_code, says=TARGET)
    nodes.lab.start_daemon(TARGET)
    unharmed(nodes, job)


# ---------------------------------------------------------------- certificates


def cluster_with(nodes: Cluster, identity: pki.Identity) -> dict[str, str]:
    """The environment of an operator who uses these certificates with this cluster."""
    text = nodes.lab.cluster_path.read_text()
    for key, path in (("ca", identity.ca), ("cert", identity.cert), ("key", identity.key)):
        lines = [f'{key} = "{path}"' if line.startswith(f"{key} =") else line for line in text.splitlines()]
        text = "\n".join(lines)
    file = nodes.folder / "cluster.toml"
    file.write_text(text)
    return nodes.environment(MIGRATOR_CLUSTER=str(file))


def test_certificates_of_another_authority_are_rejected(nodes: Cluster, job: Job, tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    theirs = cluster_with(nodes, pki.issue_operator(tmp_path / "pki", "mallory"))
    result = refused(
        nodes, "move", "--rank", "0", "--to", TARGET, code=Unreachable.exit_code, says="certificate", environment=theirs
    )
    assert len(result.splitlines()) < 12, result
    # Also where the caller trusts the cluster's authority: the daemons do not trust the caller's.
    mixed = pki.issue_operator(tmp_path / "pki", "trudy")
    ours = pki.Identity(nodes.lab.layout.run / "pki" / "ca.crt", mixed.cert, mixed.key)
    refused(
        nodes,
        "move",
        "--rank",
        "0",
        "--to",
        TARGET,
        code=Unreachable.exit_code,
        says="certificate",
        environment=cluster_with(nodes, ours),
    )
    unharmed(nodes, job)


def test_certificate_of_a_node_cannot_move_ranks(nodes: Cluster, job: Job) -> None:
    folder = nodes.lab.layout.node(TARGET)
    as_node = cluster_with(nodes, pki.Identity(folder / "ca.crt", folder / "tls.crt", folder / "tls.key"))
    result = refused(
        nodes, "move", "--rank", "0", "--to", TARGET, code=Denied.exit_code, says="operator", environment=as_node
    )
    assert TARGET in result
    unharmed(nodes, job)


# ---------------------------------------------------------------- resources that cannot be moved

HAS_IT_ALL = """
import ctypes, socket, time
libc = ctypes.CDLL("libc.so.6")
device = open("/dev/kmsg")
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
ring = libc.syscall(425, 4, (ctypes.c_char * 120)())  # not through the shim's syscall(), which denies it
memory = libc.shmget(0, 4096, 0o1600)
libc.shmat.restype = ctypes.c_void_p
attached = libc.shmat(memory, None, 0)
libc.shmctl(memory, 0, None)  # removed when the last process detaches
print("ring", ring >= 0, flush=True)
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
"""
REMEDIES = {
    "devices": "close the device before the move",
    "other-sockets": "close them before the move",
    "io-uring": "`migrator run` denies io_uring",
    "sysv-memory": "use POSIX shared memory",
}


def test_resources_that_cannot_move_are_named_with_a_remedy(nodes: Cluster) -> None:
    job = nodes.start(SOURCE, [sys.executable, "-c", HAS_IT_ALL])
    job.await_lines(3)
    assert job.lines()[0] == "ring True", "this kernel has no io_uring to refuse"
    for verb in ("check", "move"):
        result = refused(nodes, verb, "--rank", "0", "--to", TARGET, code=Refused.exit_code, says="/dev/kmsg")
        for name, remedy in REMEDIES.items():
            assert name in result
            assert remedy in result
    listed = nodes.migrator("check", "--rank", "0", "--to", TARGET, "--json")
    refusing = {check["name"] for check in json.loads(listed.stdout)["checks"] if check["verdict"] == "refuse"}
    assert refusing >= REMEDIES.keys()
    job.await_progress()
    assert [rank["node"] for rank in nodes.ps(job)] == [SOURCE]
    moves = json.loads(nodes.migrator("history", "--json").stdout)["moves"]
    assert job.name not in {move["job"] for move in moves}


def test_rank_that_can_move_passes_the_check(nodes: Cluster, job: Job) -> None:
    checked = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET, "--json")
    assert checked.returncode == 0, checked.stdout
    assert {check["verdict"] for check in json.loads(checked.stdout)["checks"]} <= {"pass", "warn"}
    job.await_progress()


# ---------------------------------------------------------------- a rank that ends during a move


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("node", "point", "number"),
    [
        (TARGET, "before-prepare", signal.SIGTERM),
        (SOURCE, "begin", signal.SIGTERM),
        (SOURCE, "freeze", signal.SIGKILL),
        (SOURCE, "dumping", signal.SIGKILL),
        (TARGET, "seal", signal.SIGKILL),
    ],
)
def test_rank_that_ends_during_a_move_is_reported(nodes: Cluster, node: str, point: str, number: int) -> None:
    """`migrator move` reports that the rank ended; the launcher gets its exit status."""
    job = nodes.workload(SOURCE, "listener.py")
    job.await_lines(1)
    pid = nodes.ps(job)[0]["pid"]
    with nodes.moving(job, TARGET, node, point) as asked:
        os.kill(pid, number)
        if number == signal.SIGTERM:
            assert job.finish() == 7
    assert asked.code == RankGone.exit_code, f"{asked}\n{nodes.logs()}"
    assert "ended" in asked.answer["reason"]
    assert job.finish() == (7 if number == signal.SIGTERM else -number)
    try:
        until("leftovers to be removed", lambda: not nodes.leftovers())
    except AssertionError as error:
        raise AssertionError(f"{error}: {nodes.leftovers()}\n{nodes.logs()}") from None


# ---------------------------------------------------------------- a refusal after the rank was stopped

#: Each has one end of a connection and does not look at it. A file makes a program close its end: the server its own
#: direction only.
SERVER = """
import os, signal, socket, sys, time
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("READY", flush=True)
    connection, _ = server.accept()
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    connection.shutdown(socket.SHUT_WR)
    signal.pause()
"""
CLIENT = """
import os, socket, sys, time
connection, step = socket.create_connection((sys.argv[1], int(sys.argv[2]))), 0
while True:
    print("step", step, flush=True)
    step += 1
    if connection is not None and os.path.exists(sys.argv[3]):
        connection = connection.close()
        print("closed", flush=True)
    time.sleep(0.02)
"""
PORT = 7013


@pytest.mark.parametrize(
    ("node", "point", "state", "name"),
    [
        (SOURCE, Point.STOPPED, "close-wait", "connection-ends"),
        (OTHER, Point.BEFORE_REPOINT, "fin-wait-1", "connection-ends"),
    ],
    ids=["source", "peer"],
)
def test_check_that_fails_after_the_freeze_undoes_the_move(
    nodes: Cluster, node: str, point: Point, state: str, name: str
) -> None:
    """Exit code 10 would promise that nothing was paused. The reason names the check, as a refusal by preflight does."""
    half, whole = nodes.folder / "half-closed", nodes.folder / "closed"
    for file in (half, whole):
        file.unlink(missing_ok=True)
    command = [sys.executable, "-c", SERVER, str(PORT), str(half)]
    server = nodes.lab.spawn(OTHER, command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "READY\n"
        job = nodes.start(SOURCE, [sys.executable, "-c", CLIENT, nodes.lab.address(OTHER), str(PORT), str(whole)])
        job.await_lines(5)
        with nodes.moving(job, TARGET, node, point) as asked:
            half.touch()
            until(f"a connection in {state}", lambda: state in states(nodes, node))
        assert asked.code == Undone.exit_code, f"{asked}\n{nodes.logs()}"
        assert asked.answer["outcome"] == "undone"
        assert asked.answer["where"] == "running on source"
        assert asked.answer["pause_s"] > 0
        assert asked.answer["reason"].startswith(f"refused after preflight: {name}: "), asked.answer["reason"]
        assert "half-closed" in asked.answer["reason"], asked.answer["reason"]
        job.await_progress()

        output = refused(nodes, "move", "--rank", "0", "--to", TARGET, code=Refused.exit_code, says="half-closed")
        assert "connection" in output
        whole.touch()
        until("the rank to close its connection", lambda: "closed" in job.lines())
        unharmed(nodes, job)
    finally:
        server.kill()
        server.communicate()


def states(nodes: Cluster, node: str) -> set[str]:
    """The states of the connections of PORT on a node."""
    rows = in_node(nodes, node, lambda: sockets._all_rows({"tcp"}))
    return {row.state for row in rows if PORT in {row.local.port, row.remote.port if row.remote else 0}}


# ---------------------------------------------------------------- malformed requests


@pytest.mark.parametrize("caller", ["operator", "node"])
def test_malformed_requests_do_no_harm(nodes: Cluster, job: Job, caller: str, pytestconfig: pytest.Config) -> None:
    identity = nodes.lab.layout.operator if caller == "operator" else nodes.lab.layout.node(OTHER)
    drawn = [str(examples(40)), str(pytestconfig.option.seed)]
    arguments = [str(nodes.lab.cluster_path), SOURCE, str(identity), *drawn]
    daemon, log = nodes.lab.daemon_pid(SOURCE), nodes.lab.daemon_log(SOURCE)
    before = log.stat().st_size
    command = [sys.executable, "-m", "integration.wirefuzz", *arguments]
    with nodes.lab.spawn("operator", command, stdout=subprocess.PIPE, text=True) as fuzz:
        out, _ = fuzz.communicate(timeout=3 * PATIENCE_S)  # hundreds of requests, each with its own connection
    assert fuzz.returncode == 0, out
    result = json.loads(out)
    assert result["wrong"] == []
    assert result["heard"]["StatusCode.RESOURCE_EXHAUSTED"] == 1, "the absurdly large message"
    assert sum(result["heard"].values()) > 300
    assert result["heard"]["denied"] > 100 if caller == "node" else {"usage", "not-found"} <= result["heard"].keys()
    assert nodes.lab.daemon_pid(SOURCE) == daemon
    assert "Traceback" not in log.read_bytes()[before:].decode()
    unharmed(nodes, job)
