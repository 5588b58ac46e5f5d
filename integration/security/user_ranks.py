"""Ranks of an unprivileged user, in a folder that every user and every node of a lab can reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration.harness import Cluster, Job, until
from tests.installation import readable_copy, readable_python

USER = 1500


@dataclass
class UserFolder:
    """A folder of root that users can enter, with the programs in it, and `own`, which belongs to the user."""

    path: Path

    @property
    def own(self) -> Path:
        return self.path / "own"

    def start(self, nodes: Cluster, node: str, program: str, job: str, *arguments: str) -> Job:
        """Starts Python code as a rank of the user, in the folder `own`."""
        script = self.path / f"{job}.py"
        script.write_text(program)
        script.chmod(0o644)
        python = readable_python()
        command = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--groups", str(USER)]
        command += [python, "-m", "migrator.cli", "run", "--job", job, "--", python, str(script), *arguments]
        out = self.path / f"{job}.out"
        with out.open("wb") as file:
            process = nodes.lab.spawn(
                *(node, command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(self.path / "installed")},
                cwd=self.own,
            )
        started = Job(nodes.lab, process, out, job)
        nodes.jobs.append(started)
        return started


@contextmanager
def user_folder() -> Iterator[UserFolder]:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="migrator-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        readable_copy(folder / "installed")
        made = UserFolder(folder)
        made.own.mkdir()
        shutil.chown(made.own, USER, USER)
        yield made


def await_line(job: Job, line: str) -> None:
    """Waits until the job has printed this line."""

    def printed() -> bool:
        if line not in job.lines() and job.process.poll() is not None:
            raise AssertionError(f"{job.name} ended with {job.process.returncode}:\n{job.text()[-2000:]}")
        return line in job.lines()

    until(f"{line!r} of {job.name}", printed)
