"""`migrator watch`: one frame, the same as JSON, and the live view in a real terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

from migrator.autopilot.database import FILE
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreachable, Usage
from tests.autopilot.conftest import NODES, PilotCluster, until
from tests.cli.conftest import MOVE, Migrator, a_rank, a_record


def test_one_frame_shows_moves_alarms_and_nodes_in_trouble_first(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks += [a_rank("node-1", 0), a_rank("node-1", 1)]
    pilots["node-1"].moves.append(a_record("source"))
    pilots["node-3"].raise_alarm("gpu-pcie", severity=pb.WARNING)
    pilots["node-3"].raise_alarm()
    migrator("taint", "spare-2", "--reason", "a fan")
    lines = [line.split() for line in migrator("watch", "--once").out.splitlines()]
    first = [line[0] if line else "" for line in lines]
    assert " ".join(lines[0]).endswith("5 nodes (4 healthy, 1 tainted), 2 ranks")
    assert lines[first.index(MOVE)][1:5] == ["train", "1", "node-1", "spare-1"]
    assert first.index("gpu-ecc") < first.index("gpu-pcie")  # the more severe one
    assert lines[first.index("gpu-ecc")][1:4] == ["node-3", "host", "critical"]
    at = first.index("NODE")
    assert first[at + 1 :] == ["node-3", "spare-2", "node-1", "node-2", "spare-1"]
    assert lines[at + 2] == ["spare-2", "tainted", "0", "-", "a", "fan"]


def test_json_has_the_same(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots["node-1"].ranks.append(a_rank("node-1"))
    pilots["node-1"].raise_alarm()
    pilots.stop("node-2")
    found = migrator("watch", "--once", "--json").json
    assert [node["name"] for node in found["nodes"]] == list(NODES)
    states = {node["name"]: (node["state"], node["ranks"]) for node in found["nodes"]}
    assert (states["node-1"], states["node-2"]) == (("up", 1), ("silent", 0))
    assert [(alarm["node"], alarm["severity"]) for alarm in found["alarms"]] == [("node-1", "critical")]
    assert [node["node"] for node in found["unreachable"]] == ["node-2"]


def test_watching_makes_no_state(pilots: PilotCluster, migrator: Migrator, tmp_path: Path) -> None:
    assert "no alarms" in migrator("watch", "--once").out
    assert not (tmp_path / "state" / FILE).exists()
    migrator("taint", "node-1")
    pilots["node-1"].raise_alarm()
    before = migrator("report", "verify", "--json").json
    assert migrator("watch", "--once").code == 0
    assert migrator("report", "verify", "--json").json == before


def test_a_cluster_that_does_not_answer_is_an_error_only_once(pilots: PilotCluster, migrator: Migrator) -> None:
    pilots.stop(*NODES)
    assert migrator("watch", "--once").code == Unreachable.exit_code


def test_a_live_view_needs_a_terminal(pilots: PilotCluster, migrator: Migrator) -> None:
    assert migrator("watch").code == Usage.exit_code
    assert migrator("watch", "--json").code == Usage.exit_code


def test_live_view_follows_the_cluster_and_ends_with_ctrl_c(pilots: PilotCluster) -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end was closed
                return
            shown.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    command = [sys.executable, "-m", "migrator.cli", "watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        reader.start()
        try:
            until("the first frame", lambda: b"spare-2" in shown)
            assert b"gpu-ecc" not in shown
            pilots["node-1"].raise_alarm()
            until("the alarm", lambda: b"gpu-ecc" in shown)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    reader.join(60)
    os.close(ours)
    assert b"\x1b[?1049h" in shown
    assert shown.rfind(b"\x1b[?1049l") > shown.rfind(b"\x1b[?1049h")  # the terminal is as before
    assert b"Traceback" not in shown
