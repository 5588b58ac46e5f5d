"""torch.distributed jobs in a lab, with one torchrun agent per node, and the same jobs undisturbed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from integration.harness import MIGRATOR, PATIENCE_S, WORKLOADS, Cluster, Job, until

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
HOMES = ("node-1", "node-2", "node-3", "node-4")
#: Matches the messages of torch and of this suite's workloads about a broken connection.
BROKEN = re.compile(r"connection (was )?(reset|closed|refused)|broken pipe|econnreset|timed out", re.IGNORECASE)
#: For the undisturbed run of a job that had minutes of faults on a busy machine, and so has many steps.
ALONE_S = 600.0
_SMALL = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Numbers for the names and ports of jobs.
_numbers = itertools.count(1)
_MARK = "INTEGRATION_JOB"


@dataclass
class TorchJob:
    """A job with one launcher per node: `agents`, in the order of the nodes."""

    cluster: Cluster
    name: str
    agents: list[Job] = field(default_factory=list)
    address: str = ""
    port: int = 0

    @property
    def end(self) -> Path:
        """The file that ends a workload with --until."""
        return self.cluster.folder / f"{self.name}.end"

    def make_group(self) -> None:
        """Makes ddp.py create a new group, and waits until all ranks use it."""
        self.end.with_suffix(".end.group").touch()
        until("the new group", lambda: all(any(" sum " in line for line in lines) for lines in self.lines()))

    def lines(self, starting: str = "step ") -> list[list[str]]:
        """The lines about steps that the ranks of each launcher have printed, in order."""
        return [[line for line in agent.lines() if line.startswith(starting)] for agent in self.agents]

    def await_steps(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Waits until every launcher has printed so many lines about steps."""

        def enough() -> bool:
            for agent in self.agents:
                if agent.process.poll() is not None and agent.process.returncode != 0:
                    raise AssertionError(f"{agent.name} ended with {agent.process.returncode}:\n{self.text()}")
            return all(len(lines) >= count for lines in self.lines())

        try:
            until(f"{count} steps", enough, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}\n{self.cluster.logs(15)}") from None

    def await_progress(self, steps: int = 3, timeout_s: float = PATIENCE_S) -> None:
        self.await_steps(max(len(lines) for lines in self.lines()) + steps, timeout_s)

    def move(self, rank: int, to: str, **more: Any) -> dict[str, Any]:
        return self.cluster.move(self.agents[0], to, rank=rank, **more)

    def where(self) -> dict[int, str]:
        """The node of each rank."""
        return {row["rank"]: row["node"] for row in self.cluster.ps(self.agents[0])}

    def finish(self, timeout_s: float = PATIENCE_S) -> list[int]:
        ends = time.monotonic() + timeout_s
        return [agent.finish(max(1.0, ends - time.monotonic())) for agent in self.agents]

    def text(self) -> str:
        return "\n".join(f"--- {agent.out.name}\n{agent.text()[-3000:]}" for agent in self.agents)

    def assert_whole(self) -> None:
        """The job ends with status 0, and none of its processes has seen a connection break before the rank was done.

        Afterwards a launcher may complain: torchrun's exit barrier lets the node that hosts the store leave first.
        """
        codes = self.finish()
        assert set(codes) == {0}, f"{codes}\n{self.text()}\n{self.cluster.logs()}"
        lines = [takewhile(lambda line: line != "DONE", agent.lines()) for agent in self.agents]
        broken = [line for line in chain.from_iterable(lines) if BROKEN.search(line)]
        assert broken == [], "\n".join(broken)


