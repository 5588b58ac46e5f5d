"""Files that a rank had open for writing at a snapshot, and that its program has deleted, renamed, replaced or shortened
since: the job is rolled back, and what happens to the files is what the user has chosen."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import MIGRATOR, WORKLOADS, Cluster, Job, until
from integration.job_commands import WHOLE_JOBS
from snapshotd.runtime.faults import Point
from tests.installation import readable_copy, readable_python

pytestmark = [pytest.mark.root, pytest.mark.slow, WHOLE_JOBS]

ONE, TWO = "node-1", "node-2"
#: More than is copied into an image: only a descriptor keeps it.
LARGE = 3 << 20


class Scratch:
    """A rank that works in a directory of its own, which all nodes see."""

    def __init__(self, nodes: Cluster, size_bytes: int = 0) -> None:
        self.nodes, self.size_bytes = nodes, size_bytes
        self.folder = self._folder()
        self.file = self._file()
        self.do, self.end = self.folder / "do", self.folder / "end"
        arguments = ["--file", self.file, "--bytes", size_bytes, "--do", self.do, "--end-file", self.end]
        self.job = self._start([str(word) for word in arguments])
        self.job.await_lines(3)

    def _folder(self) -> Path:
        folder = self.nodes.folder / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _file(self) -> Path:
        return self.folder / "work" / "data.tmp"

    def _start(self, arguments: list[str]) -> Job:
        return self.nodes.workload(ONE, "scratch.py", *arguments)

    def snapshot(self) -> dict[str, Any]:
        return self.ask("snapshot")

    def ask(self, *words: str, expect: int = 0) -> dict[str, Any]:
        done = self.nodes.migrator("job", words[0], self.job.name, *words[1:], "--json")
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.nodes.logs()}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def roll_back(self, *words: str) -> dict[str, Any]:
        """Repeats it while a daemon cleans up after an attempt before."""
        answer: dict[str, Any] = {}

        def is_done() -> bool:
            done = self.nodes.migrator("job", "rollback", self.job.name, *words, "--json")
            answer.update(json.loads(done.stdout or done.stderr))
            return done.returncode == 0

        try:
            until("the rollback", is_done)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{answer}\n{self.nodes.logs()}") from None
        return answer

    def assert_changed(self, answer: dict[str, Any], change: str, action: str) -> str:
        """A rollback has dealt with the rank's file alone, in this way. Returns the name of what is kept beside it."""
        (changed,) = answer["changed_files"]
        assert (changed["rank"], changed["path"]) == (0, str(self.file))
        assert (changed["change"], changed["action"]) == (change, action)
        return str(changed["beside"])

    def killed_at(self, point: Point, what: str) -> None:
        """Asks for it until the daemon is killed at a fault point, and does not wait for what becomes of it then."""
        self.nodes.fault(ONE, point, "kill")
        while self.nodes.lab.daemon_pid(ONE) is not None:
            command = [*MIGRATOR, "job", what, self.job.name]
            with subprocess.Popen(
                command, env=self.nodes.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as asked:
                until(
                    "the daemon to be killed, or a refusal",
                    lambda: self.nodes.lab.daemon_pid(ONE) is None or asked.poll() is not None,
                )
                asked.kill()

    def fail(self, what: str) -> None:
        """Has the program do that to its file, and end."""
        (pid,) = self.nodes.processes_of(str(self.do))
        self.job.await_progress(3)
        self.do.write_text(what)
        until("the rank to end", lambda: pid not in self.nodes.processes_of(str(self.do)))

    def assert_ends_well(self) -> None:
        """It prints what it prints without a rollback, each line once, and has the whole file."""
        steps = self.job.end_soon(self.end)
        assert self.job.finish() == 0, f"{self.job.text()}\n{self.nodes.logs()}"
        state, content, lines = b"", b"." * self.size_bytes, []
        for step in range(steps):
            state = hashlib.sha256(state).digest()
            content += f"{step} {state.hex()}\n".encode()
            lines.append(f"step {step} {state.hex()[:16]}")
        assert self.job.lines() == [*lines, "DONE", f"content {hashlib.sha256(content).hexdigest()}"]
        if self.file.is_relative_to(self.folder):  # else only the node sees it
            assert self.file.read_bytes() == content
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        until("nothing to be left", lambda: not self.nodes.leftovers())
        until("the process that kept the files to end", lambda: not self.keeping())
        assert not list(self.folder.rglob(".*")), "an unfinished file"

    def keeping(self) -> list[int]:
        """The processes that keep files."""
        return self.nodes.processes_of("snapshotd/files.sock")


@pytest.fixture
def scratch(nodes: Cluster) -> Iterator[Scratch]:
    made = Scratch(nodes, LARGE)
    yield made
    made.job.kill()


@pytest.fixture
def small(nodes: Cluster) -> Iterator[Scratch]:
    made = Scratch(nodes)
    yield made
    made.job.kill()


@pytest.mark.timeout(600)
def test_program_that_deletes_its_file_and_dies_is_rolled_back_although_daemons_were_killed(scratch: Scratch) -> None:
    """Daemons are killed when the file is kept and nothing is dumped, after the snapshot, after the file was put back, and
    when a copy of the rank has it open."""
    nodes = scratch.nodes
    scratch.killed_at(Point.FILES_KEPT, "snapshot")
    nodes.lab.start_daemon(ONE)
    until("a snapshot", lambda: nodes.migrator("job", "snapshot", scratch.job.name).returncode == 0)
    nodes.lab.restart_daemon(ONE)
    scratch.job.await_progress(3)
    scratch.fail("delete")
    assert not scratch.file.exists()
    for point in (Point.FILES_PUT_BACK, Point.FILES_PUT_BACK, Point.RESTORE):
        scratch.killed_at(point, "rollback")
        assert scratch.file.stat().st_size > LARGE
        nodes.lab.start_daemon(ONE)

    assert scratch.assert_changed(scratch.roll_back(), "deleted", "restored") == ""
    scratch.job.await_progress(3)
    scratch.assert_ends_well()
    assert [path.name for path in scratch.file.parent.iterdir()] == [scratch.file.name]


@pytest.mark.timeout(600)
def test_file_is_restored_each_time_it_is_renamed_replaced_or_removed(scratch: Scratch) -> None:
    """To the same snapshot, which has the whole data each time. What was there is kept."""
    scratch.snapshot()
    assert len(scratch.keeping()) == 1
    for what, change in (("rename", "renamed"), ("replace", "replaced"), ("remove", "deleted")):
        scratch.fail(what)
        aside = scratch.file.read_bytes() if scratch.file.exists() else b""
        done = scratch.nodes.migrator("job", "rollback", scratch.job.name)
        assert done.returncode == 0, f"{done.stderr}\n{scratch.nodes.logs()}"
        assert f"{scratch.file} was {change}" in done.stdout
        assert "restored with its" in done.stdout
        if change == "renamed":
            assert f"renamed to {scratch.file}.done" in done.stdout
            assert scratch.file.with_suffix(".tmp.done").stat().st_size > LARGE
        if aside:
            (beside,) = scratch.file.parent.glob("data.tmp.rolled-back-m-*")
            assert beside.read_bytes() == aside
        scratch.job.await_progress(3)
    scratch.assert_ends_well()


@pytest.mark.timeout(600)
def test_small_file_comes_back_from_the_image_on_another_node(small: Scratch) -> None:
    """Also one that was shortened: the image has a copy."""
    small.snapshot()
    small.fail("shorten")
    answer = small.ask("rollback", "--on", f"0={TWO}")
    assert [rank["node"] for rank in answer["ranks"]] == [TWO]
    beside = small.assert_changed(answer, "shortened", "restored")
    assert (small.file.parent / beside).read_bytes() == small.file.read_bytes()[:3]
    small.job.await_progress(3)
    small.assert_ends_well()


@pytest.mark.timeout(600)
def test_rollback_is_refused_and_then_made_with_another_policy(scratch: Scratch) -> None:
    scratch.snapshot()
    scratch.fail("replace")
    refused = scratch.ask("rollback", "--changed-files", "refuse", expect=11)
    assert f"{scratch.file} was replaced by another file since the snapshot" in refused["reason"]
    assert scratch.file.read_text() == "another file\n"
    scratch.assert_changed(scratch.roll_back("--changed-files", "keep"), "replaced", "kept")
    scratch.job.await_progress(3)
    content = scratch.file.read_bytes()
    assert content.startswith(b"another file\n\0\0"), "it writes where it was: the end of the file is far away"
    assert content[LARGE:].count(b"\n") >= 3
    scratch.job.end_soon(scratch.end)
    assert scratch.job.finish() == 0
    scratch.assert_nothing_is_left()


class CarriedScratch(Scratch):
    """Its file is below a carry path, where each node has its own."""

    def _file(self) -> Path:
        return Path("/tmp", f"scratch-{os.getpid()}", "data.tmp")


@pytest.mark.timeout(600)
def test_carried_file_that_has_changed_becomes_that_of_the_image(nodes: Cluster) -> None:
    """Also one that was shortened: the image has all of it. On another node there is nothing to put back."""
    scratch = CarriedScratch(nodes, LARGE)
    scratch.snapshot()
    for what, change in (("shorten", "shortened"), ("replace", "replaced"), ("delete", "deleted")):
        scratch.fail(what)
        beside = scratch.assert_changed(scratch.ask("rollback"), change, "restored")
        assert bool(beside) == (change != "deleted")
        scratch.job.await_progress(3)
    scratch.fail("replace")
    assert scratch.ask("rollback", "--on", f"0={TWO}")["changed_files"] == []
    scratch.job.await_progress(3)
    scratch.assert_ends_well()


class ScratchOfUser(Scratch):
    """A rank of another user than root, who can read neither this checkout nor its interpreter."""

    USER_ID = 1500

    def _folder(self) -> Path:
        made = Path(tempfile.mkdtemp(dir="/var/lib", prefix="migrator-test-"))
        made.chmod(0o755)
        os.chown(made, self.USER_ID, self.USER_ID)
        return made

    def _start(self, arguments: list[str]) -> Job:
        python, installed = readable_python(), readable_copy(self.folder / "installed")
        for name in ("scratch.py", "steps.py"):
            shutil.copy(WORKLOADS / name, self.folder)
        ids = [f"--reuid={self.USER_ID}", f"--regid={self.USER_ID}", "--clear-groups"]
        command = ["setpriv", *ids, python, "-m", "migrator.cli", "run", "--job", "users", "--", python]
        out = self.nodes.folder / "users-0.out"
        with out.open("wb") as file:
            process = self.nodes.lab.spawn(
                *(ONE, [*command, str(self.folder / "scratch.py"), *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=self.folder,
            )
        job = Job(self.nodes.lab, process, out, "users")
        self.nodes.jobs.append(job)
        return job


@pytest.mark.timeout(600)
def test_files_are_put_back_with_the_rights_of_the_ranks_user_alone(nodes: Cluster) -> None:
    scratch = ScratchOfUser(nodes, LARGE)
    try:
        scratch.snapshot()
        roots = scratch.folder / "roots"
        roots.write_text("of root\n")
        scratch.fail(f"link {roots}")
        folder = scratch.file.parent
        os.chown(folder, 0, 0)  # as if another user had made it
        refused = scratch.ask("rollback", expect=11)
        assert f"{scratch.file} Permission denied" in refused["reason"]
        assert [path.name for path in folder.iterdir()] == [scratch.file.name], "root has made nothing there"

        os.chown(folder, scratch.USER_ID, scratch.USER_ID)
        beside = scratch.assert_changed(scratch.roll_back(), "replaced", "restored")
        assert os.readlink(folder / beside) == str(roots)
        assert (roots.read_text(), roots.stat().st_uid) == ("of root\n", 0)
        assert scratch.file.stat().st_uid == scratch.USER_ID
        scratch.job.await_progress(3)
        scratch.assert_ends_well()
    finally:
        scratch.job.kill()
        shutil.rmtree(scratch.folder)
    until("nothing to be left", lambda: not nodes.leftovers())
