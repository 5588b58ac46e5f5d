"""Jobs that lock, log and show their progress as common libraries do: nothing of that is lost or changes by a move."""

from __future__ import annotations

import fcntl
import json
import re
import sys
from pathlib import Path

from integration.harness import Cluster, Job, until
from integration.screen import Screen
from snapshotd.api.errors import Refused

PROGRAMS = Path(__file__).parent / "programs"


def folder_for(nodes: Cluster, name: str) -> Path:
    """An empty folder that all nodes share."""
    folder = nodes.folder / name
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def started(nodes: Cluster, program: str, folder: Path) -> tuple[Job, Path]:
    end = folder / "end"
    job = nodes.start("node-1", [sys.executable, str(PROGRAMS / program), str(folder), "--end-file", str(end)])
    job.await_lines(3)
    return job, end


def test_shared_locks_move_and_an_exclusive_one_is_named(nodes: Cluster) -> None:
    folder = folder_for(nodes, "locks")
    job, end = started(nodes, "locks.py", folder)
    nodes.move(job, "spare-1")
    job.await_progress()
    (folder / "take").touch()
    until("the exclusive lock", lambda: job.lines()[-1].endswith("exclusive"))
    asked = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", "node-2", "--json")
    assert asked.returncode == Refused.exit_code, asked.stdout
    refusals = [check for check in json.loads(asked.stdout)["checks"] if check["verdict"] == "refuse"]
    assert [check["name"] for check in refusals] == ["file-locks"]
    assert f"{folder}/exclusive" in refusals[0]["reason"]
    (folder / "take").unlink()
    until("its release", lambda: job.lines()[-1].endswith("shared"))
    nodes.move(job, "node-2")
    job.await_progress()
    with (folder / "flock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            raise AssertionError("another process can take the lock that the rank has")
    job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    for kind in ("flock", "posix", "ofd"):
        with (folder / kind).open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_records_of_trackers_are_complete(nodes: Cluster) -> None:
    """A writer thread as TensorBoard's, and a service process as wandb's."""
    job, end = started(nodes, "trackers.py", folder_for(nodes, "trackers"))
    for to in ("spare-1", "node-2"):
        nodes.move(job, to)
        job.await_progress()
    steps = job.end_soon(end)
    assert job.finish() == 0, job.text()[-500:]
    assert job.lines() == [*(f"step {step}" for step in range(steps)), "DONE"]


def test_progress_bar_continues_on_its_terminal(nodes: Cluster) -> None:
    """tqdm asks the terminal for its width in every step."""
    folder, screen = folder_for(nodes, "bar"), Screen(24, 80)
    command = [sys.executable, str(PROGRAMS / "progress_bar.py"), "--end-file", str(folder / "end")]
    job = nodes.start("node-1", command, **screen.of_a_job())

    def counts() -> list[int]:
        return [int(count) for count in re.findall(rb"bar: (\d+)it", screen.seen)]

    def await_steps() -> None:
        since = len(counts())
        until("progress of the bar", lambda: len(counts()) > since + 5)

    await_steps()
    nodes.move(job, "spare-1")
    await_steps()
    screen.resize(24, 60)
    nodes.move(job, "node-2")
    await_steps()
    steps = counts()[-1] + 50
    (folder / "new").write_text(str(steps))
    (folder / "new").rename(folder / "end")
    screen.shows("DONE")
    assert job.finish() == 0, screen.seen[-500:]
    until("the last count", lambda: counts()[-1] == steps)
    assert sorted(counts()) == counts()
    assert b"Traceback" not in screen.seen
