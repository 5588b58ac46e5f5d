"""What `make package` builds: the same bytes twice, with version, commit and date, and no error that lintian finds."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from snapshotd import __version__

ROOT = Path(__file__).parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if not request.config.getoption("--whole"):
        pytest.skip("two builds of the packages take minutes: make test-all")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git here")
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in (first, second):
        done = subprocess.run([ROOT / "tools" / "package", "--python", PYTHON, folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return first, second


def test_two_builds_have_the_same_bytes(builds: tuple[Path, Path]) -> None:
    first, second = ({file.name: _digest(file) for file in folder.iterdir()} for folder in builds)
    assert [name.split("_")[0] for name in sorted(first)] == ["migrator", "snapshot", "snapshotd"]
    assert first == second


def test_packages_name_version_commit_and_date(builds: tuple[Path, Path]) -> None:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    (wheel,) = builds[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        facts = json.loads(archive.read("snapshotd/build.json"))
        assert "shim/lib/libsnapshim.so" in archive.namelist()
    assert facts["commit"] == commit
    for name in ("snapshotd", "migrator"):
        (package,) = builds[0].glob(f"{name}_*.deb")
        assert _output("dpkg-deb", "--field", str(package), "Version").strip() == __version__
        shown = _output(
            "sh", "-c", f'dpkg-deb --fsys-tarfile "$0" | tar -xO ./usr/share/doc/{name}/BUILD', str(package)
        )
        assert shown.splitlines() == [f"version {__version__}", f"commit {commit}", f"date {facts['date']}"]


@pytest.mark.parametrize("other", ["x86_64", "aarch64"])
def test_a_wheel_of_another_architecture_or_a_newer_glibc_is_refused(
    builds: tuple[Path, Path], tmp_path: Path, other: str
) -> None:
    """pip reads both in the name: that of the other architecture, and on this one a glibc that no system has yet."""
    (wheel,) = builds[0].glob("*.whl")
    own = platform.machine()
    name = wheel.name.replace("manylinux_2_", "manylinux_9_") if other == own else wheel.name.replace(own, other)
    assert name != wheel.name
    shutil.copy(wheel, tmp_path / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{name} is not a supported wheel on this platform" in done.stderr


def test_lintian_finds_no_error(builds: tuple[Path, Path]) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("no lintian: apt-get install lintian")
    for package in sorted(builds[0].glob("*.deb")):
        done = subprocess.run(["lintian", "--allow-root", "--fail-on=error", package], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
