"""The package is upgraded on nodes with running ranks, one node after the other, and ranks move between two versions."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.systemd.cluster import APT, SystemdCluster
from integration.systemd.releases import next_release, other_protocol, previous_release
from snapshotd.api.errors import Refused

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def install(cluster: SystemdCluster, node: str, package: Path) -> None:
    """As an administrator upgrades a node; also to an older version."""
    place = cluster.nodes[node]
    shutil.copy(package, place.root / "root")
    place.run(*APT, "install", "--allow-downgrades", f"/root/{package.name}", timeout_s=600)
    assert place.show("snapshotd", "ActiveState") == "active"
    assert place.show("snapshotd", "NRestarts") == "0", place.journal()[-3000:]


def upgrade(cluster: SystemdCluster, node: str, package: Path) -> None:
    """As an administrator upgrades a node whose packages come from a repository of the site."""
    place = cluster.nodes[node]
    repository = place.root / "var/cache/site"
    repository.mkdir(exist_ok=True)
    shutil.copy(package, repository)
    control = subprocess.run(["dpkg-deb", "--field", package], check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    (repository / "Packages").write_text(
        f"{control}Filename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n"
    )
    (repository / "site.list").write_text("deb [trusted=yes] file:/var/cache/site ./\n")
    # The registries of the distribution cannot be reached from the node.
    alone = ("-o", "Dir::Etc::SourceList=/var/cache/site/site.list", "-o", "Dir::Etc::SourceParts=/dev/null")
    before = place.show("snapshotd", "MainPID")
    place.run(*APT, *alone, "update", timeout_s=300)
    place.run(*APT, *alone, "upgrade", timeout_s=600)
    assert place.show("snapshotd", "ActiveState") == "active"
    assert place.show("snapshotd", "MainPID") != before
    assert place.show("snapshotd", "NRestarts") == "0", place.journal()[-3000:]
    shutil.rmtree(repository)


def version(cluster: SystemdCluster, node: str) -> str:
    return cluster.nodes[node].run("snapshotd", "--version").split()[1]


def library(cluster: SystemdCluster, job: str, node: str) -> str:
    """The file of the library that the rank has mapped, as the kernel names it."""
    place = cluster.nodes[node]
    pid = place.run("pgrep", "--newest", "--full", f"^/usr/bin/python3 .*/{job}.witness$").strip()
    mapped = place.run("grep", "--max-count=1", "libsnapshim", f"/proc/{pid}/maps")
    return mapped[mapped.index("/") :].strip()


@pytest.fixture(scope="module")
def later(installed: SystemdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield next_release(installed.package, tmp_path_factory.mktemp("next"))
    for node in installed.nodes:
        if version(installed, node) != version_of(installed.package):
            install(installed, node, installed.package)


def version_of(package: Path) -> str:
    return package.name.split("_")[1]


def test_ranks_run_through_an_upgrade_and_move_between_two_versions(installed: SystemdCluster, later: Path) -> None:
    out, other = installed.start_job("through"), installed.start_job("stays")
    installed.move("through", "node-2")
    loaded = library(installed, "through", "node-2")
    assert loaded.startswith("/opt/snapshotd/shims/")

    upgrade(installed, "node-2", later)
    assert (version(installed, "node-1"), version(installed, "node-2")) == (version_of(installed.package), "9.0.0")
    installed.await_steps(out)
    installed.await_known("through", "node-2")
    assert library(installed, "through", "node-2") == loaded, "a running rank keeps its library"

    installed.move("through", "node-1")  # from the new version to the old one
    installed.await_steps(out)
    installed.move("through", "node-2")  # and back
    installed.await_steps(out)
    report = json.loads(installed.migrator("doctor", "--json", "--timeout", "100").stdout)
    assert report["failed"] == 0
    assert [each["state"] for each in report["between"] if each["check"] == "version"] == ["warning"]

    install(installed, "node-1", later)  # it has the launchers, the keepers and one of the ranks
    installed.await_steps(out)
    installed.await_steps(other)
    installed.await_known("stays", "node-1")
    installed.move("through", "node-1")
    installed.move("through", "node-2")
    installed.move("stays", "node-2")
    installed.await_steps(out)
    installed.await_steps(other)
    installed.end_job("through")
    installed.end_job("stays")


def test_a_rank_of_the_new_version_is_refused_where_its_library_is_not(installed: SystemdCluster, later: Path) -> None:
    """spare-1 has the old version alone. Refused in preflight, so nothing pauses."""
    install(installed, "node-1", later)
    out = installed.start_job("newer")
    refused = installed.ask_move("newer", "spare-1")
    assert refused.returncode == Refused.exit_code, refused.stdout + refused.stderr
    assert library(installed, "newer", "node-1") in refused.stderr
    install(installed, "spare-1", later)
    installed.move("newer", "spare-1")
    installed.await_steps(out)
    installed.end_job("newer")


@pytest.fixture(scope="module")
def former(installed: SystemdCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = previous_release(tmp_path_factory.mktemp("previous"))
    if found is None:
        pytest.skip("this checkout lacks the history with the previous release")
    return found


def test_ranks_move_between_the_previous_release_and_this_one_and_through_the_upgrade(
    installed: SystemdCluster, former: Path
) -> None:
    """Its package is built from an earlier commit, so its programs, keeper and library are those of that commit."""
    for node in ("node-1", "spare-1"):
        install(installed, node, former)
        assert version(installed, node) == "0.1.99"
    there = installed.start_job("there", on="spare-1")
    loaded = library(installed, "there", "spare-1")
    install(installed, "node-1", installed.package)
    report = json.loads(installed.migrator("doctor", "--json", "--timeout", "100").stdout)
    (mixed,) = [each for each in report["between"] if each["check"] == "version"]
    assert mixed["state"] == "warning", "the two releases have a protocol in common"
    installed.move("there", "node-1")  # from the old release to this one
    installed.await_steps(there)
    installed.move("there", "spare-1")  # and back
    installed.await_steps(there)

    install(installed, "spare-1", installed.package)
    installed.await_steps(there)
    installed.await_known("there", "spare-1")  # its keeper is of the old release
    assert library(installed, "there", "spare-1") == loaded, "a running rank keeps its library"
    installed.move("there", "node-1")
    installed.await_steps(there)
    installed.end_job("there", on="spare-1")


def test_moves_between_releases_without_a_common_protocol_are_refused_before_anything_pauses(
    installed: SystemdCluster, tmp_path: Path
) -> None:
    """Such a release does not exist yet: it is the package under test that says another number."""
    install(installed, "spare-1", other_protocol(installed.package, tmp_path))
    out, there = installed.start_job("here"), installed.start_job("strange", on="spare-1")
    for job, to in (("here", "spare-1"), ("strange", "node-1")):
        refused = installed.ask_move(job, to)
        assert refused.returncode == Refused.exit_code, refused.stdout + refused.stderr
        assert "daemon-version: snapshotd 9.1.0 on spare-1 speaks protocol 99" in refused.stderr
    report = json.loads(installed.migrator("doctor", "--json", "--timeout", "100").stdout)
    (strange,) = [each for each in report["between"] if (each["check"], each["state"]) == ("version", "failed")]
    assert strange["nodes"] == ["spare-1"]
    install(installed, "spare-1", installed.package)
    installed.await_known("strange", "spare-1")
    installed.await_steps(out)
    installed.move("strange", "node-1")
    installed.await_steps(there)
    installed.end_job("here")
    installed.end_job("strange", on="spare-1")
