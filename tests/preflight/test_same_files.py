"""Files that the target has already: the same content under another time, and caches that each node writes itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.preflight import objects
from snapshotd.preflight.digest import content_digest
from tests.preflight.test_target import carried_check, files_check, the_file


def test_carried_file_with_the_same_content_and_another_time_is_identical(tmp_path: Path) -> None:
    """Two nodes compiled the same thing, or got copies of it."""
    path, _, fact = the_file(tmp_path)
    content = path.read_bytes()
    with path.open("rb") as file:
        fact.digest = content_digest(file.fileno(), fact.size)
    os.utime(path, ns=(1, 1))
    assert carried_check(tmp_path, fact).verdict == Check.PASS
    path.write_bytes(content[:-1] + b"?")
    os.utime(path, ns=(2, 2))
    assert "a file of that name already exists" in carried_check(tmp_path, fact).reason
    fact.digest = b""  # there was no time for it
    path.write_bytes(content)
    assert "a file of that name already exists" in carried_check(tmp_path, fact).reason


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/var/lib/sss/mc/passwd", True),
        ("/var/cache/nscd/hosts", True),
        ("/var/run/nscd/group", True),
        ("/var/lib/sss/mc/../../x", False),
        ("/tmp/var/lib/sss/mc/passwd", False),
        ("/var/lib/sss/mc/passwd.so", False),
        ("/usr/lib/locale/locale-archive", False),
    ],
)
def test_caches_of_nodes_are_known_by_their_paths(path: str, is_one: bool) -> None:
    assert objects.is_node_cache(path) is is_one


def test_cache_of_the_node_may_have_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon of each node writes its own. A shorter one would end the rank: the mapping would have no pages."""
    path, report, fact = the_file(tmp_path)
    fact.mapped = True
    size = fact.size
    path.write_bytes(b"?" * (size + 10))
    assert "files that the rank uses differ" in files_check(report, fact).reason
    monkeypatch.setattr(objects, "_NODE_CACHE", re.compile(re.escape(str(path))))
    assert files_check(report, fact).verdict == Check.PASS
    path.write_bytes(b"?" * (size - 1))
    assert "files that the rank uses differ" in files_check(report, fact).reason
