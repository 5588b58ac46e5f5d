"""tools/run-tests: what fails once is named, what fails twice fails, and many failures are not run again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("case", [{cases}])
def test_unsteady(case):
    seen = pathlib.Path(f"{{case}}.seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError

@pytest.mark.skipif({steady}, reason="steady")
def test_broken():
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("cases", "steady", "status", "said"),
    [
        ("1, 'a b'", True, 0, "UNSTEADY"),
        ("1", False, 1, "once more"),
        ("1, 2, 3, 4", True, 1, ""),
        ("", True, 0, ""),
    ],
)
def test_what_is_run_again(tmp_path: Path, cases: str, steady: bool, status: int, said: str) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "run-tests", tmp_path / "tools")
    (tmp_path / ".venv").symlink_to(REPOSITORY / ".venv")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(cases=cases, steady=steady))
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        [tmp_path / "tools" / "run-tests", "test_it.py", "-p", "no:asyncio"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    for word in ("once more", "UNSTEADY"):
        assert (word in done.stdout) == (word in said or (word == "once more" and said == "UNSTEADY")), done.stdout
    if said == "UNSTEADY":
        assert done.stdout.endswith("  test_it.py::test_unsteady[1]\n  test_it.py::test_unsteady[a b]\n")