class TorchLab:
    """Starts jobs, each with its own name, port and files; `run_options` are options of `migrator run`."""

    def __init__(self, cluster: Cluster, run_options: Sequence[str] = ()) -> None:
        self.cluster, self.run_options = cluster, run_options
        self.jobs: list[TorchJob] = []

    def torchrun(
        self,
        script: str,
        *arguments: str,
        nodes: Sequence[str] = HOMES,
        workers: int = 1,
        launcher: Sequence[str] = (TORCHRUN,),
        options: Sequence[str] = (),
        name: str = "torch",
        rendezvous: bool = False,
    ) -> TorchJob:
        """Runs `migrator run -- torchrun … SCRIPT` on every node; `{end}` in an argument becomes the path `job.end`.
        `rendezvous`: the launchers find each other by a rendezvous, and rank 0 has the store."""
        job = self._named(name, nodes[0])
        arguments = tuple(word.replace("{end}", str(job.end)) for word in arguments)
        for index, node in enumerate(nodes):
            how = [f"--nnodes={len(nodes)}", f"--nproc-per-node={workers}"]
            if rendezvous:  # ranks are numbered in the order of addresses
                how += ["--rdzv-backend=c10d", f"--rdzv-endpoint={job.address}:{job.port}", f"--rdzv-id={job.name}"]
                how += [f"--local-addr={self.cluster.lab.address(node)}", f"--rdzv-conf=is_host={int(index == 0)}"]
            else:
                how += [f"--node-rank={index}", f"--master-addr={job.address}", f"--master-port={job.port}"]
            how += options
            world: dict[str, str] = {}
            if launcher != (TORCHRUN,):  # another launcher, which needs no options of torchrun
                how, world = list(options), self._world(job, index, len(nodes))
            command = [*launcher, *how, str(WORKLOADS / script), *arguments]
            self._start(job, node, index, [*self._run(job), *command], **world)
        return job

    def plain(
        self,
        script: str,
        *arguments: str,
        nodes: Sequence[str] = HOMES,
        name: str = "plain",
        wrapper: Sequence[str] = (),
    ) -> TorchJob:
        """Runs `migrator run -- WRAPPER python SCRIPT` on every node, with the variables that a scheduler sets."""
        job = self._named(name, nodes[0])
        arguments = tuple(word.replace("{end}", str(job.end)) for word in arguments)
        for rank, node in enumerate(nodes):
            command = [*self._run(job), *wrapper, sys.executable, str(WORKLOADS / script), *arguments]
            self._start(job, node, rank, command, **self._world(job, rank, len(nodes)))
        return job

    def undisturbed(self, script: str, *arguments: str, world: int) -> list[list[str]]:
        """The lines about steps of each rank of the same job on one node, without `migrator run`."""
        job = self._named("alone", "node-1")
        whole = self.cluster.folder / job.name
        command = [sys.executable, "-u", str(WORKLOADS / "alone.py"), str(world), str(whole), str(WORKLOADS / script)]
        self._start(job, "node-1", world, [*command, *arguments], **self._world(job, 0, world))
        files = [whole.with_name(f"{job.name}-{rank}.out") for rank in range(world)]
        codes = job.finish(ALONE_S)
        texts = [file.read_text() if file.exists() else "" for file in files]
        assert codes == [0], "\n".join(texts)
        return [[line for line in text.splitlines() if line.startswith("step ")] for text in texts]

    def assert_as_undisturbed(self, job: TorchJob, script: str, *arguments: str, world: int) -> None:
        """Every rank printed for each step what it prints in an undisturbed run of as many steps."""
        said = sorted(line for lines in job.lines() for line in lines)
        steps = len(said) // world
        if script == "ddp.py":
            late = min(int(line.split()[1]) for line in said if " sum " in line)
            arguments = (*arguments, "--late-group-at", str(late), "--pace-s", "0")
        alone = self.undisturbed(script, "--steps", str(steps), *arguments, world=world)
        assert said == sorted(line for lines in alone for line in lines)

    @contextmanager
    def store_clients(self, job: TorchJob, nodes: Sequence[str]) -> Iterator[Callable[[], list[str]]]:
        """Yields a function that makes a process on each of the nodes connect to the job's original store address.

        It returns what they read."""
        program = (
            "import datetime, sys, torch.distributed as d\n"
            "for line in sys.stdin:\n"
            "    s = d.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=datetime.timedelta(seconds=10))\n"
            "    s.set(line, 'there'); print(s.get(line).decode(), flush=True); del s\n"
        )
        command = [sys.executable, "-c", program, job.address, str(job.port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        clients = [self.cluster.lab.spawn(node, command, **pipes) for node in nodes]

        def ask() -> list[str]:
            answers = []
            for client in clients:
                assert client.stdin is not None
                assert client.stdout is not None
                client.stdin.write("late\n")
                answers.append(client.stdout.readline().strip())
            return answers

        try:
            yield ask
        finally:
            for client in clients:
                client.communicate(timeout=30)

    def _mark(self, job: TorchJob) -> str:
        """Found in the environment of all processes of a job, and of no other job on this machine."""
        return f"{self.cluster.lab.name}/{job.name}"

    def _run(self, job: TorchJob) -> list[str]:
        return [*MIGRATOR, "run", "--job", job.name, *self.run_options, "--"]

    def _world(self, job: TorchJob, rank: int, world: int) -> dict[str, str]:
        names = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": job.address,
            "MASTER_PORT": job.port,
        }
        return {name: str(value) for name, value in names.items()}

    def _named(self, name: str, first: str) -> TorchJob:
        number = next(_numbers)
        job = TorchJob(self.cluster, f"{name}{number}", [], self.cluster.lab.address(first), 29500 + number)
        self.jobs.append(job)
        for asked in (job.end, job.end.with_suffix(".end.group")):
            asked.unlink(missing_ok=True)
        return job

    def _start(self, job: TorchJob, node: str, index: int, command: Sequence[str], **environment: str) -> None:
        out = self.cluster.folder / f"{job.name}-{index}.out"
        with out.open("wb") as file:
            process = self.cluster.lab.spawn(
                node,
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **_SMALL, **environment, _MARK: self._mark(job)},
            )
        job.agents.append(Job(self.cluster.lab, process, out, job.name))
        self.cluster.jobs.append(job.agents[-1])

    def end(self) -> None:
        """Ends what is left of the jobs: the workers of a killed torchrun keep running, protected or not."""
        self.cluster.tidy()
        marks = {f"{_MARK}={self._mark(job)}".encode() for job in self.jobs}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marks & set((folder / "environ").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)


@contextmanager
def at_rest(cluster: Cluster, run_options: Sequence[str] = ()) -> Iterator[TorchLab]:
    """A TorchLab for one test, which ends all its jobs afterwards."""
    lab = TorchLab(cluster, run_options)
    try:
        yield lab
    finally:
        lab.end()
