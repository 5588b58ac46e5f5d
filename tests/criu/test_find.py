"""Tests which CRIU a node uses."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from snapshotd.api.errors import BadConfig
from snapshotd.criu.find import find_criu
from tests.daemon.test_config import fake_criu


def test_configured_criu_is_used(tmp_path: Path) -> None:
    program = fake_criu(tmp_path, "4.10")
    assert find_criu(str(program)) == (str(program), "4.10")


def test_configured_criu_that_is_too_old_is_refused(tmp_path: Path) -> None:
    program = fake_criu(tmp_path, "4.1.1")
    with pytest.raises(BadConfig, match=r"is CRIU 4\.1\.1; 4\.2 or newer is needed"):
        find_criu(str(program))


def test_criu_from_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_criu(tmp_path)
    monkeypatch.setenv("SNAPSHOT_CRIU", str(program))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_criu(None) == (str(program), "4.2.1")


def test_criu_on_the_path_that_is_too_old_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "checkout"
    (new / ".criu").mkdir(parents=True)
    old.mkdir()
    fake_criu(old, "3.17.1")
    good = fake_criu(new / ".criu")
    monkeypatch.delenv("SNAPSHOT_CRIU", raising=False)
    monkeypatch.setenv("PATH", f"{old}:{os.environ['PATH']}")
    monkeypatch.setattr("snapshotd.criu.find.PRIVATE", (tmp_path / "none", good))
    assert find_criu(None) == (str(good), "4.2.1")
    monkeypatch.setattr("snapshotd.criu.find.PRIVATE", ())
    with pytest.raises(BadConfig, match=rf"no CRIU 4\.2 or newer was found .*found: {old}/criu is CRIU 3\.17\.1"):
        find_criu(None)


def test_program_that_is_not_a_runnable_criu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot be run: No such file"):
        find_criu(str(tmp_path / "none"))
    program = fake_criu(tmp_path)
    program.chmod(stat.S_IRUSR)
    with pytest.raises(BadConfig, match="cannot be run: Permission denied"):
        find_criu(str(program))
    with pytest.raises(BadConfig, match="is not CRIU"):
        find_criu("/bin/true")
    with pytest.raises(BadConfig, match="is not CRIU"):
        find_criu(str(fake_criu(tmp_path, exit_status=1)))
