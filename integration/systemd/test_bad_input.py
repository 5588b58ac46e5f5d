"""What an administrator may do wrong at an installation, each answered in one clear sentence. See also test_broken_setups.

The table in docs/troubleshooting.md, "An installation that fails", has these sentences.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.systemd.cluster import APT, USER, SystemdCluster
from integration.systemd.nodes import Node
from integration.systemd.releases import repacked
from snapshotd.api.errors import BadConfig, Denied

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

FOREIGN = {"arm64": "amd64", "amd64": "arm64"}


@pytest.fixture(scope="module")
def spare(installed: SystemdCluster) -> Node:
    return installed.nodes["spare-1"]


def changed_control(package: Path, folder: Path, pattern: str, text: str) -> Path:
    """The package with another line in its control file, without its files: dpkg and apt read that line first."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = subprocess.run(["dpkg-deb", "--field", package], check=True, capture_output=True, text=True).stdout
    changed, count = re.subn(pattern, text, control, flags=re.MULTILINE)
    assert count == 1
    (tree / "DEBIAN/control").write_text(changed)
    made = folder / "changed.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, made], check=True, capture_output=True)
    return made


def refused_install(node: Node, package: Path, *programs: str) -> str:
    """Has a program refuse the package; what it said. The installed one stays, and its daemon runs."""
    shutil.copy(package, node.root / "root/changed.deb")
    before, pid = node.run("dpkg-query", "--show", "snapshotd"), node.show("snapshotd", "MainPID")
    done = node.ask(*programs, "/root/changed.deb", timeout_s=300)
    assert done.returncode != 0, done.stdout
    assert (node.run("dpkg-query", "--show", "snapshotd"), node.show("snapshotd", "MainPID")) == (before, pid)
    return done.stdout + done.stderr


def test_a_package_of_another_architecture_is_refused(installed: SystemdCluster, spare: Node, tmp_path: Path) -> None:
    own = spare.run("dpkg", "--print-architecture").strip()
    foreign = changed_control(installed.package, tmp_path, r"^Architecture: .*$", f"Architecture: {FOREIGN[own]}")
    said = refused_install(spare, foreign, "dpkg", "--install")
    assert f"package architecture ({FOREIGN[own]}) does not match system ({own})" in said
    assert f"snapshotd:{FOREIGN[own]}" in refused_install(spare, foreign, *APT, "install")


def test_a_package_for_a_newer_glibc_is_refused(installed: SystemdCluster, spare: Node, tmp_path: Path) -> None:
    newer = changed_control(installed.package, tmp_path, r"libc6 \(>= 2\.34\)", "libc6 (>= 9.34)")
    said = refused_install(spare, newer, *APT, "install")
    assert re.search(r"snapshotd : Depends: libc6 \(>= 9\.34\) but 2\.\d+-\S+ is", said), said


def test_a_second_install_over_the_same_version_disturbs_no_rank(installed: SystemdCluster) -> None:
    first = installed.nodes["node-1"]
    out = installed.start_job("again")
    configured = (first.root / "etc/snapshotd/snapshotd.toml").read_bytes()
    first.run(*APT, "install", "--reinstall", f"/root/{installed.package.name}", timeout_s=600)
    assert first.show("snapshotd", "ActiveState") == "active"
    assert (first.root / "etc/snapshotd/snapshotd.toml").read_bytes() == configured
    installed.await_steps(out)
    installed.await_known("again", "node-1")
    installed.move("again", "node-2")
    installed.await_steps(out)
    installed.end_job("again")


def test_no_upgrade_replaces_what_the_administrator_changed(
    installed: SystemdCluster, spare: Node, tmp_path: Path
) -> None:
    example = spare.root / "etc/snapshotd/snapshotd.toml.example"
    original = example.read_bytes()
    example.write_text("# ours\n")
    try:
        shutil.copy(repacked(installed.package, "9.0.1", tmp_path), spare.root / "root/later.deb")
        spare.run(*APT, "install", "/root/later.deb", timeout_s=600)
        assert example.read_text() == "# ours\n"
        spare.run(*APT, "install", "--allow-downgrades", f"/root/{installed.package.name}", timeout_s=600)
        assert example.read_text() == "# ours\n"
    finally:  # dpkg would ask about it when a package with another example is installed
        example.write_bytes(original)


@pytest.mark.parametrize("command", [("snapshotd", "join", "/dev/null"), ("snapshotd", "--check")])
def test_an_ordinary_user_is_told_to_be_root(spare: Node, command: tuple[str, ...]) -> None:
    done = spare.ask("runuser", "-u", USER, "--", *command)
    assert done.returncode == Denied.exit_code, done.stderr
    assert re.fullmatch(r"snapshotd: .*root.*\nremedy: .*\n", done.stderr), done.stderr


@contextlib.contextmanager
def read_only_etc(node: Node) -> Iterator[None]:
    node.run("mount", "--bind", "-o", "ro", "/etc", "/etc")
    try:
        yield
    finally:
        node.run("umount", "/etc")


def test_join_says_that_etc_is_read_only_and_changes_nothing(installed: SystemdCluster, spare: Node) -> None:
    first = installed.nodes["node-1"]
    first.session("migrator cluster rotate spare-1")
    (first.root / "root/spare-1.join").rename(spare.root / "root/spare-1.join")
    before = {path: path.read_bytes() for path in (spare.root / "etc/snapshotd").rglob("*") if path.is_file()}
    with read_only_etc(spare):
        done = spare.ask("snapshotd", "join", "/root/spare-1.join")
    assert done.returncode == BadConfig.exit_code
    assert re.search(r"/etc/snapshotd/\S+ cannot be written: Read-only file system; nothing was changed", done.stderr)
    assert {path: path.read_bytes() for path in (spare.root / "etc/snapshotd").rglob("*") if path.is_file()} == before
    spare.session("snapshotd join spare-1.join; rm spare-1.join")


def test_cluster_init_says_that_etc_is_read_only(spare: Node) -> None:
    with read_only_etc(spare):
        done = spare.ask("migrator", "cluster", "init")
    assert done.returncode == BadConfig.exit_code, done.stderr
    assert "/etc/migrator" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
