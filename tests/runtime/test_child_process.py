"""Children of the daemon find its packages, also where only its own PYTHONPATH leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.runtime.child_process import start

PROGRAM = """
import os, socket
import snapshotd.runtime
socket.socket(fileno=0).send(b"PYTHONPATH" in os.environb and b"found")
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "module_elsewhere.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_child_with_site_packages_finds_what_the_daemon_finds(elsewhere: Path) -> None:
    child = start("module_elsewhere", site_packages=True)
    assert child.line.recv(16) == b"found", child.last_output()
    child.end()


def test_child_without_site_packages_finds_the_daemons_own_code_only(elsewhere: Path) -> None:
    child = start("module_elsewhere")
    child.process.wait(60)
    assert "No module named module_elsewhere" in child.last_output()
    child.end()
