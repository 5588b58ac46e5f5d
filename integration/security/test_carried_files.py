"""A user who controls the paths of a rank's files gets neither root's files read nor written by moving that rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.harness import Cluster, Job, until
from integration.security.user_ranks import USER as USER_ID
from integration.security.user_ranks import user_folder
from snapshotd.runtime.faults import Point

pytestmark = pytest.mark.root

HOME, AWAY = "node-1", "spare-1"
NAMES = ("carrier", "carrier-kept", "root-only")
#: Has files below /tmp open: one that it reads again at every step, and a set-user-id program.
CARRIER = """
import os, time
os.makedirs("/tmp/carrier", exist_ok=True)
state = os.open("/tmp/carrier/state", os.O_RDWR | os.O_CREAT, 0o600)
os.pwrite(state, b"of the user", 0)
program = os.open("/tmp/carrier/program", os.O_RDWR | os.O_CREAT, 0o755)
os.fchmod(program, 0o6755)
step = 0
while True:
    owner, mode = os.fstat(state).st_uid, os.fstat(program).st_mode
    print("step", step, os.pread(state, 100, 0).decode(), owner, f"{mode:o}", flush=True)
    step += 1
    time.sleep(0.03)
"""


def tmp_of(nodes: Cluster, node: str) -> Path:
    """A node's /tmp, from outside."""
    return nodes.run_dir(node).parents[1] / "tmp"


def daemon_pids(nodes: Cluster, node: str) -> list[str]:
    """The numbers of a node's daemon, in every pid namespace."""
    status = Path(f"/proc/{nodes.lab.daemon_pid(node)}/status").read_text()
    return next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))


@pytest.fixture
def job(nodes: Cluster) -> Iterator[Job]:
    with user_folder() as folder:
        started = folder.start(nodes, HOME, CARRIER, "carrier")
        started.await_lines(3)
        for node in (HOME, AWAY):
            secrets = tmp_of(nodes, node) / "root-only"
            secrets.mkdir(mode=0o700)
            for name in ("program", "state"):
                (secrets / name).write_text("of root")
        yield started
        started.kill()
    for node in (HOME, AWAY):
        for name in NAMES:
            path = tmp_of(nodes, node) / name
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def own(path: Path) -> None:
    os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def last_line(job: Job) -> str:
    """The last line that is complete."""
    return job.text().rpartition("\n")[0].splitlines()[-1]


def intact(nodes: Cluster, job: Job) -> None:
    """Root's files are as they were, and the rank has only its own."""
    for node in (HOME, AWAY):
        secrets = tmp_of(nodes, node) / "root-only"
        assert sorted(path.name for path in secrets.iterdir()) == ["program", "state"]
        assert {(path.read_text(), path.stat().st_uid) for path in secrets.iterdir()} == {("of root", 0)}
    assert "of root" not in job.text()


def test_links_laid_on_the_target_lead_root_nowhere(nodes: Cluster, job: Job) -> None:
    """The former name of an unfinished file was that of the file with the daemon's pid."""
    folder = tmp_of(nodes, AWAY) / "carrier"
    folder.mkdir()
    own(folder)
    for pid in daemon_pids(nodes, AWAY):
        link = folder / f"state.{pid}.carried"
        if not link.is_symlink():
            link.symlink_to("/tmp/root-only/state")
            own(link)
    nodes.move(job, AWAY)
    job.await_progress()
    intact(nodes, job)
    assert (folder / "state").read_text() == "of the user"
    assert (folder / "state").stat().st_uid == USER_ID


def test_directory_swapped_for_a_link_after_the_dump_does_not_send_root_s_file(nodes: Cluster, job: Job) -> None:
    """When criu, which compares the path with the file, is done, and the file is not yet sent."""
    folder = tmp_of(nodes, HOME) / "carrier"

    def swap(criu: Path) -> None:
        until("the end of criu", lambda: not criu.exists())
        folder.rename(folder.with_name("carrier-kept"))
        folder.symlink_to("/tmp/root-only")
        own(folder)

    with ThreadPoolExecutor() as threads, nodes.moving(job, AWAY, HOME, Point.DUMPING) as asked:
        (criu,) = nodes.lab.layout.node_cgroup(HOME).rglob("criu-*")
        swapping = threads.submit(swap, criu)
    swapping.result()
    assert asked.code == 0, asked
    job.await_progress()
    intact(nodes, job)


def test_set_user_id_does_not_move(nodes: Cluster, job: Job) -> None:
    assert last_line(job).endswith(f" {USER_ID} 106755")
    nodes.move(job, AWAY)
    job.await_progress()
    assert last_line(job).endswith(f"of the user {USER_ID} 100755")
    assert (tmp_of(nodes, AWAY) / "carrier" / "program").stat().st_mode == 0o100755
    nodes.move(job, HOME)
    job.await_progress()
    assert last_line(job).endswith(f"of the user {USER_ID} 100755")
    intact(nodes, job)
