"""A job with idle connections of an HTTP pool moves; the pool then connects again, as after any idle time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from integration.harness import Cluster, until

PROGRAM = Path(__file__).parent / "programs" / "http_pool.py"
#: The address of the lab's operator, who runs no daemon.
OUTSIDE = "10.213.0.1:7010"


def test_connection_that_the_server_has_closed_does_not_stop_a_move(nodes: Cluster) -> None:
    go = nodes.folder / "go"
    go.unlink(missing_ok=True)
    command = [sys.executable, str(PROGRAM), OUTSIDE]
    server = nodes.lab.spawn("operator", [*command, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "READY\n"
        rank = nodes.start("node-1", [*command, "--go", str(go)])
        until("the first answer", lambda: "answer word" in rank.text())
        rank.await_progress()
        for to in ("spare-1", "node-2"):
            nodes.move(rank, to)
            rank.await_progress()
        go.touch()
        assert rank.finish() == 0, rank.text()[-500:]
        lines = [line for line in rank.lines() if not line.startswith("step")]
        assert (lines[0], lines[-2:]) == ("answer word", ["answer word", "DONE"])
    finally:
        server.kill()
        server.communicate()
