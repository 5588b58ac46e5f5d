"""The version that programs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd import __version__
from snapshotd.api import version


def test_an_installed_build_names_commit_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "build.json"
    facts.write_text('{"commit": "0123456789abcdef0123456789abcdef01234567", "date": "2026-11-16"}\n')
    monkeypatch.setattr(version, "_BUILD", facts)
    assert version.described() == f"{__version__} (commit 0123456789ab, built 2026-11-16)"


@pytest.mark.parametrize("content", [None, "", "{}", '{"commit": "0123456789ab"'])
def test_without_facts_of_the_build_the_version_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    facts = tmp_path / "build.json"
    if content is not None:
        facts.write_text(content)
    monkeypatch.setattr(version, "_BUILD", facts)
    assert version.described() == __version__
