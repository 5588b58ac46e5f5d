"""The open descriptors of a process, whatever files it has open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.net import sockets
from snapshotd.preflight.objects import Kind, kind_of
from snapshotd.proc import fd

DEEP = """
import os, socket, sys
kept = socket.create_server(("127.0.0.1", 0))
for _ in range(30):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
deep = open("file", "w")
print(deep.fileno(), kept.fileno(), kept.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_file_with_too_long_a_path_hides_no_other_descriptor(tmp_path: Path) -> None:
    """Any user can have one open. A search of the whole node, as for the peers' sockets of a rank, must not fail for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEEP], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            deep, kept, port = map(int, process.stdout.readline().split())
            with pytest.raises(OSError, match="File name too long"):
                os.readlink(f"/proc/{process.pid}/fd/{deep}")
            links = {number: link for number, link, _ in fd.read_links(process.pid)}
            assert links[deep] == fd.TOO_LONG
            assert links[kept].startswith("socket:")
            assert kind_of(links[deep], None) is Kind.ANON, "a rank that has it is refused"
            assert [flow.local.port for flow in sockets.tree_flows([process.pid])] == [port]
        finally:
            process.kill()
    shutil.rmtree(tmp_path / ("d" * 200))
