"""Triton's cache is where it moves with the rank, unless all nodes share it or the user has chosen a place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from migrator.cli import caches, launchers


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caches, "_PLACE", str(tmp_path))
    return tmp_path / f"triton_{os.geteuid()}"


def test_cache_of_a_local_home_directory_moves_with_the_rank(place: Path, tmp_path: Path) -> None:
    assert caches.is_local(tmp_path)
    for _ in range(2):  # it may be there already
        assert launchers.rank_environment({"HOME": str(tmp_path)})[caches.TRITON_VARIABLE] == str(place)
    assert place.stat().st_mode & 0o777 == 0o700


def test_shared_home_directory_keeps_the_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not caches.is_local(Path("/proc"))  # of no kind that is known to be on a disk of the node
    assert caches.presets({"HOME": "/proc"}) == {}
    assert caches.presets({"HOME": "/no/such"}) == {}
    assert caches.presets({}) == {}
    assert not place.exists()


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_choice_of_the_user_stays(place: Path, tmp_path: Path, name: str) -> None:
    assert launchers.rank_environment({"HOME": str(tmp_path), name: "/mine"})[name] == "/mine"
    assert caches.presets({"HOME": str(tmp_path), name: "/mine"}) == {}


def test_directory_that_another_user_could_fill_is_not_used(place: Path, tmp_path: Path) -> None:
    """A cache has code."""
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    assert caches.presets({"HOME": str(tmp_path)}) == {}
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    assert caches.presets({"HOME": str(tmp_path)}) == {}
    place.chmod(0o755)
    assert caches.presets({"HOME": str(tmp_path)}) != {}
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
        assert caches.presets({"HOME": str(tmp_path)}) == {}
