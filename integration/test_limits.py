"""Memory that a move uses on the source, and space that it needs on the target. The benchmark has the full-size numbers."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.harness import PATIENCE_S, Cluster, Job, files_below, pids_in, until

pytestmark = pytest.mark.root

SOURCE, TARGET = "node-1", "spare-1"
MIB = 1 << 20
#: Of a target's connections for images: a chunk each, with the defaults.
BUFFERS = 8 * 8 * MIB


def until_ended(nodes: Cluster) -> tuple[str, str]:
    """Arguments of a workload that goes on until `end`, however slow the machine is."""
    (nodes.folder / "end").unlink(missing_ok=True)
    return "--end-file", str(nodes.folder / "end")


def end(nodes: Cluster, job: Job) -> None:
    """Lets the job end, and compares its memory with what it was at the beginning."""
    job.end_soon(nodes.folder / "end")
    assert job.finish() == 0
    assert job.lines()[-1] == "SAME"


def ready(job: Job) -> Job:
    until("the rank to allocate its memory", lambda: "READY" in job.lines())
    return job


@dataclass
class Used:
    """Memory of one node in bytes, without its ranks."""

    daemon: int = 0
    criu: int = 0
    tmpfs: int = 0

    def total(self) -> int:
        return self.daemon + self.criu + self.tmpfs


def used(nodes: Cluster, node: str) -> Used:
    pid = nodes.lab.daemon_pid(node)
    assert pid is not None
    found = Used(daemon=rss_bytes(pid))
    for group in files_below(nodes.lab.layout.node_cgroup(node), "cgroup.procs"):
        if group.parent.name.startswith("criu-"):
            found.criu += sum(rss_bytes(pid) for pid in pids_in(group))
    for place in ("run", "tmp", "dev/shm"):
        room = os.statvfs(f"/proc/{pid}/root/{place}")
        found.tmpfs += (room.f_blocks - room.f_bfree) * room.f_frsize
    return found


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@contextlib.contextmanager
def watched(nodes: Cluster, node: str) -> Iterator[Used]:
    """The peak of a node's memory during the block, above that at its beginning."""
    before, peak, over = used(nodes, node), Used(), threading.Event()
    samples = [0]

    def watch() -> None:
        while not over.wait(0.01):
            now = used(nodes, node)
            peak.daemon = max(peak.daemon, now.daemon - before.daemon)
            peak.criu = max(peak.criu, now.criu)
            peak.tmpfs = max(peak.tmpfs, now.tmpfs - before.tmpfs)
            samples[0] += 1

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
    assert samples[0] > 20, "too few samples to know the peak"


def test_source_never_holds_a_second_copy(nodes: Cluster) -> None:
    size = ("--mib", "768", "--ghost-mib", "256")
    job = ready(nodes.workload(SOURCE, "memory.py", *size, *until_ended(nodes)))
    with watched(nodes, SOURCE) as source, watched(nodes, TARGET) as target:
        result = nodes.move(job, TARGET)
    assert result["bytes"] > 1024 * MIB, "the rank was not that large"
    # The sum of the peaks of its parts is an upper bound: they need not coincide.
    assert source.total() < 256 * MIB, source
    assert source.criu > 0, "criu was never seen"
    assert target.daemon < BUFFERS + 96 * MIB, target
    end(nodes, job)
    until("nothing to be left", lambda: not nodes.leftovers())


def test_zero_pages_are_not_sent(nodes: Cluster) -> None:
    job = ready(nodes.workload(SOURCE, "memory.py", "--mib", "8", "--zero-mib", "256", *until_ended(nodes)))
    result = nodes.move(job, TARGET)
    assert 8 * MIB < result["bytes"] < 64 * MIB
    end(nodes, job)


def test_images_are_private_to_root_and_removed_afterwards(nodes: Cluster) -> None:
    job = ready(nodes.workload(SOURCE, "memory.py", "--mib", "32", "--steps", "100000"))
    store = nodes.run_dir(TARGET) / "images"
    with nodes.moving(job, TARGET, TARGET, "seal") as asked:
        (folder,) = (path for path in store.iterdir() if path.name.startswith("m-"))
        files = list(folder.iterdir())
        assert sum(path.stat().st_size for path in files) > 32 * MIB
        assert modes([store, folder]) == {0o700}
        assert modes(files) == {0o600}
        assert {path.stat().st_uid for path in [store, folder, *files]} == {0}
    assert asked.code == 0
    until("the images to be removed", lambda: not images_left(nodes))
    job.kill()


def modes(paths: list[Path]) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


def images_left(nodes: Cluster) -> list[str]:
    return [left for left in nodes.leftovers() if "/images/" in left]


# ---------------------------------------------------------------- a full target


@contextlib.contextmanager
def little_room(nodes: Cluster, size_mib: int) -> Iterator[None]:
    """While the block runs, the target's /run has this size."""
    resize(nodes, f"{size_mib}m")
    try:
        yield
    finally:
        resize(nodes, "90%")


def resize(nodes: Cluster, size: str) -> None:
    assert nodes.lab.spawn(TARGET, ["mount", "-o", f"remount,size={size}", "/run"]).wait(PATIENCE_S) == 0


def test_target_without_room_refuses_before_the_freeze(nodes: Cluster) -> None:
    job = ready(nodes.workload(SOURCE, "memory.py", "--mib", "64", "--steps", "100000"))
    with little_room(nodes, 32):
        result = nodes.move(job, TARGET, expect=10)
        checked = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", TARGET)
    assert result["outcome"] == "refused"
    assert "image-room" in result["reason"]
    assert "enlarge the tmpfs" in result["reason"]
    assert [phase["name"] for phase in result["phases"]] == ["preflight"]
    assert checked.returncode == 10
    assert "image-room" in checked.stdout
    job.await_progress()
    nodes.move(job, TARGET)
    job.await_progress()


def test_target_that_fills_up_during_a_move_undoes_it(nodes: Cluster) -> None:
    job = ready(nodes.workload(SOURCE, "memory.py", "--mib", "128", "--steps", "100000"))
    with contextlib.ExitStack() as stack:
        with nodes.moving(job, TARGET, TARGET, "prepare") as asked:
            stack.enter_context(little_room(nodes, 48))
        assert asked.code == 11
        assert asked.answer["outcome"] == "undone"
        assert asked.answer["error"] == "full"
        assert "no space left" in asked.answer["reason"]
        assert asked.answer["where"] == "running on source"
        job.await_progress()
        assert not images_left(nodes)
    nodes.move(job, TARGET)
    job.await_progress()
    job.process.send_signal(signal.SIGKILL)
