"""A network process that outlives its daemon does not serve beside the next one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import Busy
from snapshotd.network import orphan
from snapshotd.proc.host import boot_id
from snapshotd.proc.tree import Process
from tests.daemon.test_main import Place, ended, place

__all__ = ["place"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")

OUTLIVES = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server, socket.socket(socket.AF_UNIX) as admin:
    admin.bind(sys.argv[2])
    admin.listen()
    print("ready", flush=True)
    while True:
        kept = server.accept()
"""


@contextlib.contextmanager
def outliving(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A process that listens where the daemon's network process does."""
    (place.folder / "run").mkdir(exist_ok=True)
    place.admin.unlink(missing_ok=True)
    argv = [sys.executable, "-c", OUTLIVES, str(place.port), str(place.admin)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


async def test_network_process_that_outlived_its_daemon_is_ended_before_the_next_listens(place: Place) -> None:
    with outliving(place) as process:
        orphan.record(place.folder / "run", process.pid)
        place.start()
        place.hear("READY=1")
        assert process.wait(20) == -signal.SIGKILL
        async with DaemonClient(f"unix:{place.admin}") as root:
            assert (await root.node.GetNode(pb.GetNodeRequest(), timeout_s=5)).name == "node-1"


def test_process_that_was_not_recorded_is_not_killed(place: Place) -> None:
    """It has the pid of a former network process. The daemon does not start beside it."""
    with outliving(place) as process:
        recorded = place.folder / "run" / "network.pid"
        for start_ticks, boot in ((1, boot_id()), (Process.of(process.pid).start_ticks, "another boot")):
            recorded.write_text(json.dumps([process.pid, start_ticks, boot]))
            status, _, err = ended(place.start())
            assert status == Busy.exit_code, err
            assert f"another process listens on {place.admin}" in err
            assert process.poll() is None
        recorded.write_text("damaged")
        assert ended(place.start())[0] == Busy.exit_code
