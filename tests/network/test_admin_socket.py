"""The admin socket: at no moment can another user connect to it or put another one in its place."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import Internal
from snapshotd.network.child import NetworkProcess
from tests.installation import readable_python

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")

OWNER = 1500
_LISTEN = """
import os, socket, sys
os.umask(0o177)
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
made.listen(8)
print("listening", flush=True)
sys.stdin.read()
"""
#: What a second process of the same user tries at any moment: to put its own socket in the place of the first.
_REPLACE = """
import os, socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1] + ".other")
made.listen(8)
os.chmod(sys.argv[1] + ".other", 0o777)
os.rename(sys.argv[1] + ".other", sys.argv[1])
"""
_CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def as_owner(program: str, path: Path) -> list[str]:
    setpriv = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]
    return [*setpriv, readable_python(), "-I", "-c", program, str(path)]


@contextmanager
def listening(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(as_owner(_LISTEN, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def network(open_folder: Path) -> Any:
    """The daemon's part of it, without a process."""
    folder = open_folder / "network-1"
    folder.mkdir(mode=0o700)
    os.chown(folder, OWNER, OWNER)
    made: Any = NetworkProcess.__new__(NetworkProcess)
    made._folder, made._pid = folder, -1
    made._user = pwd.struct_passwd(("n", "x", OWNER, OWNER, "", "/", "/bin/false"))
    made._config = SimpleNamespace(admin_socket=open_folder / "admin.sock")
    return made


def test_socket_becomes_roots_in_its_place(network: Any, open_folder: Path) -> None:
    with listening(network._folder / "admin.sock") as process:
        network._pid = process.pid
        network._publish_admin_socket()
        found = (open_folder / "admin.sock").stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o600, 0, 0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(open_folder / "admin.sock"))
        assert not network._folder.exists()


def test_socket_cannot_be_replaced_or_reached_while_it_is_published(
    network: Any, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the network user tries, before each step that changes the socket."""
    path, place, seen = network._folder / "admin.sock", open_folder / "admin.sock", set[int]()
    succeeded: list[str] = []

    def attacked(name: str) -> None:
        step: Any = getattr(os, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            for attack in (_CONNECT, _REPLACE):
                ended = subprocess.run(as_owner(attack, path), check=False, stderr=subprocess.DEVNULL)
                succeeded.extend([name] if ended.returncode == 0 else [])
            done = step(*args, **options)
            if place.exists():
                seen.add(place.lstat().st_ino)
            return done

        monkeypatch.setattr(os, name, wrapper)

    with listening(path) as process:
        network._pid, inode = process.pid, path.lstat().st_ino
        for name in ("chown", "chmod", "rename"):
            attacked(name)
        try:
            network._publish_admin_socket()
        finally:
            monkeypatch.undo()
        assert (succeeded, seen) == ([], {inode})


def test_socket_of_another_process_is_refused(network: Any, open_folder: Path) -> None:
    with listening(network._folder / "admin.sock"):
        network._pid = os.getpid()
        with pytest.raises(Internal, match="belongs to another process"):
            network._publish_admin_socket()
    assert not (open_folder / "admin.sock").exists()


@pytest.mark.parametrize("kind", ["link", "file", "second name", "beside"])
def test_anything_but_the_socket_alone_is_refused(network: Any, open_folder: Path, kind: str) -> None:
    path: Path = network._folder / "admin.sock"
    real = open_folder / "real.sock" if kind == "link" else path
    real.parent.chmod(0o777)
    with listening(real) as process:
        network._pid = process.pid
        if kind == "link":
            path.symlink_to(real)
        elif kind == "file":
            path.unlink()
            path.touch()
        elif kind == "second name":
            os.link(path, open_folder / "second")
        else:
            (network._folder / "more").touch()
        with pytest.raises(Internal, match="something else than its socket"):
            network._publish_admin_socket()
    assert not (open_folder / "admin.sock").exists()
