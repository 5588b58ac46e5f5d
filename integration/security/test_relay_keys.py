"""A node that had a rank, or was the target of an undone move, cannot take over the rank's output later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.behaviour import AWAY, HOME, THIRD, end_chain
from integration.harness import Cluster, Job, until
from integration.security.test_forged_images import endpoint, run
from snapshotd.api.errors import Undone

pytestmark = pytest.mark.root


def recorded(nodes: Cluster, job: Job, node: str, role: str = "guest") -> dict[str, Any]:
    """What the daemon of this node has recorded about the rank."""
    (rank,) = nodes.ps(job)
    stored: dict[str, Any] = json.loads(
        (nodes.lab.layout.state / node / f"ranks/{rank['uid']}.{role}.json").read_text()
    )
    return stored


def steal(nodes: Cluster, tmp_path: Path, thief: str, uid: str, *keys: str) -> str:
    metadata = {"rank-uid": uid, "relay-key": " ".join(keys), "relay-next": "e" * 32}
    settings = {"endpoint": endpoint(nodes, HOME), "home": HOME, "metadata": metadata}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**settings, "node": str(nodes.lab.layout.node(thief))}))
    return str(run(nodes, "-m", "integration.security.relay_thief", str(path))["refused"])


def holds(nodes: Cluster, job: Job, node: str) -> bool:
    """Whether the home node accepts this node's key, and this node knows that."""
    here = recorded(nodes, job, node)
    return not here["former_keys"] and recorded(nodes, job, HOME, "home")["holder_key"] == here["own_key"]


@pytest.mark.sampled(1, group="relay keys")
def test_node_that_had_the_rank_cannot_take_over_its_output(nodes: Cluster, tmp_path: Path) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    nodes.move(job, AWAY)
    until("the key of the first node", lambda: holds(nodes, job, AWAY))
    known = recorded(nodes, job, AWAY)
    nodes.move(job, THIRD)
    until("the key of the second node", lambda: holds(nodes, job, THIRD))
    for keys in ([known["own_key"]], [known["relay_key"]], [known["own_key"], known["relay_key"]]):
        assert steal(nodes, tmp_path, AWAY, known["uid"], *keys) == "denied"
    job.await_progress(5)
    end_chain(job)


@pytest.mark.sampled(1, group="relay keys")
def test_target_of_an_undone_move_has_no_valid_key(nodes: Cluster, tmp_path: Path) -> None:
    job = nodes.workload(HOME, "chain.py")
    job.await_lines(5)
    nodes.move(job, AWAY)
    until("the key of the first node", lambda: holds(nodes, job, AWAY))
    sent = recorded(nodes, job, AWAY)["own_key"]  # what the image of the next move contains
    nodes.fault(THIRD, "before-restore", "fail")
    nodes.move(job, THIRD, expect=Undone.exit_code)
    until("another key of the first node", lambda: recorded(nodes, job, AWAY)["own_key"] != sent)
    until("that it is the valid one", lambda: holds(nodes, job, AWAY))
    assert steal(nodes, tmp_path, THIRD, recorded(nodes, job, AWAY)["uid"], sent) == "denied"
    nodes.move(job, THIRD)  # and the rank moves on with it
    job.await_progress(5)
    nodes.lab.kill_daemon(HOME)
    nodes.lab.start_daemon(HOME)
    job.await_progress(5)
    end_chain(job)
