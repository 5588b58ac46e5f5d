"""The lab: a cluster on one machine, whose nodes differ from real ones only in sharing a kernel and a disk.

A node is a network, a mount and a UTS namespace, kept alive by a small process. It has its own address, host name, /run,
/tmp, /dev/shm, boot id, TLS identity and a real `snapshotd`. The operator works in the network namespace of the lab's switch.

Invariants: nothing is added to the host's network or mounts, except the autopilot's page on a port of loopback. Two labs are
isolated from each other. `down` removes a lab completely, even one that was only partly built or whose processes were killed,
and it is idempotent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migrator.lab import files, processes, readiness
from migrator.lab.layout import (
    OPERATOR,
    RUN,
    SWITCH,
    LabProcess,
    Layout,
    Record,
    address,
    cgroup2_root,
    check_nodes,
    pair_of,
)
from migrator.lab.ranks import exit_status, follow
from migrator.lab.site import INSIDE, Site, need_root
from snapshotd.api.errors import Busy, Internal, Timeout, Usage, WrongState

_PACKAGES = str(Path(__file__).parents[2])
AUTOPILOT = (sys.executable, "-m", "migrator.cli", "autopilot")
#: Loopback, because it is plain HTTP; any free port, because several labs may be up.
_PAGE = ("--page", "127.0.0.1:0", "--page-plain-http")
_NAMESPACES = ("net", "mnt", "uts")
#: Signals that end a daemon.
_ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT)
#: Variables of the caller's environment that daemons do not inherit.
_NOT_FOR_DAEMONS = ("MIGRATOR_CLUSTER", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


@dataclass(frozen=True)
class Autopilot:
    pid: int
    page: str  # its address, for a browser on this machine


class Lab:
    """One lab, by name; this process need not have created it.

    `daemon` is the command to which `--config PATH` is appended, `launcher` the one to which `--job JOB -- CMD` is appended.
    """

    def __init__(
        self,
        name: str = "lab",
        *,
        daemon: Sequence[str] = (sys.executable, "-m", "snapshotd.main"),
        launcher: Sequence[str] = (sys.executable, "-m", "migrator.cli", "run"),
    ) -> None:
        self.name = name
        self.layout = Layout.of(name)
        self._site = Site(self.layout)
        self._daemon, self._launcher = tuple(daemon), tuple(launcher)

    @staticmethod
    def names() -> list[str]:
        """The labs of which anything exists, even if they are not complete."""
        by_cgroup = {path.name.removeprefix("migrator-lab-") for path in cgroup2_root().glob("migrator-lab-*")}
        return sorted(by_cgroup | {path.name for path in RUN.glob("*")})

    # ---------------------------------------------------------------- where things are

    @property
    def cluster_path(self) -> Path:
        return self.layout.cluster

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._site.record().nodes)

    def address(self, node: str) -> str:
        record = self._site.record()
        self._site.check(record, node)
        return address(record.index(node))

    def config(self, node: str) -> Path:
        """The daemon's configuration; edit it, then `restart_daemon`."""
        return self.layout.node(node) / "snapshotd.toml"

    def daemon_log(self, node: str) -> Path:
        return self.layout.node(node) / "daemon.log"

    def daemon_pid(self, node: str) -> int | None:
        """The daemon's pid; None if it does not run."""
        record = self._site.record()
        self._site.check(record, node)
        process = record.daemons.get(node)
        return process.pid if process is not None and processes.alive(process) else None

    # ---------------------------------------------------------------- up and down

    def up(self, nodes: Sequence[str], *, timeout_s: float = 30.0) -> None:
        """Builds the lab and waits until every daemon answers. If anything fails, the lab is removed."""
        nodes = check_nodes(nodes)
        need_root()
        with self._site.locked(make=True):
            if self._site.is_complete():
                raise Busy(f"the lab {self.name} is up already", remedy="`migrator lab down` first")
            self._clear()  # removes what an interrupted `up` or `down` left
            try:
                self._build(Record(nodes=list(nodes)), timeout_s)
            except BaseException:
                self._clear()
                files.remove_folders(self.layout)
                raise

    def down(self, *, timeout_s: float = 30.0) -> None:
        """Ends all processes of the lab and removes its files. Idempotent."""
        need_root()
        inside = Path(files.marker(self.name)).is_dir() or os.getpid() in processes.in_cgroup(self.layout.cgroup)
        if inside:
            raise Usage("a lab cannot be taken down from inside one of its nodes", remedy="do it from the host")
        with self._site.locked(make=True):
            self._clear(timeout_s)
            files.remove_folders(self.layout)

    def _build(self, record: Record, timeout_s: float) -> None:
        from migrator.lab import network  # here: loading pyroute2 takes longer than most operations of a lab

        files.write_all(self.layout, record)
        record.holders[SWITCH] = self._site.hold(OPERATOR, {"namespaces": ["net"]})
        self.layout.save(record)
        network.make_switch(record.holders[SWITCH])
        for node in record.nodes:
            self._power_on(record, node)
        for node in record.nodes:
            self._start(record, node)
        staged = self.layout.run / "cluster.toml.staged"
        staged.write_text(files.cluster_text(self.layout, record, record.holders[SWITCH]))
        self._await(record, record.nodes, timeout_s, staged)
        record.complete = True
        self.layout.save(record)
        staged.rename(self.layout.cluster)

    def _clear(self, timeout_s: float = 30.0) -> None:
        """Ends the processes first: their namespaces, mounts and links disappear with the last of them."""
        with contextlib.suppress(OSError):
            self.layout.cluster.unlink()  # from here on the lab does not count as running
        try:
            record = self.layout.load()
        except Internal:
            record = None  # damaged; the processes can be found without it
        holders = list(record.holders.values()) if record else []
        processes.end_all(self.layout.cgroup, files.marker(self.name), holders, timeout_s)
        files.remove_content(self.layout)

    # ---------------------------------------------------------------- one node

    def crash(self, node: str) -> None:
        """Simulates a power failure: disconnects the node, then kills all its processes. The disk remains; see `boot`."""
        from migrator.lab import network

        with self._site.locked():
            record = self._site.record()
            index = self._site.check(record, node)
            network.unplug(self._site.resident(record, OPERATOR), index)
            holders = [record.holders.pop(node)] if node in record.holders else []
            record.daemons.pop(node, None)
            processes.end_all(self.layout.node_cgroup(node), files.marker(self.name, node), holders, 30.0)
            self.layout.save(record)

    def boot(self, node: str, *, timeout_s: float = 30.0) -> None:
        """Boots a crashed node: fresh /run, /tmp, /dev/shm and boot id, the old disk, a new daemon."""
        with self._site.locked():
            record = self._site.record()
            self._site.check(record, node)
            if node in record.holders:
                raise WrongState(f"{node} is running", remedy="crash it first")
            self._power_on(record, node)
            self._start(record, node)
            self._await(record, [node], timeout_s)

    def _power_on(self, record: Record, node: str) -> None:
        from migrator.lab import network

        needed = [sys.executable, _PACKAGES, self._daemon[0]] if "/" in self._daemon[0] else [sys.executable, _PACKAGES]
        spec = {"namespaces": _NAMESPACES, "hostname": node, "needed": needed, **files.prepare_boot(self.layout, node)}
        record.holders[node] = self._site.hold(node, spec)
        self.layout.save(record)
        index = record.index(node)
        assert index is not None
        network.plug_in(self._site.resident(record, OPERATOR), record.holders[node], index)
        for a, b in record.cuts:
            if node in (a, b) and {a, b} <= {OPERATOR, *record.holders}:
                network.cut(self._site.end(record, a), self._site.end(record, b))

    # ---------------------------------------------------------------- daemons

    def start_daemon(self, node: str, *, timeout_s: float = 30.0) -> None:
        """Starts the node's daemon and waits until it answers the operator, unless the two are partitioned."""
        with self._site.locked():
            record = self._site.record()
            self._site.check(record, node)
            if node in record.daemons and processes.alive(record.daemons[node]):
                raise WrongState(f"snapshotd of {node} runs already", remedy="use restart_daemon")
            self._start(record, node)
            if pair_of(OPERATOR, node) not in record.cuts:
                self._await(record, [node], timeout_s)

    def kill_daemon(self, node: str, number: int = signal.SIGKILL, *, timeout_s: float = 30.0) -> None:
        """Sends a signal to the node's daemon only. If the signal ends or stops it, waits until that has happened."""
        record = self._site.record()
        self._site.check(record, node)
        process = record.daemons.get(node)
        if process is None or not processes.send(process, number):
            return
        if number in _ENDING and not processes.wait(process, timeout_s):
            name = signal.Signals(number).name
            raise Timeout(f"snapshotd of {node} still runs {timeout_s:.0f} s after {name}", remedy="see its log")
        if number == signal.SIGSTOP and not processes.wait_stopped(process, timeout_s):
            raise Timeout(f"snapshotd of {node} was not stopped in {timeout_s:.0f} s", remedy="see its log")

    def restart_daemon(self, node: str, *, timeout_s: float = 30.0) -> None:
        """Restarts the daemon as systemd does: SIGTERM, wait for its end, start."""
        self.kill_daemon(node, signal.SIGTERM, timeout_s=timeout_s)
        self.start_daemon(node, timeout_s=timeout_s)

    def _start(self, record: Record, node: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_DAEMONS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_PACKAGES, environment.get("PYTHONPATH"))))
        spec = {**self._site.way_in(record, node, "daemon"), "cwd": "/", "log": str(self.daemon_log(node))}
        argv = [*INSIDE, "enter", json.dumps(spec), *self._daemon, "--config", str(self.config(node))]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
        if done.returncode != 0:
            raise Internal(f"snapshotd of {node} was not started: {done.stderr.decode(errors='replace').strip()}")
        record.daemons[node] = LabProcess(**json.loads(done.stdout))
        self.layout.save(record)

    def _await(self, record: Record, nodes: Sequence[str], timeout_s: float, cluster: Path | None = None) -> None:
        daemons = {node: (record.daemons[node], self.daemon_log(node)) for node in nodes}
        readiness.await_daemons(cluster or self.layout.cluster, daemons, timeout_s)

    @property
    def autopilot_log(self) -> Path:
        return self.layout.run / "autopilot.log"

    def start_autopilot(self, policy: Path, *, timeout_s: float = 60.0) -> Autopilot:
        """Starts the autopilot and waits until its page is served. It ends with the lab.

        It opens its page in the caller's network namespace, where browsers are, and then enters the operator's.
        """
        command = [*AUTOPILOT, "--cluster", str(self.cluster_path), "--policy", str(policy.absolute()), *_PAGE]
        with self._site.locked():
            way_in = self._site.way_in(self._site.record(), OPERATOR, "daemon")
            spec = {**way_in, "namespaces": [], "cwd": "/", "log": str(self.autopilot_log)}
            environment = {**os.environ, "PYTHONPATH": _PACKAGES}
            written = self.autopilot_log.stat().st_size if self.autopilot_log.exists() else 0
            argv = [*INSIDE, "enter", json.dumps(spec), *command]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
        if done.returncode != 0:
            raise Internal(f"the autopilot was not started: {done.stderr.decode(errors='replace').strip()}")
        process = LabProcess(**json.loads(done.stdout))
        return Autopilot(process.pid, readiness.await_page(process, self.autopilot_log, written, timeout_s))

    # ---------------------------------------------------------------- processes in nodes

    def spawn(self, node: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Starts `argv` in a node or in the operator's namespace. `popen` goes to Popen, whose pid is that of `argv`."""
        if not argv:
            raise Usage("no command was given", remedy="write it after --")
        cwd = os.fspath(popen.get("cwd") or Path.cwd())
        spec = {**self._site.way_in(self._site.record(), node, "session"), "cwd": cwd, "log": None}
        return subprocess.Popen([*INSIDE, "enter", json.dumps(spec), *argv], **popen)

    def exec(self, node: str, argv: Sequence[str]) -> int:
        """Runs `argv` in a node with this process's stdio, like ssh. Returns its exit status as a shell reports it."""
        sys.stdout.flush()
        child = self.spawn(node, argv)
        # A handler, because the child would inherit SIG_IGN. The terminal sends Ctrl-C to the child directly.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return exit_status(child.wait())
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, job: str, argv: Sequence[str]) -> int:
        """Runs `argv` as one rank on each node not named spare…. Returns the status of the first that failed, else 0."""
        record = self._site.record()
        homes = [node for node in record.nodes if not node.startswith("spare")]
        if not homes:
            raise Usage(f"the lab {self.name} has only spare nodes", remedy="give it a node not named spare…")
        if not argv:
            raise Usage("no command was given", remedy="write it after --")
        command = [*self._launcher, "--job", job, "--", *argv]
        world = {"WORLD_SIZE": str(len(homes)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        # Each job gets its own port, because several jobs can run in one lab.
        world |= {"MASTER_ADDR": self.address(homes[0]), "MASTER_PORT": str(29500 + zlib.crc32(job.encode()) % 1000)}
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            for rank, node in enumerate(homes):
                pipes: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                    "start_new_session": True,
                    "env": {**os.environ, **world, "RANK": str(rank)},
                }
                ranks.append(stack.enter_context(self.spawn(node, command, **pipes)))
            return follow(ranks)

    # ---------------------------------------------------------------- network partitions

    def partition(self, a: str, b: str) -> None:
        """Partitions two nodes, or "operator" and a node: packets between them are lost without an error, both ways."""
        self._change_cut(a, b, cut=True)

    def heal(self, a: str, b: str) -> None:
        """Undoes `partition`."""
        self._change_cut(a, b, cut=False)

    def _change_cut(self, a: str, b: str, *, cut: bool) -> None:
        from migrator.lab import network

        with self._site.locked():
            record = self._site.record()
            if a == b:
                raise Usage(f"{a} cannot be cut off itself", remedy="name two")
            (network.cut if cut else network.mend)(self._site.end(record, a), self._site.end(record, b))
            pair = pair_of(a, b)
            record.cuts = [*(known for known in record.cuts if known != pair), *([pair] if cut else [])]
            self.layout.save(record)
