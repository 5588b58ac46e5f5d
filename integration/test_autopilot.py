"""The autopilot in a lab: a node reports trouble, its rank moves by itself, and no step of the job is lost or done twice.

The alarms are raised by the node's daemon, which reads a line of the kernel's log. In a lab that log is a file.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.behaviour import end_chain
from integration.gpu_nodes import GpuCluster
from integration.harness import cluster, until
from integration.pilot import Pilot
from migrator.cluster import Cluster
from tests.autopilot.etcd_server import EtcdServer, must_be_installed
from tests.fakes.cuda_fake import gpus

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

POLICY = """
[[rules]]
name = "failing"
checks = ["host-mce", "gpu-xid"]
action = "move"

[breaker]
nodes_percent = 80
rank_window_s = 1
back_off_s = 1
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Pilot]:
    with cluster("pilot") as made:
        yield Pilot(made, POLICY)


@pytest.fixture
def pilot(lab: Pilot) -> Iterator[Pilot]:
    yield lab
    lab.reset()


def test_rank_leaves_a_failing_node_by_itself_and_returns_after_the_repair(pilot: Pilot) -> None:
    job = pilot.job()
    autopilot = pilot.nodes.lab.start_autopilot(pilot.policy)  # as `migrator lab up --autopilot` does
    pilot.state = pilot.nodes.lab.cluster_path.parent / "autopilot"
    pilot.sees_all()
    pilot.memory_fails("node-1")
    until("the rank to move", lambda: pilot.results() == ["moved"])
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("signal", "state", "intent", "result")[:4] == ["signal", "state", "intent", "result"]
    (one,) = pilot.verb("report")["interruptions"]
    assert (one["outcome"], one["cause_class"], one["target"]) == ("moved", "hardware", "spare-1")
    assert one["pause_s"] > 0

    answer = pilot.verb("return", "node-1")  # carried out by the autopilot
    assert (answer["state"], answer["summary"]) == ("returned", "1 rank moved")
    assert pilot.place(job) == ["node-1"]
    with urllib.request.urlopen(f"{autopilot.page}api/state", timeout=60) as answer:  # from outside of the lab
        assert {node["name"] for node in json.load(answer)["nodes"]} == {*pilot.nodes.lab.nodes}
    os.kill(autopilot.pid, signal.SIGTERM)
    until("the autopilot to stop", lambda: pilot.events("stop"))
    pilot.finish(job)


