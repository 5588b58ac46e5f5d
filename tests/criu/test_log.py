"""Which lines of criu's log are quoted in an error."""

from __future__ import annotations

from pathlib import Path

from snapshotd.criu.log import excerpt

LOG = """(00.000001) Version: 4.2.1
(00.000002) Error (criu/util.c:1): Can't set RLIMIT_NOFILE: Operation not permitted
(00.000003) Dumping task 7
(00.000004) Dumping fd 5
(00.000005) Error (criu/files.c:2): Can't dump device /dev/odd
(00.000006) Unlock network
"""


def test_errors_are_quoted_with_preceding_lines_except_the_harmless_one(tmp_path: Path) -> None:
    path = tmp_path / "dump.log"
    path.write_text(LOG)
    result = excerpt(path)
    assert result.splitlines() == [
        "  criu: (00.000003) Dumping task 7",
        "  criu: (00.000004) Dumping fd 5",
        "  criu: (00.000005) Error (criu/files.c:2): Can't dump device /dev/odd",
    ]


def test_missing_log_gives_an_empty_excerpt(tmp_path: Path) -> None:
    assert excerpt(tmp_path / "none") == ""
