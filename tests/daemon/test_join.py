"""`snapshotd join`: what it installs, and what it refuses without changing anything."""

from __future__ import annotations

import dataclasses
import io
import os
import socket
import stat
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from migrator import ca_rotation, pki
from snapshotd import main as daemon_main
from snapshotd.api.errors import BadConfig, Denied, NotFound
from snapshotd.api.node_file import NodeFile
from snapshotd.join import join

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may join")


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "etc/snapshotd.toml"


def made(ca: Path, node: str = "node-1", endpoint: str = "127.0.0.1:7070") -> NodeFile:
    own = pki.issue_node(ca, node, replace=True)
    crl = ca / "ca.crl"
    ca_text, cert, key = (path.read_text() for path in (own.ca, own.cert, own.key))
    return NodeFile(node, endpoint, ca_text, cert, key, crl.read_text() if crl.exists() else "")


def stored(tmp_path: Path, file: NodeFile, mode: int = 0o600) -> Path:
    path = tmp_path / "given.join"
    path.write_text(file.text())
    path.chmod(mode)
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_machine_becomes_a_node_and_takes_new_certificates_later(ca: Path, config: Path, tmp_path: Path) -> None:
    file = made(ca)
    done = join(stored(tmp_path, file), config)
    assert (done.node, done.runs, done.warnings) == ("node-1", False, [])
    tls = config.parent / "tls"
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in (tls, *tls.iterdir())} == {
        tls: 0o700,
        tls / "ca.crt": 0o644,
        tls / "node.crt": 0o644,
        tls / "node.key": 0o600,
    }
    join(stored(tmp_path, file), config)  # the same again
    config.write_text(f"# mine\nallow_root_ranks = true\n{config.read_text()}")
    before = config.read_text()
    pki.issue_operator(ca, "thief")
    pki.revoke(ca, "operator:thief")
    newer = made(ca)
    join(stored(tmp_path, newer), config)
    assert config.read_text() == before
    assert (tls / "node.crt").read_text().strip() == newer.cert.strip()
    assert (tls / "ca.crl").read_text().strip() == newer.crl.strip()


def test_every_stage_of_a_new_ca_is_taken(ca: Path, config: Path, tmp_path: Path) -> None:
    join(stored(tmp_path, made(ca)), config)
    for step in (ca_rotation.introduce, ca_rotation.switch, ca_rotation.finish):
        step(ca)
        join(stored(tmp_path, made(ca)), config)
    assert (config.parent / "tls/ca.crt").read_bytes().strip() == (ca / "ca.crt").read_bytes().strip()


def test_files_go_where_the_configuration_has_them(ca: Path, config: Path, tmp_path: Path) -> None:
    config.parent.mkdir()
    places = {name: tmp_path / "own" / f"{name}.pem" for name in ("ca", "cert", "key")}
    lines = [f'{name} = "{path}"' for name, path in places.items()]
    config.write_text('node = "node-1"\nlisten = "0.0.0.0:7070"\n[tls]\n' + "\n".join(lines))
    done = join(stored(tmp_path, made(ca)), config)
    assert set(done.written) == set(places.values())
    assert done.warnings == []


def test_another_address_in_the_configuration_is_warned_about(ca: Path, config: Path, tmp_path: Path) -> None:
    join(stored(tmp_path, made(ca)), config)
    config.write_text(config.read_text().replace("127.0.0.1:7070", "127.0.0.1:7071"))
    (warning,) = join(stored(tmp_path, made(ca)), config).warnings
    assert "the cluster calls 127.0.0.1:7070" in warning


def test_running_daemon_is_noticed(ca: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    join(stored(tmp_path, made(ca)), config)
    run_dir = Path("/dev/shm") / f"join-{os.getpid()}"
    run_dir.mkdir()
    config.write_text(f'run_dir = "{run_dir}"\n{config.read_text()}')
    try:
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.bind(str(run_dir / "admin.sock"))
            daemon.listen()
            daemon_main.main(["--config", str(config), "join", str(stored(tmp_path, made(ca)))])
    finally:
        (run_dir / "admin.sock").unlink()
        run_dir.rmdir()
    out = capsys.readouterr().out
    assert "the running snapshotd uses them without a restart" in out
    assert "systemctl" not in out


def test_program_reads_standard_input_and_says_what_is_next(
    ca: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(made(ca).text().encode())))
    daemon_main.main(["--config", str(config), "join", "-"])
    out = capsys.readouterr().out
    assert "this machine is node node-1; next: systemctl enable --now snapshotd" in out
    assert "delete it" not in out
    assert "PRIVATE KEY" not in out


def expired(ca: Path, monkeypatch: pytest.MonkeyPatch) -> NodeFile:
    with monkeypatch.context() as then:
        then.setattr(pki, "LEAF_VALID", timedelta(minutes=-1))
        return made(ca)


def revoked(ca: Path, _: pytest.MonkeyPatch) -> NodeFile:
    file = made(ca)
    pki.revoke(ca, "node:node-1")
    return dataclasses.replace(file, crl=(ca / "ca.crl").read_text())


def of_another_node(ca: Path, _: pytest.MonkeyPatch) -> NodeFile:
    return dataclasses.replace(made(ca), node="node-2")


