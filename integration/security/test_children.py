"""The daemon's children that touch what a user or another node made have neither root's rights nor a way to get them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import Cluster, Job, until
from integration.security.user_ranks import USER, user_folder
from snapshotd.proc import privileges, stat
from snapshotd.proc.privileges import Credentials
from snapshotd.sandbox import filter as seccomp
from snapshotd.sandbox.privileges import CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE

pytestmark = pytest.mark.root

HOME, AWAY = "node-1", "spare-1"
NOBODY = 65534
PROGRAM = """
import time
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.03)
"""
FILTERED = 2 if seccomp.available() else 0
READER, PARSER = "snapshotd.proc.foreign_memory_child", "snapshotd.criu.image_parser"


@pytest.fixture
def job(nodes: Cluster) -> Iterator[Job]:
    with user_folder() as folder:
        started = folder.start(nodes, HOME, PROGRAM, "plain-rank")
        started.await_lines(3)
        yield started
        started.kill()


def children(nodes: Cluster, node: str, module: str, user_id: int) -> list[Credentials]:
    """What the children of a node's daemon may do that run a module as this user."""
    daemon, found = nodes.lab.daemon_pid(node), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = stat.read(int(folder.name)).parent == daemon
            if ours and module in (folder / "cmdline").read_text().split("\0"):
                found.append(privileges.read(int(folder.name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [one for one in found if one.user_ids == (NOBODY,) * 3 + (user_id,)]  # the user's for files alone


def sandboxed(nodes: Cluster, node: str, module: str, user_id: int) -> list[Credentials]:
    """The same, once there is one and all of them have entered their sandbox."""

    def entered() -> list[Credentials]:
        found = children(nodes, node, module, user_id)
        return found if all(one.seccomp == FILTERED and one.no_new_privs for one in found) else []

    found: list[Credentials] = until(f"a child of {node} that runs {module} as user {user_id}", entered)
    return found


def test_memory_is_read_by_the_rank_s_user_and_images_by_nobody(nodes: Cluster, job: Job) -> None:
    nodes.move(job, AWAY)
    job.await_progress()
    for node in (HOME, AWAY):
        readers = sandboxed(nodes, node, READER, USER)
        assert {one.capabilities for one in readers} == {1 << CAP_SYS_PTRACE | 1 << CAP_CHECKPOINT_RESTORE}
        assert {one.inheritable for one in readers} == {0}
        # Other tests of the same lab leave readers with other groups, or none, to their next rank.
        assert ((USER,) * 4, (USER,)) in {(one.group_ids, one.groups) for one in readers}
    parsers = sandboxed(nodes, AWAY, PARSER, NOBODY)  # the one of the next image
    assert {(one.capabilities, one.inheritable, one.groups) for one in parsers} == {(0, 0, ())}
