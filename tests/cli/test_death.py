"""`migrator recover --source-is-dead`: what every route shows is reported, and a fencing program can make it true."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from snapshotd.api import signs_of_life
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import WrongState
from tests.cli.conftest import MOVE, Migrator, changes
from tests.cli.fake_daemon import FakeCluster

DECLARE = ("recover", MOVE, "--source-is-dead", "--yes")


def fence_with(cluster: FakeCluster, folder: Path, script: str) -> Path:
    """Has the cluster fence nodes with a shell script; returns the file in which that notes its arguments."""
    program, notes = folder / "fence", folder / "fenced"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n{script}\n')
    program.chmod(0o755)
    cluster.path.write_text(f'fence = ["{program}", "--off"]\n{cluster.path.read_text()}')
    return notes


def test_what_every_route_shows_is_reported(halfway: FakeCluster, migrator: Migrator) -> None:
    halfway.stop("node-1")
    ran = migrator(*DECLARE)
    assert ran.code == 0
    for node in ("node-2", "spare-1"):
        assert f"node-1, from {node}: its daemon does not answer" in ran.err
        (asked,) = [request for method, request in halfway[node].asked if method == "FindNode"]
        assert asked.name == "node-1"


def test_daemon_that_answers_another_node_cannot_be_declared_dead(
    halfway: FakeCluster,
    migrator: Migrator,
) -> None:
    halfway.stop("node-1")
    halfway["node-2"].finds = pb.FindNodeReply(daemon_answers=True, found="its daemon answers")
    ran = migrator(*DECLARE)
    assert ran.code == WrongState.exit_code
    assert "snapshotd on node-1 answers node-2: it is not dead, but cut off from here" in ran.err
    assert changes(halfway) == {}


def test_node_is_fenced_before_it_is_declared_dead(
    halfway: FakeCluster,
    migrator: Migrator,
    tmp_path: Path,
) -> None:
    notes = fence_with(halfway, tmp_path, "exit 0")
    halfway.stop("node-1")
    ran = migrator(*DECLARE, "--json")
    assert ran.code == 0
    assert notes.read_text() == "--off node-1\n"
    assert ran.json["moves"][0]["did"][0].startswith("node-1 was fenced by ")
    assert changes(halfway) == {"spare-1": ["DeclareSourceDead"]}


@pytest.mark.parametrize("seen", [False, True])
def test_node_that_is_not_fenced_is_not_declared_dead(
    halfway: FakeCluster,
    migrator: Migrator,
    tmp_path: Path,
    seen: bool,
) -> None:
    """The program fails, or it lies: the daemon still answers another node."""
    fence_with(halfway, tmp_path, "exit 0" if seen else "echo no power switch; exit 3")
    halfway.stop("node-1")
    halfway["node-2"].finds = pb.FindNodeReply(daemon_answers=seen, found="")
    ran = migrator(*DECLARE)
    assert ran.code == WrongState.exit_code
    assert ("it is not dead" if seen else "exit status 3: no power switch") in ran.err
    assert changes(halfway) == {}


@pytest.mark.parametrize("why", ["it has no part in the move", "the move has ended", "the move is committed"])
def test_node_that_a_move_does_not_wait_for_is_not_fenced(
    halfway: FakeCluster, migrator: Migrator, tmp_path: Path, why: str
) -> None:
    """Its daemon does not answer this operator, but the node may be alive and have other jobs."""
    notes = fence_with(halfway, tmp_path, "exit 0")
    halfway.stop("node-2")
    halfway["spare-1"].finds = pb.FindNodeReply(daemon_answers=True, found="its daemon answers")
    source = halfway["node-1"]
    if why == "the move has ended":
        source.moves[0].mark, source.moves[0].outcome, source.moves[0].ended_unix_s = "settled", pb.ABORT, 2000.0
    else:
        source.failures["DeclareMemberDead, only checked"] = WrongState(why)
    ran = migrator("recover", MOVE, "--member-is-dead", "node-2", "--yes")
    assert ran.code == WrongState.exit_code
    assert ("has ended" if why == "the move has ended" else why) in ran.err
    assert not notes.exists()
    assert changes(halfway) == {}


def test_member_is_fenced_after_the_source_has_agreed(halfway: FakeCluster, migrator: Migrator, tmp_path: Path) -> None:
    notes = fence_with(halfway, tmp_path, "exit 0")
    halfway.stop("node-2")
    halfway["node-1"].moves[0].outcome = pb.ABORT
    assert migrator("recover", MOVE, "--member-is-dead", "node-2", "--yes").code == 0
    assert notes.read_text() == "--off node-2\n"
    assert changes(halfway) == {"node-1": ["DeclareMemberDead"]}


def test_signs_of_life_of_this_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = signs_of_life.look(f"127.0.0.1:{server.getsockname()[1]}")
        assert (found.alive, "its port accepts connections" in found.words) == (True, True)
    assert signs_of_life.look("[::1]:1").alive
    unresolved = signs_of_life.look("no.such.host.invalid:1")
    assert not unresolved.alive
    assert "cannot be resolved" in unresolved.words
