"""The harness of the integration suite: a lab, protected jobs in it, and the command line that moves them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from migrator.lab import Lab
from migrator.lab.layout import Record
from snapshotd.api.errors import Busy
from snapshotd.moves.source import twins

#: Empty unless pytest-xdist runs the suite in several processes.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
#: Files of this test process. Not in /tmp, because each node of a lab has its own.
WORK = Path(__file__).parent / ".work" / WORKER
WORKLOADS = Path(__file__).parent / "workloads"
MIGRATOR = (sys.executable, "-m", "migrator.cli")
#: How long the suite waits for anything. No test passes or fails by the clock: this only ends tests that hang.
PATIENCE_S = 120.0
#: Of `migrator move`: short, because tests wait for the end of a lease whose driver was killed; long enough that a driver
#: on a busy machine renews its lease in time.
SHORT_LEASE = ("--lease", "10")
NODES = ("node-1", "node-2", "spare-1")
#: The move that wirefuzz.py invents. No daemon takes it up, because its source has not begun it.
INVENTED_MOVE = "m-0123456789ab"


def until(what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Waits until `condition` returns something true, and returns that. Fails after `timeout_s`, naming `what`.

    The wait is as long as the condition takes, but at least 10 ms: a condition that starts programs leaves them the CPU."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(min(1.0, max(0.01, time.monotonic() - began)))


@dataclass
class Job:
    """A protected process in the lab, and its output."""

    lab: Lab
    process: subprocess.Popen[bytes]
    out: Path
    name: str

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def lines(self) -> list[str]:
        return self.text().splitlines()

    def await_lines(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        until(f"{count} lines of {self.name}, has {len(self.lines())}", lambda: self._enough(count), timeout_s)

    def _enough(self, count: int) -> bool:
        if self.process.poll() is not None and len(self.lines()) < count:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.text()[-2000:]}")
        return len(self.lines()) >= count

    def await_progress(self, lines: int = 5, timeout_s: float = PATIENCE_S) -> None:
        """Waits until the job has printed so many more lines."""
        self.await_lines(len(self.lines()) + lines, timeout_s)

    def end_soon(self, file: Path) -> int:
        """Lets a workload that was started with `--end-file FILE` end some steps from now; returns its number of steps."""
        steps = len(self.lines()) + 100
        new = file.with_name(f"{file.name}.new")
        new.write_text(str(steps))
        new.rename(file)
        return steps

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


@dataclass
class Asked:
    """The result of `migrator move`; empty while it runs."""

    code: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    errors: str = ""


class Cluster:
    """A lab for tests, with the command line pointed at it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.jobs: list[Job] = []
        self._count = 0

    def start(
        self,
        node: str,
        argv: Sequence[str],
        *,
        rank: int = 0,
        job: str = "",
        stdin: Any = subprocess.DEVNULL,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        **popen: Any,
    ) -> Job:
        """Starts a command with `migrator run` on a node; `options` are those of `migrator run`."""
        self._count += 1
        name = job or f"job{self._count}"
        out = self.folder / f"{name}-{rank}.out"
        command = [*prefix, *MIGRATOR, "run", "--job", name, "--rank", str(rank), *options, "--", *argv]
        with out.open("wb") as file:
            process = self.lab.spawn(
                node, command, stdin=stdin, stdout=popen.pop("stdout", file), stderr=popen.pop("stderr", file), **popen
            )
        started = Job(self.lab, process, out, name)
        self.jobs.append(started)
        return started

    def workload(self, node: str, name: str, *arguments: str, **more: Any) -> Job:
        return self.start(node, [sys.executable, str(WORKLOADS / name), *arguments], **more)

    def migrator(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs the command line as an operator would."""
        return subprocess.run(
            [*MIGRATOR, *arguments], env=self.environment(), capture_output=True, text=True, timeout=timeout_s
        )

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "MIGRATOR_CLUSTER": str(self.lab.cluster_path), **more}

    def move(
        self,
        job: Job,
        to: str,
        *,
        rank: int = 0,
        expect: int = 0,
        timeout_s: float = PATIENCE_S,
        more: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Runs `migrator move --json`; fails unless it exits with `expect`."""
        asked = ("--rank", str(rank), "--job", job.name, "--to", to, "--json", *more)
        done = self.migrator("move", *asked, timeout_s=timeout_s)
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def begin_move(self, job: Job, to: str, *, rank: int = 0, more: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Starts a move in the background."""
        return subprocess.Popen(
            [*MIGRATOR, "move", "--rank", str(rank), "--job", job.name, "--to", to, "--json", *more],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def configure(self, node: str, keys: Mapping[str, Any]) -> None:
        """Adds keys to the configuration of a node's daemon and restarts it."""
        path = self.lab.layout.node(node) / "snapshotd.toml"
        lines = [line for line in path.read_text().splitlines() if line.partition(" ")[0] not in keys]
        added = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        path.write_text("\n".join([*added, *lines]) + "\n")
        self.lab.kill_daemon(node)
        self.lab.start_daemon(node)

    def ps(self, job: Job) -> list[dict[str, Any]]:
        done = self.migrator("ps", "--json")
        assert done.returncode == 0, done.stderr
        return [rank for rank in json.loads(done.stdout)["ranks"] if rank["job"] == job.name]

    def fault(self, node: str, point: str, action: str) -> None:
        """Arms a fault point of a node's daemon, and disarms the previous one."""
        folder = self.run_dir(node)
        for old in [*folder.glob("fault*"), *folder.glob("*.go")]:
            old.unlink()
        (folder / "fault").write_text(f"{point} {action}\n")

    def fired(self, node: str) -> bool:
        return (self.run_dir(node) / "fault.fired").exists()

    @contextlib.contextmanager
    def moving(self, job: Job, to: str, node: str, point: str, *, rank: int = 0) -> Iterator[Asked]:
        """A move that waits at a fault point of a node while the block runs, and afterwards continues to its end."""
        self.fault(node, point, "wait")
        asked = Asked()
        with self.begin_move(job, to, rank=rank) as process:
            try:
                until(f"{point} on {node}", lambda: self.fired(node) or process.poll() is not None)
                assert process.poll() is None, f"the move ended before {point}: {process.communicate()}\n{self.logs()}"
                try:
                    yield asked
                finally:  # also after a failure: a daemon that waits would fail the following tests
                    go = self.run_dir(node) / f"{point}.go"
                    go.touch()
                    until(
                        f"{node} to continue",
                        # It may have left the point already, because what the block did has ended the step.
                        lambda: not go.exists() or self.lab.daemon_pid(node) is None or process.poll() is not None,
                    )
                out, asked.errors = process.communicate(timeout=PATIENCE_S)
                asked.code, asked.answer = process.returncode, json.loads(out)
            finally:
                process.kill()

    def leftovers(self) -> list[str]:
        """What moves and ranks have left on the nodes: images, cgroups, guest keepers, criu."""
        found, known = [], {"out", "sockets"}
        for node in self.lab.nodes:
            images = self.run_dir(node) / "images"
            found += [f"{node}: {path}" for path in everything_below(images) if path.name not in known]
            for group in files_below(self.lab.layout.node_cgroup(node), "cgroup.procs"):
                name, above = group.parent.name, group.parent.parent.name
                if above == "snapshotd-ranks" or (name.startswith("snapshotd-") and name != "snapshotd-ranks"):
                    found.append(f"{node}: cgroup {name}")
                for pid in pids_in(group):
                    with contextlib.suppress(OSError):
                        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                        if b"shim.keeper.guest" in words or b"swrk" in words:
                            found.append(f"{node}: process {pid} {b' '.join(words).decode()}")
        return found

    def processes_of(self, marker: str) -> list[int]:
        """Like the function of that name, but only in this lab: other labs on this machine may run the same programs."""
        return [pid for pid in processes_of(marker) if self._has(pid)]

    def twins_of(self, marker: str) -> list[int]:
        """The twins in this lab of processes with this marker."""
        return [pid for pid in _with_marker(marker) if is_twin(pid) and self._has(pid)]

    def _has(self, pid: int) -> bool:
        return f"/{self.lab.layout.cgroup.name}/" in _cgroup_of(pid)

    def run_dir(self, node: str) -> Path:
        """A node's /run/snapshotd, as seen from the host."""
        pid = until(f"the holder of {node}", lambda: self.lab.daemon_pid(node) or self._holder(node))
        return Path(f"/proc/{pid}/root/run/snapshotd")

    def _holder(self, node: str) -> int | None:
        holders = self._record().holders
        return holders[node].pid if node in holders else None

    def _record(self) -> Record:
        record = self.lab.layout.load()
        assert record is not None
        return record

    def logs(self, lines: int = 40) -> str:
        found = []
        for node in self.lab.nodes:
            with contextlib.suppress(OSError):
                tail = self.lab.daemon_log(node).read_text(errors="replace").splitlines()[-lines:]
                found.append("\n".join([f"--- {node}", *tail]))
        return "\n".join(found)

    def tidy(self) -> None:
        """Ends the jobs of one test, and restores nodes, links and daemons for the next."""
        for job in self.jobs:
            job.kill()
        self.jobs.clear()
        self.calm()

    def calm(self) -> None:
        """Restores nodes, links and daemons. Jobs go on."""
        for a, b in list(self._record().cuts):
            self.lab.heal(a, b)
        for node in self.lab.nodes:
            if node not in self._record().holders:
                self.lab.boot(node, timeout_s=PATIENCE_S)
            for old in [*self.run_dir(node).glob("fault*"), *self.run_dir(node).glob("*.go")]:
                old.unlink()
            if self.lab.daemon_pid(node) is None:
                self.lab.start_daemon(node, timeout_s=PATIENCE_S)
            else:
                self.lab.kill_daemon(node, signal.SIGCONT)


def everything_below(folder: Path) -> list[Path]:
    """All files and folders below a folder. Unlike Path.rglob it bears folders that vanish meanwhile, as cgroups do."""
    return [Path(above, name) for above, folders, files in os.walk(folder) for name in (*folders, *files)]


def files_below(folder: Path, name: str) -> list[Path]:
    return [path for path in everything_below(folder) if path.name == name]


def pids_in(procs: Path) -> list[int]:
    """The processes that a file cgroup.procs lists; none if the cgroup has just been removed."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in procs.read_text().split()]
    return []


def is_twin(pid: int) -> bool:
    """Whether it only keeps memory of a rank for a snapshot: it has the rank's command line, and is no copy of it."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == twins.NAME
    except OSError:
        return False


def processes_of(marker: str) -> list[int]:
    """The pids of processes on this machine whose command line contains `marker`, without keepers and twins."""
    return [pid for pid in _with_marker(marker) if not is_twin(pid)]


def _with_marker(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            keeper = b"migrator.cli" in words or b"shim.keeper.guest" in words
            if state not in "ZX" and not keeper and any(marker.encode() in word for word in words):
                found.append(int(entry.name))
    return found


def _cgroup_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text()
    return ""


@contextlib.contextmanager
def _alone(lab: Lab) -> Iterator[None]:
    """Holds the lock of a lab. The kernel drops the lock with its holder, so a killed run blocks no later one.

    Raises Busy if another run holds it: taking that run's lab down would look like a failure of the product."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / f"{lab.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Busy(
                f"the lab {lab.name} is in use by another run from this checkout, process {file.read().strip()}",
                remedy="wait until it has ended, or run from another checkout",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def cluster(name: str, nodes: Sequence[str] = NODES) -> Iterator[Cluster]:
    """Brings up a lab for this checkout and this test process, after removing what a killed run left of it.

    Raises Busy if another run uses it."""
    # Two checkouts, and two workers of one run, can test at the same time.
    lab = Lab(f"{name}-{WORKER}{'-' if WORKER else ''}{zlib.crc32(bytes(Path(__file__).parent)):x}"[:24])
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(lab):
        lab.down()
        lab.up(nodes)
        made = Cluster(lab, folder)
        try:
            yield made
        finally:
            for job in made.jobs:
                job.kill()
            lab.down()
