"""Snapshots for which the nodes have no memory lie on their disks, and a job is rolled back from there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import PATIENCE_S, Cluster, until
from integration.job_device_memory import ask
from integration.offloads import UNDONE
from integration.torch_jobs import TorchJob, TorchLab, at_rest
from snapshotd.transport.image.store import MOVE_NAME

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

ONE, TWO = "node-1", "node-2"
#: Of /run, which has the images: less than a rank of torch has.
LITTLE = "96m"
KEY = "snapshot_spill_dir"


@pytest.fixture
def torch_lab(plain_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(plain_lab) as lab:
        try:
            for node in (ONE, TWO):
                _inside(plain_lab, node, "mount", "-o", f"remount,size={LITTLE}", "/run")
            yield lab
        finally:
            for node in (ONE, TWO):
                plain_lab.configure(node, {KEY: ""})
                _inside(plain_lab, node, "mount", "-o", "remount,size=90%", "/run")


def _inside(nodes: Cluster, node: str, *command: str) -> None:
    assert nodes.lab.spawn(node, list(command)).wait(PATIENCE_S) == 0


def _disk(nodes: Cluster, node: str) -> Path:
    folder = nodes.lab.layout.state / f"disk-{node}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _images(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if MOVE_NAME.fullmatch(path.name)]


def _snapshots(nodes: Cluster, job: str) -> list[str]:
    listed = ask(nodes, "list", "--all")["jobs"]
    return [one["record"] for one in listed if (one["job"], one["state"]) == (job, "snapshot")]


def _rank_1(nodes: Cluster, job: TorchJob) -> int:
    ranks = nodes.processes_of(str(job.end))
    (one,) = [pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    return one


def test_job_without_memory_for_snapshots_is_rolled_back_from_disks(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="spilled")
    job.await_steps(3)
    refused = ask(nodes, "snapshot", job.name, expect=UNDONE)
    assert refused["error"] == "full"
    assert "MiB for its images" in refused["reason"], refused
    assert KEY in refused["remedy"], refused

    disks = {node: _disk(nodes, node) for node in (ONE, TWO)}
    for node, disk in disks.items():
        nodes.configure(node, {KEY: str(disk)})
    job.await_progress(2)
    first = ask(nodes, "snapshot", job.name)
    assert "sync" in {part["name"] for part in first["parts"]}, first
    for node, disk in disks.items():
        assert len(_images(disk)) == 2, "its own rank's, and that of the other"
        assert not _images(nodes.run_dir(node) / "images")
        for path in (disk, *_images(disk)):
            assert path.stat().st_mode & 0o777 == 0o700
        for path in (file for image in _images(disk) for file in image.iterdir()):
            assert path.stat().st_mode & 0o777 == 0o600, path
    nodes.lab.kill_daemon(TWO)  # the next one finds them
    nodes.lab.start_daemon(TWO)
    assert len(_images(disks[TWO])) == 2
    job.await_progress(2)
    os.kill(_rank_1(nodes, job), signal.SIGKILL)
    back = ask(nodes, "rollback", job.name)
    assert {rank["rank"]: rank["node"] for rank in back["ranks"]} == {0: ONE, 1: TWO}
    job.await_progress(2)

    taken = ask(nodes, "snapshot", job.name)
    until("it to replace the one before", lambda: _snapshots(nodes, job.name) == [taken["record"]])
    until("the images of that to be removed", lambda: all(len(_images(disk)) == 2 for disk in disks.values()))
    job.end.touch()
    assert job.finish() == [0, 0], f"{job.text()}\n{nodes.logs()}"
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the images to be removed with their job", lambda: not any(_images(disk) for disk in disks.values()))
    until("nothing to be left", lambda: not nodes.leftovers())