def with_another_key(ca: Path, _: pytest.MonkeyPatch) -> NodeFile:
    file = made(ca)
    return dataclasses.replace(file, key=made(ca).key)


def of_no_ca(ca: Path, _: pytest.MonkeyPatch) -> NodeFile:
    pki.init(ca / "other")
    return dataclasses.replace(made(ca), ca=(ca / "other/ca.crt").read_text())


def at_another_machine(ca: Path, _: pytest.MonkeyPatch) -> NodeFile:
    return made(ca, endpoint="127.99.0.1:7070")


WRONG: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], NodeFile], str]] = {
    "expired": (expired, "expired on"),
    "revoked": (revoked, "its certificate has been revoked"),
    "another node's certificate": (of_another_node, "is the certificate of node:node-1, but this node is node:node-2"),
    "another key": (with_another_key, "its key is not the key of its certificate"),
    "another CA": (of_no_ca, "its certificate was not issued by its CA"),
    "another machine": (at_another_machine, "is not an address of this machine"),
}


@pytest.mark.parametrize(("make", "says"), WRONG.values(), ids=WRONG)
def test_file_that_does_not_fit_changes_nothing(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., NodeFile], says: str
) -> None:
    with pytest.raises(BadConfig, match=says) as caught:
        join(stored(tmp_path, make(ca, monkeypatch)), config)
    assert "nothing was changed" in caught.value.message
    assert not config.parent.exists()


def test_file_of_another_cluster_or_node_or_an_older_one_changes_nothing(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(pki, "CLOCK_SKEW", timedelta(hours=1))
        old = made(ca)
    join(stored(tmp_path, made(ca)), config)
    before = content(config.parent)
    pki.init(tmp_path / "other")
    for file, says in (
        (old, "is older than what this node has"),
        (made(tmp_path / "other"), "it belongs to another cluster"),
        (made(ca, "node-2"), "this machine is node 'node-1'"),
    ):
        with pytest.raises(BadConfig, match=says):
            join(stored(tmp_path, file), config)
        assert content(config.parent) == before


@pytest.mark.parametrize("text", ["", "nonsense", "\0", "form = 2\n", "form = 1\nnode = 3\n", 'node = "x"\n'])
def test_file_that_is_none_is_refused(config: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.join"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(BadConfig, match=r"x\.join"):
        join(path, config)
    assert not config.parent.exists()


def test_every_part_of_a_file_can_be_damaged_without_a_traceback_or_the_key(
    ca: Path, config: Path, tmp_path: Path
) -> None:
    text = made(ca).text()
    for at in range(text.index("form ="), len(text), 97):  # before that are comments
        path = tmp_path / "cut.join"
        for damaged in (text[:at], text[:at] + "x'''" + text[at + 1 :]):
            path.write_text(damaged)
            path.chmod(0o600)
            with pytest.raises(BadConfig) as caught:
                join(path, config)
            assert "PRIVATE KEY" not in caught.value.message
    assert not config.parent.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_file_that_others_can_read_is_refused(ca: Path, config: Path, tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadConfig, match="users other than its owner can read it"):
        join(stored(tmp_path, made(ca), mode), config)


def test_file_of_another_user_is_refused(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path, made(ca))
    os.chown(path, 1500, 1500)
    monkeypatch.setenv("SUDO_UID", "1000")
    with pytest.raises(BadConfig, match="belongs to user 1500"):
        join(path, config)
    assert not config.parent.exists()
    monkeypatch.setenv("SUDO_UID", "1500")
    assert join(path, config).node == "node-1"


@pytest.mark.timeout(60)
def test_fifo_in_the_place_of_the_file_is_not_waited_for(config: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "node-1.join", 0o600)
    with pytest.raises(BadConfig, match="is not a file"):
        join(tmp_path / "node-1.join", config)


def test_missing_file_and_missing_rights_are_reported(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound):
        join(tmp_path / "none", config)
    with pytest.raises(BadConfig, match="is not a file"):
        join(Path("/dev/null"), config)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Denied, match="writes files of root"):
        join(stored(tmp_path, made(ca)), config)


def test_full_disk_leaves_the_old_files(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(stored(tmp_path, made(ca)), config)
    before = content(config.parent)

    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = stored(tmp_path, made(ca))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_room)
        with pytest.raises(BadConfig, match="No space left on device; nothing was changed"):
            join(path, config)
    assert content(config.parent) == before
    join(path, config)


def test_key_is_never_readable_by_others_on_the_way(
    ca: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask: the mode at creation is looked at, before anything is written."""
    modes: dict[str, list[int]] = {}
    real_open, real_replace = os.open, os.replace

    def opened(path: Path, flags: int, mode: int = 0o777, **more: int) -> int:
        descriptor = real_open(path, flags, mode, **more)
        if flags & os.O_CREAT:
            modes.setdefault(Path(path).name, []).append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    def replaced(source: Path, target: Path) -> None:
        modes.setdefault(source.name, []).append(stat.S_IMODE(source.stat().st_mode))
        real_replace(source, target)

    path = stored(tmp_path, made(ca))
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "replace", replaced)
    umask = os.umask(0)
    try:
        join(path, config)
    finally:
        os.umask(umask)
    assert modes[".node.key.new"] == [0o600, 0o600]
