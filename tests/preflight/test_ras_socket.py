"""The socket of NCCL's RAS does not move: it is closed before the freeze, and every node may have one at the same port."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.moves.peers import connections
from snapshotd.net.places import Places
from tests.preflight.conftest import Starter

PORT = 28029  # the port of NCCL's default may be taken
LISTEN = f"import socket; s = socket.socket(); s.bind(('127.0.0.1', {PORT})); s.listen()"


@pytest.mark.parametrize(
    ("loads", "environment", "moves"),
    [
        (True, {"NCCL_RAS_ADDR": f"localhost:{PORT}", "NCCL_RAS_ENABLE": "1"}, False),
        (True, {"NCCL_RAS_ADDR": f"localhost:{PORT}", "NCCL_RAS_ENABLE": "0"}, True),
        (True, {"NCCL_RAS_ENABLE": "1"}, True),  # at another port
        (False, {"NCCL_RAS_ADDR": f"localhost:{PORT}", "NCCL_RAS_ENABLE": "1"}, True),
    ],
)
def test_only_the_socket_of_ras_is_left_out(
    rank: Starter,
    tmp_path: Path,
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    loads: bool,
    environment: dict[str, str],
    moves: bool,
) -> None:
    library = tmp_path / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    child = rank(f"ctypes.CDLL('{library}'); {LISTEN}" if loads else LISTEN)
    places = Places({"node-1": [], "node-2": []}, "node-1", "node-2")
    rewires, _ = connections.look(child.pids, places)
    assert [rewire.old_local.port for rewire in rewires if rewire.kind == pb.Rewire.LISTENER] == [PORT] * moves
    whole, _ = connections.frozen(child.pids, places)
    assert [rewire.old_local.port for rewire in whole] == [PORT]  # what is still there at the freeze moves
