"""`migrator run` where the library of ranks is missing, damaged, or of another architecture or version."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from migrator.cli import run
from shim.keeper import library
from tests.installation import readable_copy

pytestmark = pytest.mark.skipif(
    not (library.FOLDER / library.OFFLOAD_LIBRARY).exists(), reason="the shim is not built: run `make setup`"
)


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    return readable_copy(tmp_path / "installation")


def lose(path: Path) -> None:
    path.unlink()


def make_foreign(path: Path) -> None:
    """Gives it the machine of the other architecture."""
    content = bytearray(path.read_bytes())
    (machine,) = struct.unpack_from("<H", content, 18)
    struct.pack_into("<H", content, 18, 183 if machine == 62 else 62)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def need_a_newer_libc(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\0GLIBC_2.", b"\0GLIBC_9."))


BREAKS = {
    lose: "is missing",
    make_foreign: "and this node is",
    truncate: "damaged or another library",
    empty: "is not a library",
    need_a_newer_libc: "cannot be loaded on this node",
}


def start(installation: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without a daemon: a rank that gets as far as waiting for one says so."""
    program = (
        "import sys; import shim.keeper.home; shim.keeper.home.DAEMON_WAIT_S = 0.1\n"
        "from migrator.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "run", *arguments],
        cwd=installation,
        env={**os.environ, "PYTHONPATH": str(installation), "SNAPSHOTD_KEEPER_SOCKET": str(installation / "none.sock")},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", [("true",), ("torchrun", "train.py")], ids=["rank", "launcher"])
def test_a_rank_without_its_library_is_not_started(
    installation: Path, damage: object, command: tuple[str, ...]
) -> None:
    assert callable(damage)
    damage(installation / "shim" / "lib" / library.OFFLOAD_LIBRARY)
    done = start(installation, "--", *command)
    assert done.returncode == run.FAILED
    assert BREAKS[damage] in done.stderr
    assert "it was not started\nremedy: install the package" in done.stderr
    assert "--allow-unprotected" in done.stderr
    assert "snapshotd at" not in done.stderr  # it did not get as far as the daemon
    answer = json.loads(start(installation, "--json", "--", *command).stdout)
    assert answer["remedy"].startswith("install the package")


def test_a_missing_variant_is_not_replaced_by_the_other(installation: Path) -> None:
    (installation / "shim" / "lib" / library.DRIVER_LIBRARY).unlink()
    assert "waiting for snapshotd" in start(installation, "--", "true").stderr
    assert "is missing" in start(installation, "--device-memory", "driver", "--", "true").stderr


def test_allow_unprotected_says_so_and_goes_on(installation: Path) -> None:
    (installation / "shim" / "lib" / library.OFFLOAD_LIBRARY).unlink()
    done = start(installation, "--allow-unprotected", "--", "true")
    assert "is missing; the rank runs without protection\n" in done.stderr
    assert "waiting for snapshotd" in done.stderr


def test_a_launcher_starts_its_workers_without_protection_when_told(installation: Path, tmp_path: Path) -> None:
    (installation / "shim" / "lib" / library.OFFLOAD_LIBRARY).unlink()
    agent = tmp_path / "torchrun"
    agent.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys\n"
        "sys.exit(subprocess.call([os.environ['PYTHON_EXEC'], '-c', 'pass']))\n"
    )
    agent.chmod(0o755)
    done = start(installation, "--allow-unprotected", "--", str(agent), "x.py")
    assert done.stderr.count("the rank runs without protection") == 2, "the launcher's, and its worker's"
    assert "no snapshotd answers" in done.stderr


def test_the_path_of_the_library_may_be_one_that_the_loader_cannot_read(tmp_path: Path) -> None:
    """The loader separates the names in LD_PRELOAD by colons and spaces."""
    folder = tmp_path / "a b"
    folder.mkdir()
    shutil.copy(library.FOLDER / library.DRIVER_LIBRARY, folder)
    with pytest.raises(library.Unusable, match="cannot be loaded on this node"):
        library.usable(folder / library.DRIVER_LIBRARY, {})
