"""Checkpoints and restores one job with plain `criu` and the driver's own calls: the baseline for moves.

The steps are lock, checkpoint, `criu dump` into tmpfs, a copy of the images to another folder of that tmpfs in place of
a network, `criu restore`, CUDA restore, unlock. The job must continue afterwards, or the numbers are void.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.gpu.gpu_jobs import ON_GPU, ROOT
from integration.gpu.watch import resident_bytes
from integration.harness import until
from snapshotd.criu.find import find_criu


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    bytes: int = 0


def run(command: Sequence[str]) -> list[Part]:
    """Runs all parts for a job with this command and returns them in order."""
    with memory_folder() as folder, _driver() as call, _job(command, folder) as job:
        return _once(job, folder, call)


def _once(job: _Job, folder: Path, call: _Driver) -> list[Part]:
    pid = job.process.pid
    images, copy = folder / "images", folder / "copy"
    for path in (images, copy, folder / "no-plugins"):
        path.mkdir()
    parts: list[Part] = []
    device_bytes = -resident_bytes(pid)
    if ON_GPU:
        parts.append(Part("lock", call("lock", pid)))
        seconds = call("checkpoint", pid)
        device_bytes += resident_bytes(pid)  # the checkpoint has copied it to host memory
        parts.append(Part("checkpoint", seconds, device_bytes))
    criu = [find_criu(None)[0], "--network-lock", "skip", "-L", str(folder / "no-plugins")]
    seconds = _timed([criu[0], "dump", *criu[1:], "-t", str(pid), "-D", str(images), "-o", "dump.log"])
    job.process.wait()
    size = sum(path.stat().st_size for path in images.iterdir())
    parts.append(Part("criu-dump", seconds, size))
    began = time.monotonic()
    for path in sorted(images.iterdir()):
        shutil.copyfile(path, copy / path.name)
        path.unlink()  # two copies of everything, and the job a third time, would not fit
    parts.append(Part("stream", time.monotonic() - began, size))
    seconds = _timed([criu[0], "restore", "-d", *criu[1:], "-D", str(copy), "-o", "restore.log"])
    job.restored = True
    parts.append(Part("criu-restore", seconds, size))
    if ON_GPU:
        parts.append(Part("cuda-restore", call("restore", pid), device_bytes))
        parts.append(Part("unlock", call("unlock", pid)))
    steps = job.steps()
    until(f"the job to go on\n{job.out.read_text()[-1000:]}", lambda: job.steps() > steps + 3, 60)
    return parts


def _timed(command: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        folder = Path(command[command.index("-D") + 1])
        log = (folder / command[command.index("-o") + 1]).read_text(errors="replace").splitlines()
        result = [line for line in log if "Error" in line][-8:] or log[-8:]
        raise RuntimeError(f"criu {command[1]} failed: {done.stderr.strip()}\n" + "\n".join(result))
    return seconds


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Mounts a tmpfs of nearly all memory: half of it, the size of /dev/shm, is too little for two copies."""
    folder = Path(tempfile.mkdtemp(prefix="by-hand-", dir="/dev/shm"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=95%", "none", str(folder)]).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


class _Job:
    """The job, started so that plain criu can dump it: in its own session, with its output in files."""

    def __init__(self, command: Sequence[str], out: Path) -> None:
        self.out, self.restored = out, False
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd="/",
            )

    def steps(self) -> int:
        return self.out.read_bytes().count(b"\nstep ")

    def end(self) -> None:
        if not self.restored:
            self.process.kill()
            self.process.wait()
            return
        with contextlib.suppress(ProcessLookupError):  # no longer a child of this process
            os.kill(self.process.pid, signal.SIGKILL)
        until("the restored job to be gone", lambda: _gone(self.process.pid), 120)


def _gone(pid: int) -> bool:
    """Whether the process has ended, and so freed its memory. Its zombie may remain until another process reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextlib.contextmanager
def _job(command: Sequence[str], folder: Path) -> Iterator[_Job]:
    job = _Job(command, folder / "job.out")
    try:
        until("the job's first steps", lambda: job.steps() > 10 or job.process.poll() is not None, 300)
        if job.process.poll() is not None:
            raise RuntimeError(f"the job ended with {job.process.returncode}:\n{job.out.read_text()[-2000:]}")
        yield job
    finally:
        job.end()


class _Driver:
    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self.process = process

    def __call__(self, name: str, pid: int) -> float:
        """Returns the seconds that the call took."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {pid}\n")
        seconds, _, error = self.process.stdout.readline().strip().partition(" ")
        if error or not seconds:
            raise RuntimeError(f"{name} of process {pid}: {error or 'no answer'}")
        return float(seconds)


@contextlib.contextmanager
def _driver() -> Iterator[_Driver]:
    if not ON_GPU:
        yield _Driver(None)
        return
    command = [sys.executable, str(ROOT / "integration/gpu/driver_calls.py")]
    with subprocess.Popen(command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "READY"
        try:
            yield _Driver(process)
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
