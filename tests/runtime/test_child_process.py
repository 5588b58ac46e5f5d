"""Children of the daemon find its packages, also where only its own PYTHONPATH leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.runtime.child_process import Spares, start

PROGRAM = """
import os, socket
import snapshotd.runtime
line = socket.socket(fileno=0)
line.send(b"PYTHONPATH" in os.environb and b"found")
line.recv(1)
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


def test_children_that_were_not_needed_are_ended(elsewhere: Path) -> None:
    spares = Spares("module_elsewhere", most=3, site_packages=True)
    spares.fill(3)
    waiting = list(spares._started)
    spares.trim(1)
    assert [child.process.poll() is None for child in waiting] == [False, False, True]
    assert spares.take() is waiting[2]
    waiting[2].end()
