"""Snapshots for which the nodes have no memory lie on their disks: a job is rolled back from there, and a disk that is full
costs it a snapshot and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.gpu_nodes import GpuCluster
from integration.harness import PATIENCE_S, Cluster, until
from integration.job_commands import WHOLE_JOBS, ask, snapshots
from integration.job_device_memory import asking, kill, sizes, start
from integration.offloads import LARGE_MIB, MIB, UNDONE, part
from integration.torch_jobs import TorchJob, TorchLab, at_rest
from snapshotd.runtime.faults import Point
from snapshotd.transport.image.store import MOVE_NAME

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900), WHOLE_JOBS]

ONE, TWO = "node-1", "node-2"
#: Of /run, which has the images: less than a rank of torch has.
LITTLE = "96m"
#: Room for the images of a rank and of its buddy, twice.
DISK_BYTES = 4 << 30
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
    """The directory, as this process and the node see it unless something is mounted on it there."""
    folder = nodes.lab.layout.state / f"disk-{node}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _images(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if MOVE_NAME.fullmatch(path.name)]


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
    until(
        "it to replace the one before",
        lambda: [one["record"] for one in snapshots(nodes, job.name)] == [taken["record"]],
    )
    until("the images of that to be removed", lambda: all(len(_images(disk)) == 2 for disk in disks.values()))
    job.end.touch()
    assert job.finish() == [0, 0], f"{job.text()}\n{nodes.logs()}"
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("the images to be removed with their job", lambda: not any(_images(disk) for disk in disks.values()))
    until("nothing to be left", lambda: not nodes.leftovers())


@contextlib.contextmanager
def _small_disk(nodes: Cluster, node: str) -> Iterator[Path]:
    """A file system of its own on the disk's directory; its path for this process."""
    folder, image = _disk(nodes, node), nodes.folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    if nodes.lab.spawn(node, ["mount", "-o", "loop", str(image), str(folder)]).wait(PATIENCE_S) != 0:
        pytest.skip("needs a loop device, for a small disk")
    try:
        yield Path(f"/proc/{nodes.lab.daemon_pid(node)}/root{folder}")
    finally:
        nodes.configure(node, {KEY: ""})
        _inside(nodes, node, "umount", str(folder))
        image.unlink()


def _fill(folder: Path) -> Path:
    """Takes all space that is left there, down to the last block."""
    path = folder / "filling"
    with path.open("ab") as file:
        with contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, 16 << 20)
        with contextlib.suppress(OSError):
            while os.write(file.fileno(), bytes(4096)):
                pass
    return path


@pytest.mark.parametrize("point", [Point.BEFORE_DUMP, Point.COPYING])
def test_disk_that_fills_up_in_a_snapshot_costs_only_that_snapshot(torch_lab: TorchLab, point: Point) -> None:
    nodes = torch_lab.cluster
    with _small_disk(nodes, TWO):
        for node in (ONE, TWO):
            nodes.configure(node, {KEY: str(_disk(nodes, node))})
        disk = Path(f"/proc/{nodes.lab.daemon_pid(TWO)}/root{_disk(nodes, TWO)}")
        job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="full")
        job.await_steps(3)
        first = ask(nodes, "snapshot", job.name)
        kept = {path.name for path in _images(disk)}
        assert len(kept) == 2
        job.await_progress(2)
        with asking(nodes, TWO, point, "wait", "snapshot", job.name) as asked:
            filling = _fill(disk)
        assert asked.code != 0, asked
        assert "full" in asked.answer["reason"] or "No space left" in asked.answer["reason"], asked
        job.await_progress(2)
        assert [one["record"] for one in snapshots(nodes, job.name)] == [first["record"]]
        until("what there is of it to be removed", lambda: {path.name for path in _images(disk)} == kept)
        filling.unlink()
        ask(nodes, "rollback", job.name)
        job.await_progress(2)
        ask(nodes, "snapshot", job.name)
        job.await_progress(2)
        job.end.touch()
        job.assert_whole()
        torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
        until("the images to be removed with their job", lambda: not _images(disk))
    until("nothing to be left", lambda: not nodes.leftovers())


@pytest.fixture
def holding(fake_gpu_lab: GpuCluster) -> Iterator[GpuCluster]:
    """A GPU whose memory has no room in that of the host."""
    nodes = fake_gpu_lab.cluster
    for node in (ONE, TWO):
        _inside(nodes, node, "mount", "-o", f"remount,size={LARGE_MIB}m", "/run")
        fake_gpu_lab.configure(node, {KEY: str(_disk(nodes, node))})
    yield fake_gpu_lab
    for node in (ONE, TWO):
        _inside(nodes, node, "mount", "-o", "remount,size=90%", "/run")
        fake_gpu_lab.configure(node, {KEY: ""})
    fake_gpu_lab.reset()


def test_held_device_memory_goes_to_the_disk_directly(holding: GpuCluster) -> None:
    nodes, job = holding.cluster, start(holding)
    disks = [_disk(nodes, node) for node in (ONE, TWO)]
    answer = ask(nodes, "snapshot", job.name)
    assert answer["ranks"][0]["copy"] == TWO
    taken = sizes(answer)
    assert LARGE_MIB * MIB <= taken["offload"] == taken["give-back"] == taken["save"], taken
    assert taken["sync"] > LARGE_MIB * MIB
    for disk in disks:
        (image,) = _images(disk)
        assert sum(path.stat().st_size for path in image.glob("device-*")) == taken["save"]
    job.await_progress(3)
    kill(holding, job)
    back = ask(nodes, "rollback", job.name)
    assert part(back, "refill")["bytes"] == taken["offload"]
    job.await_progress(3)
    holding.ends_well(job)
    until("the images to be removed with their job", lambda: not any(map(_images, disks)))


@contextlib.contextmanager
def _frozen(disk: Path) -> Iterator[None]:
    """What writes to it waits in the kernel."""
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=True)


def _waits_for_disk(pid: int | None) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return "D" in states


def test_disk_that_does_not_answer_holds_up_no_move(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    other = nodes.workload(ONE, "chain.py")
    other.await_lines(3)
    with _small_disk(nodes, TWO):
        for node in (ONE, TWO):
            nodes.configure(node, {KEY: str(_disk(nodes, node))})
        daemon = nodes.lab.daemon_pid(TWO)
        disk = Path(f"/proc/{daemon}/root{_disk(nodes, TWO)}")
        job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="stalled")
        job.await_steps(3)
        point = Point.RECEIVING
        with asking(nodes, TWO, point, "wait", "snapshot", job.name) as asked, _frozen(disk):
            (nodes.run_dir(TWO) / f"{point}.go").touch()
            until("the daemon to wait for the disk", lambda: _waits_for_disk(daemon))
            nodes.move(other, TWO)
            nodes.move(other, ONE)
            assert _waits_for_disk(daemon)
            job.await_progress(2)
        assert asked.code == 0 or asked.answer["reason"], asked  # on a busy machine it may have been given up meanwhile
        ask(nodes, "snapshot", job.name)
        os.kill(_rank_1(nodes, job), signal.SIGKILL)
        ask(nodes, "rollback", job.name)
        job.await_progress(2)
        job.end.touch()
        assert job.finish() == [0, 0], f"{job.text()}\n{nodes.logs()}"
        torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
        until("the images to be removed with their job", lambda: not _images(disk))
    other.process.terminate()
    assert other.finish() == 0
    until("nothing to be left", lambda: not nodes.leftovers())
