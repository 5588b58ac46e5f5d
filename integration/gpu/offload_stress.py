"""Offloads and refills the memory of a busy job many times: `python3 -m integration.gpu.offload_stress --rounds 200`.

Without daemon and dump a round takes a fraction of a second. So there are many more chances than in moves to park a
thread while it holds a lock. The job's output must be that of an undisturbed run. `-- COMMAND…` runs another job, which
must print `step …` lines and accept `--until FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration.gpu.gpu_jobs import ROOT, TRAIN
from integration.harness import until
from snapshotd.cuda.driver import Gpus
from snapshotd.inprocess import devmem, shimctl
from snapshotd.inprocess.devmem import Caught, DeviceMemory, TooSmall
from snapshotd.moves.device import parts, standstill, stripe_files
from snapshotd.proc.tree import Process

BUSY = ("--amp", "fp16", "--graph", "--streams", "--threads", "--loader", "fork")
JOB = ("--gib", "0.25", *BUSY, "--pace-s", "0", "--steps", "1000000000")
LOCK_S, COPY_S = 20.0, 60.0
FIRST_STEPS = 20


class Rounds:
    """Offloads and refills the memory of one process."""

    def __init__(self, process: Process, gpus: Gpus, folder: Path) -> None:
        memory, mailbox = devmem.find(process), shimctl.find(process)
        if memory is None or mailbox is None:
            raise RuntimeError("the job has no device memory that could be parked")
        self.memory: DeviceMemory = memory
        self.mailbox = mailbox
        self.process, self.gpus, self.folder = process, gpus, folder
        self.names = stripe_files.names_of(process.pid, devmem.STRIPES)
        self.caught: list[str] = []
        self.parts = parts.Parts()

    async def out_and_back(self, *, checkpoint: bool) -> int:
        """Runs one round; returns the number of bytes that were refilled."""
        share = self.memory.size() // len(self.names) + devmem.SLOT_BYTES
        for name in self.names:
            (self.folder / name).unlink(missing_ok=True)
            stripe_files.allocate(self.folder / name, share, lambda step: None)
        await asyncio.to_thread(self._ready, os.O_RDWR)
        while not await self._out():
            pass
        if checkpoint:
            await self.gpus.lock(self.process, LOCK_S)
            await self.gpus.checkpoint(self.process, COPY_S)
            await self.gpus.restore(self.process, (), COPY_S)
            await self.gpus.unlock(self.process, LOCK_S)
        await asyncio.to_thread(self._ready, os.O_RDONLY)
        size = await asyncio.to_thread(self.memory.fill, COPY_S)
        self.mailbox.release(LOCK_S)
        return size

    def _ready(self, flags: int) -> None:
        with stripe_files.opened(self.folder, self.names, flags) as fds:
            self.memory.ready(fds, devmem.SLOT_BYTES)

    async def _out(self) -> bool:
        await standstill.still(self.gpus, [self.process], [self.process], self.parts)
        await self.gpus.unlock(self.process, LOCK_S)
        try:
            await asyncio.to_thread(self._park)
        except Caught as caught:
            self.caught.append(str(caught))
            self.mailbox.release(LOCK_S)
            await asyncio.sleep(0.01)
            return False
        return True

    def _park(self) -> int:
        try:
            return self.memory.offload(COPY_S)
        except TooSmall as small:  # the process ran since its memory was measured
            for name in self.names:
                stripe_files.enlarge(self.folder / name, small.largest_bytes, lambda step: None)
            return self.memory.offload(COPY_S)


@contextlib.contextmanager
def job(command: Sequence[str], out: Path, preload: str = "") -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, **({"LD_PRELOAD": preload} if preload else {})}
    with (
        out.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def lines(out: Path) -> list[str]:
    whole = out.read_text(errors="replace").rpartition("\n")[0].splitlines()
    return [line for line in whole if line.startswith(("step ", "digest "))]


def reach(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    until(f"{count} lines of the job", lambda: len(lines(out)) >= count or process.poll() is not None, 600)
    if len(lines(out)) < count:
        raise RuntimeError(f"the job ended with {process.returncode}:\n{out.read_text(errors='replace')[-3000:]}")


async def stress(process: subprocess.Popen[bytes], folder: Path, options: argparse.Namespace) -> None:
    gpus = Gpus(options.library_dir)
    try:
        rounds, began, moved = Rounds(Process.of(process.pid), gpus, folder), time.monotonic(), 0
        for number in range(1, options.rounds + 1):
            try:
                moved += await rounds.out_and_back(checkpoint=number % options.checkpoint_every == 0)
            except Exception:
                print(f"round {number}, after {len(rounds.caught)} that were let go: {rounds.caught[-3:]}", flush=True)
                if options.when_stuck:
                    subprocess.run([*options.when_stuck.split(), str(process.pid)], check=False)
                raise
            await asyncio.sleep(random.random() * 0.05)
            if process.poll() is not None:
                raise RuntimeError(f"the job ended with {process.returncode} in round {number}")
            if number % 20 == 0:
                took_s = (time.monotonic() - began) / number
                print(f"{number} rounds, {took_s:.2f} s each, {len(rounds.caught)} let go and tried again", flush=True)
        for message in sorted(set(rounds.caught)):
            print(f"{rounds.caught.count(message)} times: {message}")
        spent = ", ".join(f"{part.name} {part.seconds / options.rounds * 1000:.1f} ms" for part in rounds.parts.all)
        print(f"{options.rounds} rounds, {moved >> 20} MiB out and back; each {spent}", flush=True)
    finally:
        await gpus.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="with the driver's checkpoint of the rest")
    parser.add_argument("--library-dir", default="", help="of a stand-in for libcuda")
    parser.add_argument("--when-stuck", metavar="COMMAND", default="", help="run with the job's pid: a debugger")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="park-stress-", dir="/dev/shm") as name:
        folder = Path(name)
        command = [*(options.command or [sys.executable, TRAIN, *JOB]), "--until", str(folder / "end")]
        said, wanted = folder / "said", folder / "wanted"
        with job(command, said, str(ROOT / "shim/lib/libsnapshim-offload.so")) as process:
            reach(process, said, FIRST_STEPS)
            asyncio.run(stress(process, folder, options))
            reach(process, said, len(lines(said)) + FIRST_STEPS)
        count = len(lines(said))
        with job(command, wanted) as process:
            reach(process, wanted, count)
        same = lines(wanted)[:count] == lines(said)[:count]
        print(f"{count} lines of the job are {'those' if same else 'NOT those'} of an undisturbed run")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
