"""A lab comes up completely or reports why not, and leaves nothing behind, whichever process is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from integration.harness import PATIENCE_S
from integration.stand_in_lab import REPOSITORY, make, output, probe
from migrator.lab import Lab, processes
from migrator.lab.inside import start_ticks
from migrator.lab.layout import RUN, STATE, SWITCH
from snapshotd.api.errors import Busy, Internal, NotFound, Unreachable, Usage, WrongState

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]


def traces(lab: Lab) -> list[str]:
    """Everything that is left of a lab."""
    left = [str(path) for path in (lab.layout.run, lab.layout.state, lab.layout.cgroup) if path.exists()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return left + [line for line in mounts if lab.name in line]


def host_state() -> tuple[list[str], list[str]]:
    """Mounts and network links of the host, which a lab never changes."""
    with IPRoute() as netlink:
        links = sorted(link.get_attr("IFLA_IFNAME") for link in netlink.get_links())
    return Path("/proc/self/mountinfo").read_text().splitlines(), links


def processes_in(namespaces: set[str]) -> list[int]:
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
    lab.down()  # there is no lab: no effect
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
    assert rank.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    rank.stdout.close()
    assert traces(lab) == []
    assert host_state() == before
    assert processes_in(namespaces) == []
    assert [pid for pid in pids if start_ticks(pid) is not None] == []
    assert lab.name not in Lab.names()
    lab.down()


def test_down_ends_processes_that_left_the_cgroup() -> None:
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
        assert process.wait(timeout=PATIENCE_S) != 0
        assert process.stdout is not None
        process.stdout.close()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert traces(lab) == []


def test_two_labs_run_side_by_side() -> None:
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


def test_lab_survives_killed_holders_and_daemons() -> None:
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
        lab.up(["node-1"])  # removes the remains first
        assert lab.nodes == ("node-1",)
        (lab.layout.run / "record.json").write_text("{")
    finally:
        lab.down()
    assert traces(lab) == []


@pytest.mark.parametrize("who", [SWITCH, "up"])
def test_up_killed_half_way_can_be_cleaned_up(who: str) -> None:
    """Killed is either `up` itself, which hangs because its daemons never answer, or the process that holds the switch."""
    lab = make("half")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        started = Path(folder, "started")
        os.mkfifo(started)
        daemon = ("sh", "-c", f"echo started > {started}; exec sleep 1000")
        timeout_s = PATIENCE_S if who == "up" else 5  # a killed switch is noticed only by the daemon's silence
        program = f"from migrator.lab import Lab; Lab({lab.name!r}, daemon={daemon!r}).up(['node-1'], {timeout_s=})"
        with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.PIPE) as up:
            assert started.read_text() == "started\n"
            record = lab.layout.load()
            assert record is not None
            os.kill(up.pid if who == "up" else record.holders[SWITCH].pid, signal.SIGKILL)
            up.communicate(timeout=PATIENCE_S)
        assert up.returncode == (-signal.SIGKILL if who == "up" else 1)
    assert not lab.cluster_path.exists(), "the lab must not look as if it were up"
    assert (traces(lab) != []) == (who == "up"), "only a killed `up` leaves something behind"
    lab.down()
    assert traces(lab) == []


def test_up_reports_why_a_daemon_does_not_start() -> None:
    lab = make("bad", daemon=("sh", "-c", "echo the port is on fire >&2; exit 1"))
    with pytest.raises(Unreachable, match="the port is on fire"):
        lab.up(["node-1"], timeout_s=PATIENCE_S)
    assert traces(lab) == []


def test_up_reports_a_daemon_that_never_answers() -> None:
    lab = make("mute", daemon=("sh", "-c", "echo thinking; exec sleep 1000"))
    with pytest.raises(Unreachable, match=r"(?s)node-1: .*refused.*thinking"):
        lab.up(["node-1"], timeout_s=5)
    assert traces(lab) == []


def test_daemon_below_tmp_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "daemon"
    program.touch()
    lab = make("hidden", daemon=(str(program),))
    with pytest.raises(Internal, match="not visible in a node"):
        lab.up(["node-1"])
    assert traces(lab) == []


@pytest.mark.parametrize(
    "nodes", [[], ["../x"], ["a", "a"], ["operator"], ["A"], ["x" * 25], [f"n{i}" for i in range(201)]]
)
def test_invalid_node_names_are_refused(nodes: list[str]) -> None:
    lab = make("names")
    with pytest.raises(Usage):
        lab.up(nodes)
    assert traces(lab) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "_switch", "x" * 25, "a\n"])
def test_invalid_lab_names_are_refused(name: str) -> None:
    with pytest.raises(Usage, match="name of a lab"):
        Lab(name)


def test_lab_that_is_not_up_is_reported() -> None:
    lab = make("absent")
    for act in (lambda: lab.nodes, lambda: lab.exec("node-1", ["true"]), lambda: lab.partition("a", "b")):
        with pytest.raises(NotFound, match="not up"):
            act()
    assert not (RUN / lab.name).exists()
    assert not (STATE / lab.name).exists()
