"""A rank that changes after preflight, or whose files are swapped during the restore, gains nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import Cluster
from integration.security.user_ranks import USER, UserFolder, await_line, user_folder
from snapshotd.api.errors import Undone
from snapshotd.criu.find import find_criu

pytestmark = pytest.mark.root

SOURCE, TARGET = "node-1", "spare-1"


@pytest.fixture
def folder() -> Iterator[UserFolder]:
    with user_folder() as made:
        yield made


#: Once `go` exists: enters a mount namespace of its own, where every path to criu leads to a script.
LEAVES_ITS_NAMESPACES = """
import ctypes, os, sys, time
go, proof, criu = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
step, done = 0, False
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
    if not done and os.path.exists(go):
        done = True
        if libc.unshare(0x10000000 | 0x00020000):
            print("no namespaces:", os.strerror(ctypes.get_errno()), flush=True)
            continue
        for name, text in (("setgroups", "deny"), ("uid_map", "0 1500 1"), ("gid_map", "0 1500 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        top = "/" + criu.split("/")[1]
        libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None)
        if libc.mount(b"tmpfs", top.encode(), b"tmpfs", 0, b"mode=755"):
            print("no mount:", os.strerror(ctypes.get_errno()), flush=True)
            continue
        os.makedirs(os.path.dirname(criu))
        with open(criu, "w") as file:
            file.write(f"#!/bin/sh\\nid -u > {proof}; chmod 666 {proof}; readlink /proc/self/ns/user >> {proof}\\n")
        os.chmod(criu, 0o755)
        print("changed", flush=True)
"""


def test_rank_that_enters_its_own_mount_namespace_runs_nothing_as_root(nodes: Cluster, folder: UserFolder) -> None:
    criu = str(Path(find_criu(None)[0]).resolve())
    go, proof = folder.own / "go", folder.own / "proof"
    job = folder.start(nodes, SOURCE, LEAVES_ITS_NAMESPACES, "unshare", str(go), str(proof), criu)
    job.await_lines(3)
    with nodes.moving(job, TARGET, SOURCE, "before-freeze") as asked:
        go.touch()
        await_line(job, "changed")
    assert not proof.exists(), f"the rank's script ran as user {proof.read_text()}"
    assert asked.code == Undone.exit_code, f"{asked}\n{nodes.logs()}"
    assert "namespaces" in asked.answer["reason"]
    job.await_progress()


#: Keeps a file open for writing, and writes to it once `go` exists.
WRITES_TO_A_FILE = """
import os, sys, time
name, go = sys.argv[1:]
file = os.open(name, os.O_RDWR)
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
    if os.path.exists(go):
        os.pwrite(file, b"written by the rank", 0)
"""


@pytest.mark.parametrize("owner", [0, USER])
def test_file_that_is_swapped_for_a_link_during_the_restore_is_not_opened(
    nodes: Cluster, folder: UserFolder, owner: int
) -> None:
    """Neither root's file, which the user could not open, nor another one of the user's, which is not what the rank had."""
    data, go, secret = folder.own / "data", folder.own / "go", folder.path / "secret"
    for path, user, text in ((data, USER, "the rank's"), (secret, owner, "a secret")):
        path.write_text(text)
        path.chmod(0o644)
        os.chown(path, user, user)
    job = folder.start(nodes, SOURCE, WRITES_TO_A_FILE, f"swap{owner}", str(data), str(go))
    job.await_lines(3)
    with nodes.moving(job, TARGET, TARGET, "before-restore") as asked:
        data.rename(folder.own / "aside")
        data.symlink_to(secret)
    go.touch()
    job.await_progress(20)
    assert secret.read_text() == "a secret"
    assert asked.code == Undone.exit_code, f"{asked}\n{nodes.logs()}"
    assert str(data)[1:] in asked.answer["reason"]
    assert (folder.own / "aside").read_text() == "written by the rank"


#: Keeps an unlinked file open, whose directory is swapped during the restore.
HAS_AN_UNLINKED_FILE = """
import os, sys, time
name, = sys.argv[1:]
file = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
os.write(file, b"content")
os.unlink(name)
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
"""


def test_unlinked_file_is_not_created_in_a_directory_of_root(nodes: Cluster, folder: UserFolder) -> None:
    """Criu creates it under its former name for a moment, which would be long enough for a file in /etc/cron.d."""
    inside, roots = folder.own / "inside", folder.path / "roots"
    inside.mkdir()
    os.chown(inside, USER, USER)
    roots.mkdir(mode=0o755)
    job = folder.start(nodes, SOURCE, HAS_AN_UNLINKED_FILE, "ghost", str(inside / "file"))
    job.await_lines(3)
    before = roots.stat().st_mtime_ns
    with nodes.moving(job, TARGET, TARGET, "before-restore") as asked:
        inside.rename(folder.own / "aside")
        inside.symlink_to(roots)
    assert roots.stat().st_mtime_ns == before, "something was created in a directory of root"
    assert asked.code == Undone.exit_code, f"{asked}\n{nodes.logs()}"
    job.await_progress()
