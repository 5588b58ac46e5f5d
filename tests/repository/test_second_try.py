"""tools/test: a test that fails beside others gets a second try alone, and is not forgotten if it passes then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONCE = """
import pathlib
def test_once():
    with pathlib.Path("tries").open("a+") as tries:
        tries.write("x")
        assert tries.tell() > 1
"""


def run(folder: Path, **tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "cases").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in tests.items():
        (folder / "cases" / f"test_{name}.py").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [ROOT / "tools/test", "cases"],
        cwd=folder,
        env=kept | {"PYTHON": sys.executable, "WORKERS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_what_passes_runs_once(tmp_path: Path) -> None:
    done = run(tmp_path, good="def test_good(): open('tries', 'a').write('x')")
    assert done.returncode == 0, done.stdout
    assert "UNSTEADY" not in done.stdout
    assert (tmp_path / "tries").read_text() == "x"


def test_what_fails_once_is_listed(tmp_path: Path) -> None:
    done = run(tmp_path, once=ONCE, good="def test_good(): open('good', 'a').write('x')")
    assert done.returncode == 0, done.stdout
    assert "assert 1 > 1" in done.stdout
    assert done.stdout.rstrip().endswith("Find out why:\n  cases/test_once.py::test_once")
    assert (tmp_path / "tries").read_text() == "xx"
    assert (tmp_path / "good").read_text() == "x"


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    done = run(tmp_path, bad="def test_bad(): assert 0", once=ONCE)
    assert done.returncode == 1, done.stdout
    assert "UNSTEADY" not in done.stdout


def test_many_failures_get_no_second_try(tmp_path: Path) -> None:
    done = run(tmp_path, **{f"bad{number}": ONCE.replace("tries", f"tries{number}") for number in range(4)})
    assert done.returncode == 1, done.stdout
    assert [(tmp_path / f"tries{number}").read_text() for number in range(4)] == ["x"] * 4


@pytest.mark.parametrize("text", ["def broken(", "import no_such_module"])
def test_file_that_cannot_be_imported_fails(tmp_path: Path, text: str) -> None:
    done = run(tmp_path, broken=text)
    assert done.returncode not in (0, 5), done.stdout
    assert "UNSTEADY" not in done.stdout
