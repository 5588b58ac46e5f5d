"""The generated gRPC code is committed; it has to be what proto/*.proto say today."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "snapshotd/api"


def gen_proto(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/gen-proto"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the committed code, to be spoilt."""
    for path in API.glob("*_pb2*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def test_the_committed_code_is_current() -> None:
    checked = gen_proto("--check")
    assert checked.returncode == 0, checked.stderr


def test_there_is_code_and_types_for_every_source() -> None:
    for source in (ROOT / "proto").glob("*.proto"):
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert (API / f"{source.stem}{suffix}").is_file()


def test_generated_modules_import_each_other_by_their_full_names() -> None:
    for path in API.glob("*_pb2*.py*"):
        bare = [line for line in path.read_text().splitlines() if line.startswith("import ") and "_pb2" in line]
        assert not bare, f"{path.name}: {bare}"


def test_an_edit_is_noticed_and_named(copy: Path) -> None:
    victim = next(iter(copy.glob("*_pb2.py")))
    victim.write_text(victim.read_text() + "# edited\n")
    checked = gen_proto("--check", "--out", copy)
    assert checked.returncode == 1
    assert victim.name in checked.stderr


def test_what_lost_its_source_is_noticed_and_removed(copy: Path) -> None:
    orphan = copy / "gone_pb2.py"
    orphan.write_text("")
    assert orphan.name in gen_proto("--check", "--out", copy).stderr
    assert gen_proto("--out", copy).returncode == 0
    assert not orphan.exists()
    assert gen_proto("--check", "--out", copy).returncode == 0


def test_what_is_current_is_not_written_again(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert gen_proto("--out", copy).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before
