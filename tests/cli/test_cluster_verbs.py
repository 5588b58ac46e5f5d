"""Tests `migrator cluster`: what it makes, what it refuses, and that a command that was interrupted can be run again.

Nodes have addresses of this machine's loopback network on which nothing listens. `ssh` and `systemctl` are stand-ins on PATH;
what runs through them, `snapshotd join`, is real. integration/test_certificates.py has running daemons.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from migrator import ca_rotation, membership, pki
from migrator.cli import leaving_node
from migrator.cluster import Cluster
from snapshotd.api import node_file
from snapshotd.api.errors import BadConfig, Busy, NotFound, Refused, Usage
from tests.cli.conftest import Migrator, Ran

ROOT = Path(__file__).parents[2]


class Operator:
    """An operator with a folder of its own, in which it works."""

    def __init__(self, folder: Path, migrator: Migrator) -> None:
        self.folder, self._migrator = folder, migrator
        self.file, self.ca = folder / "etc/cluster.toml", folder / "pki"

    def __call__(self, *words: str, code: int = 0) -> Ran:
        ran = self._migrator("cluster", *words)
        assert ran.code == code, ran.out + ran.err
        assert "PRIVATE KEY" not in ran.out + ran.err
        return ran

    def node_file(self, name: str) -> node_file.NodeFile:
        return node_file.read(self.folder / f"{name}.join")

    def everything(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "issued")
        }


@pytest.fixture
def bare(tmp_path: Path, migrator: Migrator, monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIGRATOR_CLUSTER", str(tmp_path / "etc/cluster.toml"))
    monkeypatch.setenv("MIGRATOR_PKI", str(tmp_path / "pki"))
    return Operator(tmp_path, migrator)


@pytest.fixture
def operator(bare: Operator) -> Operator:
    bare("init")
    return bare


def private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o600


# ---------------------------------------------------------------- init


def test_init_makes_a_ca_an_operator_and_a_file_to_which_nodes_are_added(bare: Operator) -> None:
    done = bare("init", "--operator", "alice", "--json").json
    assert done == {"cluster": str(bare.file), "ca": str(bare.ca), "ca_is_new": True, "operator": "alice"}
    assert private(bare.folder / "etc/tls/alice.key")
    assert private(bare.ca / "ca.key")
    listed = bare("list", "--json").json
    assert (listed["nodes"], listed["operator"]["name"], listed["ca"]["stage"]) == ([], "alice", "stable")


def test_verbs_that_need_nodes_say_how_to_add_one(operator: Operator, migrator: Migrator) -> None:
    ran = migrator("ps")
    assert ran.code == BadConfig.exit_code
    assert "migrator cluster add NODE ADDRESS" in ran.err


def test_init_twice_is_refused_and_changes_nothing(operator: Operator) -> None:
    before = operator.everything()
    assert "exists: the cluster has been made already" in operator("init", code=Busy.exit_code).err
    assert operator.everything() == before


def test_init_that_was_interrupted_is_finished_by_another_one(bare: Operator) -> None:
    bare("init")
    ca = (bare.ca / "ca.crt").read_bytes()
    bare.file.unlink()  # what it writes last
    assert bare("init", "--json").json["ca_is_new"] is False
    assert (bare.ca / "ca.crt").read_bytes() == ca
    bare("add", "node-1", "127.0.0.1")


def test_init_beside_files_of_another_ca_is_refused(bare: Operator) -> None:
    (bare.folder / "etc/tls").mkdir(parents=True)
    (bare.folder / "etc/tls/ca.crt").write_text("of another cluster")
    assert "is of another CA" in bare("init", code=Busy.exit_code).err
    assert (bare.folder / "etc/tls/ca.crt").read_text() == "of another cluster"


def test_key_is_for_the_group_of_a_folder_that_a_group_shares(bare: Operator) -> None:
    """As the package makes /etc/migrator/tls."""
    folder = bare.folder / "etc/tls"
    folder.mkdir(parents=True)
    os.chown(folder, -1, 1500)
    folder.chmod(0o750)
    bare("init")
    for _ in range(2):
        about = (folder / "admin.key").stat()
        assert (stat.S_IMODE(about.st_mode), about.st_gid) == (0o640, 1500)
        bare("rotate")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 80])
def test_name_of_an_operator_cannot_leave_the_folder(bare: Operator, name: str) -> None:
    bare("init", "--operator", name, code=Usage.exit_code)
    assert not bare.file.exists()
    bare("init")  # the CA is there, and is used


def test_folder_that_cannot_be_made_is_a_usage_error(bare: Operator) -> None:
    (bare.folder / "file").write_text("")
    bare("init", "--dir", str(bare.folder / "file/pki"), code=Usage.exit_code)


# ---------------------------------------------------------------- add


def test_add_makes_a_private_file_with_which_the_node_can_join(operator: Operator) -> None:
    done = operator("add", "node-1", "127.0.0.1", "--address", "10.1.0.1", "--json").json
    assert (done["endpoint"], done["file"], done["ssh"]) == ("127.0.0.1:7070", "node-1.join", "")
    assert private(operator.folder / "node-1.join")
    made = operator.node_file("node-1")
    assert (made.node, made.endpoint, made.crl) == ("node-1", "127.0.0.1:7070", "")
    text = operator("add", "node-2", "[fd00::2]:7071").out
    assert "snapshotd join node-2.join" in text
    assert Cluster.read(operator.file).nodes == {"node-1": "127.0.0.1:7070", "node-2": "[fd00::2]:7071"}
    assert [row["name"] for row in operator("list", "--json").json["nodes"]] == ["node-1", "node-2"]


def test_add_twice_and_the_address_of_another_node_are_refused(operator: Operator) -> None:
    operator("add", "node-1", "127.0.0.1")
    before = operator.everything()
    assert "migrator cluster rotate node-1" in operator("add", "node-1", "127.0.0.9", code=Busy.exit_code).err
    assert "is the endpoint of node-1" in operator("add", "node-2", "127.0.0.1", code=Busy.exit_code).err
    assert operator.everything() == before


def test_add_that_was_interrupted_can_be_run_again(operator: Operator) -> None:
    before = operator.file.read_text()
    operator("add", "node-1", "127.0.0.1")
    operator.file.write_text(before)  # what it writes last
    operator("add", "node-1", "127.0.0.2")
    assert operator.node_file("node-1").endpoint == "127.0.0.2:7070"


def test_full_disk_leaves_the_cluster_as_it_was(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    before, fsync = operator.everything(), os.fsync
    for room in range(100):  # for so many writes
        left = iter(range(room))

        def sync(descriptor: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        with monkeypatch.context() as full:
            full.setattr(os, "fsync", sync)
            ran = operator._migrator("cluster", "add", "node-1", "127.0.0.1")
        if ran.code == 0:
            break
        assert (ran.code, "No space left on device" in ran.err) == (BadConfig.exit_code, True), ran.err
        now = operator.everything()
        assert {name: now[name] for name in before} == before
        assert not list(operator.folder.rglob(".*.new"))
    assert room > 3
    assert operator.node_file("node-1").endpoint == Cluster.read(operator.file).nodes["node-1"]


def test_file_that_is_not_of_this_node_is_not_overwritten(operator: Operator) -> None:
    (operator.folder / "node-1.join").write_text("mine")
    assert "is not a file of node-1" in operator("add", "node-1", "127.0.0.1", code=Busy.exit_code).err
    assert (operator.folder / "node-1.join").read_text() == "mine"
    operator("add", "node-1", "127.0.0.1", "--output", "/nonexistent", code=Usage.exit_code)
    assert Cluster.read(operator.file, may_be_empty=True).nodes == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", ["a FIFO", "/dev/zero"])
def test_trap_of_another_user_in_the_folder_is_not_read(operator: Operator, trap: str) -> None:
    path = operator.folder / "node-1.join"
    if trap == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(trap)
    assert "is not a file of node-1" in operator("add", "node-1", "127.0.0.1", code=Busy.exit_code).err


def test_without_a_cluster_or_with_another_ca_nothing_is_added(
    bare: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "migrator cluster init" in bare("add", "node-1", "127.0.0.1", code=NotFound.exit_code).err
    bare("init")
    pki.init(tmp_path / "other")
    ran = bare("add", "node-1", "127.0.0.1", "--dir", str(tmp_path / "other"), code=BadConfig.exit_code)
    assert "is not the CA of" in ran.err
    bare("add", "node-1", "127.0.0.1", "--dir", str(tmp_path / "none"), code=NotFound.exit_code)


def test_two_commands_at_a_time_are_refused(operator: Operator) -> None:
    with membership.Site(operator.file, operator.ca).locked():
        operator("add", "node-1", "127.0.0.1", code=Busy.exit_code)
    operator("add", "node-1", "127.0.0.1")


def test_other_settings_and_comments_of_the_file_are_kept(operator: Operator) -> None:
    operator("add", "a.b", "127.0.0.2")
    with operator.file.open("a") as file:
        file.write(
            '[nodes."a.b".networks]\ndata = "10.1.0.1"\n\n# about fencing\n[nodes.c]\nendpoint = "127.0.0.9:1"\n'
        )
    operator.file.write_text('# mine\nfence = ["/bin/true"]\n' + operator.file.read_text())
    operator("add", "node-1", "127.0.0.1")
    operator("remove", "a.b")
    text = operator.file.read_text()
    assert "# mine" in text
    assert "# about fencing\n[nodes.c]" in text
    assert tomllib.loads(text)["fence"] == ["/bin/true"]
    assert set(tomllib.loads(text)["nodes"]) == {"c", "node-1"}
    operator("remove", "c")
    operator("remove", "node-1")
    assert "nodes" not in tomllib.loads(operator.file.read_text())


def test_file_that_is_written_in_another_way_is_left_to_a_person(operator: Operator) -> None:
    text = 'nodes = { old = { endpoint = "127.0.0.9:1" } }\n' + operator.file.read_text()
    operator.file.write_text(text)
    for words in (("add", "node-1", "127.0.0.1"), ("remove", "old")):
        assert "by hand" in operator(*words, code=BadConfig.exit_code).err
    assert operator.file.read_text() == text


# ---------------------------------------------------------------- remove, rotate


def test_removed_node_is_revoked_and_the_others_learn_it_with_their_next_file(operator: Operator) -> None:
    for number in (1, 2):
        operator("add", f"node-{number}", f"127.0.0.{number}")
    gone = operator.node_file("node-2")
    done = operator("remove", "node-2", "--json").json
    assert (len(done["serials"]), done["jobs"], done["coordinated"], done["silent"]) == (1, [], [], ["node-1"])
    assert list(Cluster.read(operator.file).nodes) == ["node-1"]
    operator("remove", "node-2", code=NotFound.exit_code)
    operator("rotate", "node-1")
    made = operator.node_file("node-1")
    assert made.crl.startswith("-----BEGIN X509 CRL")
    operator("add", "node-2", "127.0.0.2")
    assert operator.node_file("node-2").cert != gone.cert


def test_jobs_that_need_a_removed_node_are_named(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(cluster: Cluster, node: str, *, force: bool) -> leaving_node.Needed:
        jobs = ["day", "night"] if node == "node-2" and force else []
        return leaving_node.Needed(jobs=jobs)

    monkeypatch.setattr(leaving_node, "check", check)
    for number in (1, 2):
        operator("add", f"node-{number}", f"127.0.0.{number}")
    shown = operator("remove", "node-2", "--force").out
    assert "take another snapshot of each now: day, night\n" in shown
    assert "take another" not in operator("remove", "node-1").out


def test_rotate_replaces_all_or_the_named_ones_or_what_expires(operator: Operator) -> None:
    for number in (1, 2):
        operator("add", f"node-{number}", f"127.0.0.{number}", "--address", f"10.1.0.{number}")
    own = (operator.folder / "etc/tls/admin.crt").read_bytes()
    first = {name: operator.node_file(name) for name in ("node-1", "node-2")}
    done = operator("rotate", "node-1", "--json").json
    assert ([row["node"] for row in done["nodes"]], done["operator"]) == (["node-1"], "")
    assert operator.node_file("node-1").key != first["node-1"].key
    assert operator.node_file("node-2") == first["node-2"]
    assert operator("rotate", "--within", "30", "--json").json == {"operator": "", "nodes": []}
    assert "no certificate expires within 30 days" in operator("rotate", "--within", "30").out
    done = operator("rotate", "--within", "91", "--json").json
    assert [row["node"] for row in done["nodes"]] == ["node-1", "node-2"]
    assert done["operator"] == "admin"
    assert (operator.folder / "etc/tls/admin.crt").read_bytes() != own
    cert = pki.read_certificate(operator.ca / "nodes/node-1.crt")
    assert "10.1.0.1" in str(cert.extensions)
    operator("rotate", "node-9", code=NotFound.exit_code)
    operator("rotate", "node-1", "--ca", code=Usage.exit_code)
    operator("rotate", "--no-check", code=Usage.exit_code)


def test_ca_goes_on_only_when_the_nodes_are_ready(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrator.cli.cluster_ca.ASKED_S", 0)
    operator("add", "node-1", "127.0.0.1:9")  # nothing listens there
    pki.issue_operator(operator.ca, "bob")
    done = operator("rotate", "--ca", "--json").json
    assert (done["stage"], done["other_operators"]) == ("introduced", ["bob"])
    assert operator.node_file("node-1").ca.count("BEGIN CERTIFICATE") == 2
    ran = operator("rotate", "--ca", code=Refused.exit_code)
    assert "do not trust the new CA yet" in ran.err
    assert "node-1" in ran.err
    assert ca_rotation.stage(operator.ca) == "introduced"
    assert not list(operator.ca.glob("probe-*"))
    assert "the CA is being replaced (introduced)" in operator("list").out
    old = operator.node_file("node-1").cert
    assert operator("rotate", "--ca", "--no-check", "--json").json["stage"] == "switched"
    assert operator.node_file("node-1").cert != old
    assert "have no certificate of the new CA yet" in operator("rotate", "--ca", code=Refused.exit_code).err
    assert operator("rotate", "--ca", "--no-check", "--json").json["stage"] == "stable"
    assert operator.node_file("node-1").ca.count("BEGIN CERTIFICATE") == 1
    assert (operator.folder / "etc/tls/ca.crt").read_text().strip() == operator.node_file("node-1").ca.strip()
    pki.renew(operator.ca, timedelta(days=3650))


# ---------------------------------------------------------------- ssh


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for ssh and systemctl, and the real `snapshotd` with a configuration of its own. Returns its folder."""
    programs, etc = tmp_path / "bin", tmp_path / "remote"
    programs.mkdir()
    etc.mkdir()
    scripts = {
        "ssh": f"""[ "$1" = -- ] || exit 9
            echo "$2" >>{etc}/destinations
            [ ! -e {etc}/down ] || {{ echo no route >&2; exit 255; }}
            exec sh -c "$3" """,
        "systemctl": f'echo "$@" >>{etc}/systemctl',
        "snapshotd": f'cd {ROOT} && exec {sys.executable} -m snapshotd.main --config {etc}/snapshotd.toml "$@"',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return etc


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may join")
def test_node_joins_and_starts_through_ssh_and_no_key_is_left(operator: Operator, remote: Path) -> None:
    done = operator("add", "node-1", "127.0.0.1", "--ssh", "root@gpu-7", "--json").json
    assert (done["file"], done["ssh"]) == ("", "root@gpu-7")
    assert not list(operator.folder.glob("*.join"))
    assert (remote / "systemctl").read_text() == "enable --now snapshotd\n"
    first = (remote / "tls/node.crt").read_bytes()
    assert private(remote / "tls/node.key")
    assert "node-1 has joined through ssh root@gpu-7" in operator("rotate", "--ssh").out
    assert (remote / "tls/node.crt").read_bytes() != first
    assert set((remote / "destinations").read_text().split()) == {"root@gpu-7"}
    assert (remote / "systemctl").read_text().count("\n") == 1
    operator("add", "node-2", "127.0.0.2")
    operator("remove", "node-2", "--ssh")
    assert (remote / "tls/ca.crl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may join")
def test_node_that_cannot_be_reached_or_refuses_leaves_a_file_to_copy(operator: Operator, remote: Path) -> None:
    (remote / "down").touch()
    ran = operator("add", "node-1", "127.0.0.1", "--ssh", "gpu-7", code=Refused.exit_code)
    assert "no route" in ran.err
    assert private(operator.folder / "node-1.join")
    assert list(Cluster.read(operator.file).nodes) == ["node-1"]
    (remote / "down").unlink()
    ran = operator("add", "node-2", "127.0.0.2", "--ssh", "gpu-8", code=Refused.exit_code)
    assert "is not an address of this machine" in ran.err
    assert not (remote / "systemctl").exists()


def test_help_lists_the_verbs(migrator: Migrator) -> None:
    shown = migrator("cluster", "--help").out
    for verb in ("init", "add", "remove", "list", "rotate"):
        assert f"    {verb} " in shown
