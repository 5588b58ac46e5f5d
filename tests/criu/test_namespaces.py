"""Criu enters only namespaces that the daemon is in or that root made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from snapshotd.api.errors import Refused
from snapshotd.criu.session import verified_namespaces
from snapshotd.proc import namespaces

pytestmark = pytest.mark.root

AS_USER = ("setpriv", "--reuid=1500", "--regid=1500", "--clear-groups")


@pytest.fixture
def waiting() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(waiting: list[subprocess.Popen[bytes]], *command: str) -> int:
    """A process that has set itself up: it prints a line, then waits."""
    process = subprocess.Popen([*command, "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    waiting.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process.pid


def test_nothing_is_entered_for_a_rank_in_the_daemons_namespaces(waiting: list[subprocess.Popen[bytes]]) -> None:
    with verified_namespaces(start(waiting, *AS_USER), 0) as entered:
        assert entered == {}


def test_namespaces_that_the_guest_keeper_made_as_root_are_entered(waiting: list[subprocess.Popen[bytes]]) -> None:
    pid = start(waiting, "unshare", "--mount")
    with verified_namespaces(pid, pid) as entered:
        assert list(entered) == ["mnt"]
        assert os.fstat(entered["mnt"]).st_ino == os.stat(f"/proc/{pid}/ns/mnt").st_ino
    with pytest.raises(Refused, match=r"namespaces: .* mnt namespace"), verified_namespaces(pid, 0):
        pass


@pytest.mark.parametrize("kind", ["--mount", "--net"])
def test_namespaces_that_a_user_made_are_refused(waiting: list[subprocess.Popen[bytes]], kind: str) -> None:
    """Even if the keeper, which is the user's process, is in the same one."""
    pid = start(waiting, *AS_USER, "unshare", "--user", "--map-root-user", kind)
    with pytest.raises(Refused, match="namespaces"), verified_namespaces(pid, pid):
        pass
    handle = namespaces.opened(pid, "mnt" if kind == "--mount" else "net")
    assert not namespaces.made_by_root(handle)
    os.close(handle)