@pytest.mark.sampled(1, group="a killed autopilot")
def test_autopilot_killed_between_intent_and_move_does_nothing_twice(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    # The first step of a move waits: the intent is recorded, and nothing was done yet.
    pilot.nodes.fault("spare-1", "before-prepare", "wait")
    pilot.memory_fails("node-1")
    until("the first step", lambda: pilot.nodes.fired("spare-1"))
    pilot.kill()
    assert pilot.results() == ["intended"]
    (pilot.nodes.run_dir("spare-1") / "before-prepare.go").touch()
    assert pilot.place(job) == ["node-1"]

    pilot.start()
    until("the rank to move", lambda: pilot.results()[1:] == ["moved"])
    # Whether the target has journalled the first step depends on when it noticed that its caller is gone.
    assert pilot.results()[0] in ("never began", "undone")
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("intent", "result") == ["intent", "result"] * 2
    pilot.finish(job)


@pytest.mark.sampled(1, group="a killed autopilot")
def test_autopilot_killed_during_a_move_finds_out_how_it_ended(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    pilot.nodes.fault("spare-1", "before-activate", "wait")
    pilot.memory_fails("node-1")
    until("the commit", lambda: pilot.nodes.fired("spare-1"))
    pilot.kill()
    (pilot.nodes.run_dir("spare-1") / "before-activate.go").touch()

    pilot.start()
    until("the result", lambda: pilot.results() == ["moved"])
    assert pilot.place(job) == ["spare-1"]
    assert pilot.events("intent", "result") == ["intent", "result"]
    pilot.finish(job)


@pytest.mark.sampled(1, group="a killed autopilot")
def test_leader_killed_during_a_move_another_autopilot_settles_it(
    pilot: Pilot, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    must_be_installed(request)
    nodes = pilot.nodes
    network = Cluster.read(nodes.lab.cluster_path).netns
    assert network is not None
    etcd = EtcdServer(tmp_path / "etcd", inside=("nsenter", f"--net={network.path}"))
    etcd.start()
    leader, other = (Pilot(nodes, POLICY, "--etcd", etcd.url, state=f"state-{number}") for number in (1, 2))
    try:
        job = pilot.job()
        leader.start()
        other.start()
        nodes.fault("spare-1", "before-activate", "wait")
        leader.memory_fails("node-1")
        until("the commit", lambda: nodes.fired("spare-1"))
        until("the intent on the other one", lambda: other.results() == ["intended"])
        leader.kill()
        (nodes.run_dir("spare-1") / "before-activate.go").touch()
        until("the result", lambda: other.results() == ["moved"])
        assert other.place(job) == ["spare-1"]
        assert other.events("intent", "result") == ["intent", "result"]
        assert len(other.events("lead")) == 2

        assert other.verb("return", "node-1")["summary"] == "1 rank moved"
        leader.start()  # it stands by, and makes up for what it missed
        until("the first one to have the record", lambda: leader.results() == ["moved", "moved"])
        assert leader.verb("report", "verify") == other.verb("report", "verify")
        pilot.state = leader.state
        pilot.finish(job)
    finally:
        for one in (leader, other):
            one.kill()
            shutil.rmtree(one.state, ignore_errors=True)
        etcd.kill()


def test_without_a_spare_it_alerts_and_waits(pilot: Pilot) -> None:
    job = pilot.job()
    pilot.start()
    pilot.verb("taint", "spare-1")
    pilot.memory_fails("node-1")
    query = "SELECT text FROM alerts WHERE text LIKE '%no node can take it%'"
    until("the alert", lambda: pilot.rows(query))
    assert pilot.results() == []
    job.await_progress()
    pilot.verb("untaint", "spare-1")
    until("the rank to move", lambda: pilot.results() == ["moved"])
    pilot.finish(job)


@pytest.mark.sampled(1, group="many ranks and an autopilot")
def test_node_with_eight_ranks_of_four_jobs_is_drained_with_one_summary(pilot: Pilot) -> None:
    jobs = [pilot.nodes.workload("node-1", "chain.py", job=f"night{n // 2}", rank=n % 2) for n in range(8)]
    for job in jobs:
        job.await_lines(5)
    pilot.start()
    answer = pilot.verb("drain", "node-1", "--reason", "a fan")
    assert (answer["complete"], answer["state"], answer["summary"]) == (True, "drained", "8 ranks moved")
    assert {(move["target"], move["state"]) for move in answer["moves"]} == {("spare-1", "moved")}
    # Ranks of different jobs were on their way at the same time, and those of one job never.
    spans = [(move["job"], move["intended_unix_s"], move["ended_unix_s"]) for move in answer["moves"]]
    together = [a[0] == b[0] for a, b in itertools.combinations(spans, 2) if a[1] < b[2] and b[1] < a[2]]
    assert together
    assert not any(together)
    for job in jobs:
        end_chain(job)
    assert pilot.verb("report", "verify")["valid"]


@pytest.fixture
def gpu_pilot(fake_gpu_lab: GpuCluster) -> Iterator[Pilot]:
    made = Pilot(fake_gpu_lab.cluster, POLICY)
    yield made
    made.reset()
    fake_gpu_lab.reset()


def test_rank_leaves_a_failing_gpu_for_a_node_whose_gpu_is_free(fake_gpu_lab: GpuCluster, gpu_pilot: Pilot) -> None:
    lab, pilot = fake_gpu_lab, gpu_pilot
    job, other = lab.job("node-1"), lab.job("spare-1")
    for one in (job, other):
        one.await_lines(5)
    pilot.start()
    pilot.kernel_says("node-1", "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', GPU has fallen off the bus.")
    query = "SELECT text FROM alerts WHERE text LIKE '%no node can take it%'"
    until("the alert", lambda: pilot.rows(query))
    # A node's GPUs are read every second: the autopilot may not know yet that this one is in use, and is refused.
    assert set(pilot.results()) <= {"refused"}
    other.kill()
    until("the rank to move", lambda: pilot.results()[-1:] == ["moved"])
    assert pilot.place(job) == ["spare-1"]
    lab.ends_well(job)


@pytest.mark.timeout(900)
@pytest.mark.sampled(1, group="many ranks and an autopilot")
def test_job_of_lower_priority_is_suspended_for_a_rank_and_resumed_elsewhere(
    fake_gpu_lab: GpuCluster, gpu_pilot: Pilot
) -> None:
    """Every node has one GPU, and all are in use. The autopilot is killed while it suspends, and while it resumes."""
    lab, pilot = fake_gpu_lab, gpu_pilot
    low, high, other = lab.job("spare-1"), lab.job("node-1"), lab.job("node-2")
    for job in (low, high, other):
        job.await_lines(5)
    until("all GPUs to be in use", lambda: all(lab.used_bytes(node) for node in lab.lab.nodes))
    jobs = "".join(f'[[jobs]]\njob = "{job.name}"\npriority = 10\n' for job in (high, other))
    pilot.policy.write_text(f'{POLICY}\n{jobs}\n[spares]\npreempt = "suspend"\nfloating = true\n')
    pilot.start()

    lab.cluster.fault("spare-1", "job-commit", "wait")
    pilot.kernel_says("node-1", "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', GPU has fallen off the bus.")
    until("the suspension to begin", lambda: lab.cluster.fired("spare-1"))
    pilot.kill()
    assert pilot.suspensions() == [(low.name, "suspending")]
    (lab.cluster.run_dir("spare-1") / "job-commit.go").touch()
    pilot.start()
    until("the rank to move", lambda: pilot.results()[-1:] == ["moved"])
    assert pilot.place(high) == ["spare-1"]
    assert pilot.suspensions()[-1] == (low.name, "suspended")
    alert = f"suspended to make room for rank 0 of {high.name} (priority 10 > 0); no node has room for rank 0"
    until("the alert", lambda: (alert,) in pilot.rows("SELECT text FROM alerts"))

    lab.cluster.fault("spare-1", "before-send", "wait")
    other.kill()
    until("the resumption to begin", lambda: lab.cluster.fired("spare-1"))
    pilot.kill()
    assert pilot.suspensions()[-1] == (low.name, "resuming")
    (lab.cluster.run_dir("spare-1") / "before-send.go").touch()
    pilot.start()
    until("the job to be resumed", lambda: pilot.suspensions()[-1] == (low.name, "resumed"))
    assert (pilot.place(low), pilot.place(high)) == (["node-2"], ["spare-1"])
    lab.ends_well(low, high)

    found = {one["job"].partition("/")[2]: one for one in pilot.verb("report")["interruptions"]}
    assert (found[high.name]["outcome"], found[high.name]["lost_s"]) == ("moved", 0)
    assert (found[low.name]["outcome"], found[low.name]["target"]) == ("suspended", "node-2")
    assert found[low.name]["lost_s"] > 0
    assert pilot.verb("report", "verify")["valid"]


@pytest.mark.sampled(1, group="many ranks and an autopilot")
def test_rank_of_lower_priority_makes_room_and_both_jobs_go_on(fake_gpu_lab: GpuCluster, gpu_pilot: Pilot) -> None:
    """Every node has two GPUs. The rank on node-1 uses both of them, and on the two others one is free.

    The last test of this file: afterwards nodes miss a GPU, and an alarm says so."""
    lab, pilot = fake_gpu_lab, gpu_pilot
    for node in lab.lab.nodes:
        lab.give(node, *gpus(node, count=2))
    until("the daemons to see them", lambda: all(len(lab.shown(node)["gpus"]) == 2 for node in lab.lab.nodes))
    low, high, other = lab.job("node-2"), lab.job("node-1", "--second-gpu"), lab.job("spare-1")
    for job in (low, high, other):
        job.await_lines(5)
    until("its GPUs to be seen", lambda: [len(rank["gpus"]) for rank in lab.cluster.ps(high)] == [2])
    jobs = f'[[jobs]]\njob = "{high.name}"\npriority = 10\n'
    pilot.policy.write_text(f'{POLICY}\n{jobs}\n[spares]\npreempt = "propose"\n')
    pilot.start()
    pilot.kernel_says("node-1", "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', GPU has fallen off the bus.")
    (proposal,) = until("the proposal", lambda: pilot.verb("proposals")["proposals"])
    assert proposal["what"].startswith(
        f"move rank 0 of {low.name} from node-2 to spare-1, and then rank 0 of {high.name}"
    )
    assert pilot.results() == []
    for job in (low, high):
        job.await_progress()
    pilot.verb("approve", str(proposal["id"]))
    until("both ranks to move", lambda: pilot.results() == ["moved", "moved"])
    assert (pilot.place(low), pilot.place(high)) == (["spare-1"], ["node-2"])
    (reason,) = pilot.rows("SELECT json_extract(data, '$.reason') FROM moves ORDER BY rowid LIMIT 1")
    assert reason[0].startswith(f"moved out of the way for rank 0 of {high.name} (priority 10 > 0)")
    lab.ends_well(low, high, other)
    assert pilot.verb("report", "verify")["valid"]
