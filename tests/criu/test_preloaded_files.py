"""What is preloaded into criu uses the rank's paths with the rights of the rank's user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shim

pytestmark = pytest.mark.root

LIBRARY = Path(shim.__file__).with_name("lib") / "libcriufiles.so"
USER = 1500

#: Tries each call on the paths in its arguments and prints the errors; before and after criu would read the process tree.
PROGRAM = """
import ctypes, errno, os, socket, sys
images, roots, users = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
root = os.open("/", os.O_PATH)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) >= 0:
        return "done"
    return errno.errorcode[ctypes.get_errno()]

def attempts(folder):
    def path(name):
        return f"{folder}/{name}".encode()
    yield "open", call("open", path("file"), os.O_RDWR)
    yield "openat", call("openat", root, path("file")[1:], os.O_RDWR)
    yield "create", call("open64", path("made"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    yield "linkat", call("linkat", root, path("made")[1:], root, path("linked")[1:], 0)
    yield "chown", call("fchownat", -100, path("made"), 1500, 1500, 0)
    yield "chmod", call("fchmodat", -100, path("made"), 0o600, 0)
    yield "rename", call("rename", path("made"), path("renamed"))
    yield "unlinkat", call("unlinkat", root, path("linked")[1:], 0)
    yield "unlink", call("unlink", path("renamed"))
    yield "mkdir", call("mkdir", path("folder"), 0o755)
    yield "rmdir", call("rmdir", path("folder"))
    yield "mknod", call("mknod", path("fifo"), 0o10600, 0)
    yield "remove", call("unlink", path("fifo"))
    with socket.socket(socket.AF_UNIX) as one:
        address = b"\\x01\\x00" + path("socket") + b"\\x00"
        yield "bind", call("bind", one.fileno(), address, len(address))
    yield "clean", call("unlink", path("socket"))

def report(what):
    for folder in (roots, users):
        wrong = {name: how for name, how in attempts(folder) if how != "done"}
        print(what, os.path.basename(folder), wrong)
    with open(f"{images}/own.img") as file:  # criu's own files stay root's
        print(what, "own", file.read())
    with open("/proc/self/status") as file:
        print(what, [line.split()[1:5] for line in file if line.startswith("Uid")])

report("before")
os.close(os.open(f"{images}/pstree.img", os.O_RDONLY))
report("after")
"""


@pytest.fixture
def places(open_folder: Path) -> Path:
    """Every user can enter it; `users` belongs to a user, `roots` and the images to root."""
    for name, owner, mode in (("roots", 0, 0o755), ("users", USER, 0o755), ("images", 0, 0o700)):
        folder = open_folder / name
        folder.mkdir()
        for file in ("file", "pstree.img", "own.img"):
            (folder / file).write_text("text")
            (folder / file).chmod(0o600)
            os.chown(folder / file, owner, owner)
        os.chown(folder, owner, owner)
        folder.chmod(mode)
    return open_folder


def output(places: Path, **environment: str) -> list[str]:
    arguments = [str(places / name) for name in ("images", "roots", "users")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "LD_PRELOAD": str(LIBRARY), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_calls_have_the_rights_of_the_user_once_criu_reads_the_process_tree(places: Path) -> None:
    lines = output(places, SNAPSHOT_RANK_USER=f"{USER}:{USER}:{USER},1600", SNAPSHOT_IMAGES=str(places / "images"))
    everything = ["open", "openat", "create", "linkat", "chown", "chmod", "rename", "unlinkat", "unlink", "mkdir"]
    everything += ["rmdir", "mknod", "remove", "bind", "clean"]
    assert lines[:4] == ["before roots {}", "before users {}", "before own text", "before [['0', '0', '0', '0']]"]
    denied = eval(lines[4].removeprefix("after roots "))
    assert list(denied) == everything
    assert {denied[name] for name in ("open", "openat", "create", "mkdir", "mknod", "bind")} == {"EACCES"}
    assert lines[5:] == ["after users {}", "after own text", "after [['0', '0', '0', '0']]"]
    assert sorted(path.name for path in (places / "roots").iterdir()) == ["file", "own.img", "pstree.img"]


def test_link_to_a_file_of_root_is_not_followed_with_roots_rights(places: Path) -> None:
    (places / "users" / "file").unlink()
    (places / "users" / "file").symlink_to(places / "roots" / "file")
    lines = output(places, SNAPSHOT_RANK_USER=f"{USER}:{USER}:", SNAPSHOT_IMAGES=str(places / "images"))
    assert lines[1] == "before users {}"
    assert lines[5] == "after users {'open': 'EACCES', 'openat': 'EACCES'}"


def test_nothing_changes_without_a_user(places: Path) -> None:
    lines = output(places)
    assert [line for line in lines if line.startswith("after")][:2] == ["after roots {}", "after users {}"]
