"""Tests `migrator pki` and `migrator lab`, which are thin: what they pass to the modules behind them."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from snapshotd.api.errors import Ambiguous, Busy, NotFound, Usage
from tests.cli.conftest import Migrator


def test_pki_creates_the_files_that_a_configuration_names(tmp_path: Path, migrator: Migrator) -> None:
    folder = tmp_path / "ca"
    assert migrator("pki", "node", "node-1", "--dir", str(folder)).code == NotFound.exit_code
    assert migrator("pki", "init", "--dir", str(folder), "--json").json == {"ca": str(folder / "ca.crt")}
    assert migrator("pki", "init", "--dir", str(folder)).code == Busy.exit_code
    shown = migrator("pki", "node", "node-1", "--address", "10.0.0.1", "--address", "fd00::1", "--dir", str(folder))
    tls = tomllib.loads(shown.out)["tls"]
    assert all(Path(tls[key]).is_file() for key in ("ca", "cert", "key"))
    result = migrator("pki", "operator", "alice", "--dir", str(folder), "--json").json
    assert Path(result["key"]).stat().st_mode & 0o777 == 0o600
    assert migrator("pki", "node", "node-2", "--address", "here", "--dir", str(folder)).code == Usage.exit_code


def test_pki_uses_its_default_folder_or_migrator_pki(
    tmp_path: Path, migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert migrator("pki", "init").code == 0
    assert (tmp_path / ".config/migrator/pki/ca.key").is_file()
    monkeypatch.setenv("MIGRATOR_PKI", str(tmp_path / "other"))
    assert migrator("pki", "init").code == 0
    assert (tmp_path / "other/ca.key").is_file()


class FakeLab:
    """Records the calls and the lab of each."""

    asked: list[tuple[object, ...]]
    existing: list[str]
    cluster_path = Path("/nowhere/cluster.toml")

    def __init__(self, name: str = "lab") -> None:
        self.name = name
        self.nodes: Sequence[str] = ("node-1", "spare-1")

    @classmethod
    def names(cls) -> list[str]:
        return cls.existing

    def address(self, node: str) -> str:
        return f"address of {node}"

    def up(self, nodes: Sequence[str]) -> None:
        self.asked.append(("up", self.name, list(nodes)))

    def down(self) -> None:
        self.asked.append(("down", self.name))

    def run(self, job: str, argv: Sequence[str]) -> int:
        self.asked.append(("run", self.name, job, list(argv)))
        return 3

    def exec(self, node: str, argv: Sequence[str]) -> int:
        self.asked.append(("exec", self.name, node, list(argv)))
        return 4


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> type[FakeLab]:
    FakeLab.asked, FakeLab.existing = [], []
    monkeypatch.setattr("migrator.lab.Lab", FakeLab)
    return FakeLab


def test_lab_verbs_call_the_lab(lab: type[FakeLab], migrator: Migrator) -> None:
    result = migrator("lab", "up", "--nodes", "a, b", "--json").json
    assert result["nodes"] == {"node-1": "address of node-1", "spare-1": "address of spare-1"}
    assert migrator("--lab", "x", "lab", "up").code == 0
    assert migrator("lab", "run", "--lab", "x", "--job", "j", "--", "cmd", "--json").code == 3
    assert migrator("lab", "run", "--", "/bin/cmd").code == 3
    assert migrator("lab", "exec", "node-1", "--", "ls", "--", "-l").code == 4
    assert migrator("lab", "down", "--lab", "x").out == "lab x is down\n"
    assert lab.asked == [
        ("up", "lab", ["a", "b"]),
        ("up", "x", ["node-1", "node-2", "spare-1"]),
        ("run", "x", "j", ["cmd", "--json"]),
        ("run", "lab", "cmd", ["/bin/cmd"]),
        ("exec", "lab", "node-1", ["ls", "--", "-l"]),
        ("down", "x"),
    ]


def test_lab_down_uses_the_only_lab_and_several_are_ambiguous(lab: type[FakeLab], migrator: Migrator) -> None:
    lab.existing = ["mine"]
    assert migrator("lab", "down").code == 0
    assert migrator("lab", "up").code == 0
    lab.existing = ["mine", "yours"]
    ran = migrator("lab", "down")
    assert ran.code == Ambiguous.exit_code
    assert "mine, yours" in ran.err
    assert lab.asked == [("down", "mine"), ("up", "lab", ["node-1", "node-2", "spare-1"])]


def test_loading_the_program_starts_no_thread() -> None:
    """A lab's network namespace can be entered only while there is a single thread."""
    program = "import os, migrator.cli.program, migrator.driver; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, 1)


def test_closed_stdout_causes_no_traceback(tmp_path: Path) -> None:
    program = (
        "import sys; from migrator.cli import main; sys.exit(main(['pki', 'init', '--json', '--dir', sys.argv[1]]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "ca")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        err = child.stderr.read()
    assert (child.returncode, err) == (1, b"")
