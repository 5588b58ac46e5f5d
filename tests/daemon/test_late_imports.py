"""The network process must work although its user cannot read the program: a checkout below /root, say."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient
from tests.daemon.test_main import Place, ended, place  # noqa: F401
from tests.served import Certificates

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a daemon that gives up its user")

#: Reports every module that is searched for once the process is no longer root's.
HOOK = """
import os, sys
def hook(event, arguments):
    if event == "import" and os.getuid() != 0:
        os.write(2, f"late import: {arguments[0]}\\n".encode())
sys.addaudithook(hook)
"""


async def test_nothing_is_imported_without_privileges(place: Place, certificates: Certificates, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    process = place.start(PYTHONPATH=str(tmp_path))
    place.hear("READY=1")
    async with DaemonClient(f"unix:{place.admin}") as root:
        await root.node.GetNode(pb.GetNodeRequest(), timeout_s=60)
    async with DaemonClient(f"127.0.0.1:{place.port}", credentials=certificates.operator, node="node-1") as operator:
        await operator.node.GetNode(pb.GetNodeRequest(), timeout_s=60)
    with socket.create_connection(("127.0.0.1", place.metrics_port), 60) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert scraper.recv(15) == b"HTTP/1.1 200 OK"
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 0, err
    assert "late import" not in err
