"""Labs whose daemon is a fake that only answers GetNode over mutual TLS, for the tests of the lab itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration.harness import PATIENCE_S
from migrator.lab import Lab

REPOSITORY = Path(__file__).parents[1]

STAND_IN = """
import asyncio, grpc, pathlib, sys, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[2]).read_text())
ca, cert, key = (pathlib.Path(config["tls"][name]).read_bytes() for name in ("ca", "cert", "key"))
async def get_node(request, context): return b""
async def main():
    server = grpc.aio.server()
    calls = {"GetNode": grpc.unary_unary_rpc_method_handler(get_node)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("snapshotd.v1.Node", calls),))
    server.add_secure_port(config["listen"], grpc.ssl_server_credentials([(key, cert)], ca, True))
    await server.start()
    print("serving", config["node"], flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""
DAEMON = (sys.executable, "-c", STAND_IN)
LAUNCHER = (sys.executable, "-c", "import os, sys; os.execvp(sys.argv[4], sys.argv[4:])")  # --job JOB -- CMD


def make(name: str, **options: Any) -> Lab:
    return Lab(f"test-{name}-{os.getpid() % 100000}", **{"daemon": DAEMON, "launcher": LAUNCHER, **options})


def output(lab: Lab, node: str, *argv: str, **options: Any) -> str:
    with lab.spawn(node, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options) as child:
        text, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, text
    return str(text).strip()


def probe(lab: Lab, *nodes: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Asks daemons as the operator; a daemon that does not answer costs `timeout_s`."""
    argv = [sys.executable, "-m", "migrator.lab.probe", str(lab.cluster_path), str(timeout_s), *nodes]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s + PATIENCE_S)
