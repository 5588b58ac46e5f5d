"""Nodes with systemd and the installed Debian package: what an administrator does there, and jobs of an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integration.harness import WORKLOADS, until
from integration.systemd.document import commands
from integration.systemd.nodes import Node

#: The variable that names the folder with the built packages.
PACKAGE_FOLDER = "SNAPSHOT_PACKAGES"
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y")
USER, USER_ID = "alice", 1500
#: Where programs write while a package is installed or used, beside the files of the package.
CHANGING = (
    "dev",
    "home",
    "proc",
    "run",
    "sys",
    "tmp",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/lib/systemd",
    "var/log",
)
#: Private folders of systemd's own services in /var/tmp; each boot makes others.
_OF_SYSTEMD = re.compile(r"systemd-private-[0-9a-f]+-systemd-.*")


class SystemdCluster:
    def __init__(self, nodes: dict[str, Node], package: Path) -> None:
        self.nodes, self.package = nodes, package
        #: The files of each node before the package was installed.
        self.before = {name: files(node) for name, node in nodes.items()}
        #: How long each part of the quick start took.
        self.seconds: dict[str, float] = {}
        self.home = next(iter(nodes.values())).home / USER

    def install(self) -> None:
        """With the commands of docs/quickstart.md alone: the package, the cluster, the node's files, the service."""
        for node in self.nodes.values():
            node.run("useradd", "--uid", str(USER_ID), "--no-create-home", "--home-dir", f"/home/{USER}", USER)
        self.home.mkdir()
        shutil.chown(self.home, USER_ID, USER_ID)
        shutil.copy(WORKLOADS / "chain.py", self.home)
        first = self.nodes["node-1"]
        with self.timed("install"):
            for node in self.nodes.values():
                shutil.copy(self.package, node.root / "root" / self.package.name)
                node.session(commands("install"))
        with self.timed("make the cluster"):
            first.session(commands("cluster"))
        with self.timed("join"):
            for name, node in self.nodes.items():
                if node is not first:
                    (first.root / f"root/{name}.join").rename(node.root / f"root/{name}.join")
                node.session(commands("join", name))

    @contextlib.contextmanager
    def further_node(self, name: str, address: str, image: Path, *, hybrid: bool = False) -> Iterator[Node]:
        """One more booted node with the user and /home of the others, and nothing installed."""
        first = self.nodes["node-1"]
        node = Node(name, address, first.folder.with_name(name), first.home, first.network, hybrid=hybrid)
        try:
            node.create(image)
            node.boot()
            node.run("useradd", "--uid", str(USER_ID), "--no-create-home", "--home-dir", f"/home/{USER}", USER)
            yield node
        finally:
            node.discard()

    @contextlib.contextmanager
    def joined(self, name: str, node: Node) -> Iterator[None]:
        """The further node, on which snapshotd is installed, is a node of the cluster meanwhile."""
        first = self.nodes["node-1"]
        first.session(f"migrator cluster add {name} {node.address}")
        (first.root / f"root/{name}.join").rename(node.root / f"root/{name}.join")
        node.session(commands("join", name))
        self.nodes[name] = node
        try:
            yield
        finally:
            del self.nodes[name]
            first.session(f"migrator cluster remove {name} --force")

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - began

    def start_job(self, name: str, on: str = "node-1", *, of_user_manager: bool = False) -> Path:
        """Starts a job of an ordinary user as a transient service, of the system or of the user; returns its output."""
        out = self.home / f"{name}.out"
        start = ["systemd-run", f"--unit={name}", f"--working-directory=/home/{USER}"]
        self.nodes[on].run(
            *(as_user(*start, "--user") if of_user_manager else (*start, f"--uid={USER}")),
            *(f"--property=StandardOutput=append:/home/{USER}/{out.name}", "--property=TimeoutStopSec=5min"),
            *("--property=StandardError=journal", "--", "migrator", "run", "--job", name, "--"),
            *("/usr/bin/python3", f"/home/{USER}/chain.py", "--witness", f"/home/{USER}/{name}.witness"),
        )
        self.await_steps(out)
        return out

    def end_job(self, name: str, on: str = "node-1", *, of_user_manager: bool = False) -> None:
        """The service manager ends the job as it ends any service. No step was lost or done twice."""
        stop = ("systemctl", *(("--user",) if of_user_manager else ()), "stop", f"{name}.service")
        self.nodes[on].run(*(as_user(*stop) if of_user_manager else stop), timeout_s=300)
        lines = (self.home / f"{name}.out").read_text().splitlines()
        assert lines[-1] == "DONE"
        assert [int(line.split()[1]) for line in lines[:-1]] == list(range(len(lines) - 1))
        assert self.witnessed(name) == list(range(len(lines) - 1))

    def witnessed(self, name: str) -> list[int]:
        """The steps that any copy of the rank has done, in their order."""
        return [int(step) for step in (self.home / f"{name}.witness").read_text().split()]

    def await_steps(self, out: Path, more: int = 10) -> None:
        """The output arrives at the job's launcher."""
        count = steps(out)
        until(f"{more} more steps in {out.name}", lambda: steps(out) >= count + more)

    def await_witness(self, name: str, more: int = 10) -> None:
        """The rank runs, wherever its output goes."""
        count = len(self.witnessed(name))
        until(f"{more} more steps of {name}", lambda: len(self.witnessed(name)) >= count + more)

    def migrator(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.nodes["node-1"].ask("migrator", *arguments, timeout_s=300)

    def ask_move(self, job: str, to: str, *more: str) -> subprocess.CompletedProcess[str]:
        return self.migrator("move", "--job", job, "--rank", "0", "--to", to, *more)

    def move(self, job: str, to: str) -> dict[str, Any]:
        done = self.ask_move(job, to, "--json")
        logs = "\n".join(f"--- {name}\n{node.journal()[-3000:]}" for name, node in self.nodes.items())
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{logs}"
        answer: dict[str, Any] = json.loads(done.stdout)
        assert self.node_of(job) == to
        return answer

    def node_of(self, job: str) -> str:
        """Where the rank of a job runs; "" if no node knows it."""
        done = self.migrator("ps", "--json")
        assert done.returncode == 0, done.stderr
        return next((str(rank["node"]) for rank in json.loads(done.stdout)["ranks"] if rank["job"] == job), "")

    def await_known(self, job: str, node: str) -> None:
        """A keeper reconnects to its restarted daemon within seconds."""
        until(f"{job} to be known on {node}", lambda: self.node_of(job) == node)

    def stopped_at(self, job: str, to: str, node: str, point: str) -> str:
        """Starts a move that waits at a fault point of `node`; returns the unit that is the driver, on node-1."""
        place, unit = self.nodes[node], f"move-{job}"
        place.run("sh", "-c", f"rm -f /run/snapshotd/fault* && echo {point} wait >/run/snapshotd/fault")
        self.nodes["node-1"].run(
            *("systemd-run", "--collect", f"--unit={unit}", "migrator", "move"),
            *("--job", job, "--rank", "0", "--to", to),
        )
        until(f"{point} on {node}", lambda: place.ask("test", "-e", "/run/snapshotd/fault.fired").returncode == 0)
        return unit

    def await_driver(self, unit: str) -> None:
        first = self.nodes["node-1"]
        until("the move to end", lambda: first.show(unit, "ActiveState") in ("inactive", "failed"), 300)


def as_user(*command: str) -> tuple[str, ...]:
    """The command in a session of the user's own service manager."""
    return ("runuser", "-u", USER, "--", "env", f"XDG_RUNTIME_DIR=/run/user/{USER_ID}", *command)


def steps(out: Path) -> int:
    return out.read_text().count("\n") if out.exists() else 0


def start_autopilot(node: Node, *options: str) -> None:
    """The service of the package, with a policy that only observes, and with more options as docs/autopilot.md says."""
    (node.root / "etc/migrator/policy.toml").write_text("")
    unit = (node.root / "usr/lib/systemd/system/migrator-autopilot.service").read_text()
    (command,) = re.findall(r"^ExecStart=.*$", unit, re.MULTILINE)
    changed = f"[Service]\\nExecStart=\\n{' '.join((command, *options))}\\n"
    node.run("mkdir", "-p", "/run/systemd/system/migrator-autopilot.service.d")
    node.run("sh", "-c", f"printf '{changed}' >/run/systemd/system/migrator-autopilot.service.d/options.conf")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "enable", "--now", "migrator-autopilot", timeout_s=300)
    until("the autopilot to record its start", lambda: "it only observes" in node.journal("migrator-autopilot"))
    assert node.show("migrator-autopilot", "NRestarts") == "0", node.journal("migrator-autopilot")


def files(node: Node) -> set[str]:
    skipped = {node.root / place for place in CHANGING}
    found: set[str] = set()
    for folder, inner, names in os.walk(node.root):
        place = Path(folder)
        inner[:] = [name for name in inner if place / name not in skipped and not _OF_SYSTEMD.fullmatch(name)]
        found |= {str((place / name).relative_to(node.root)) for name in (*inner, *names)}
    return found
