"""Nodes that boot a real systemd: systemd-nspawn, each with its own root file system, network namespace and cgroup.

They share /home, as the nodes of a cluster do, and a network that exists in namespaces only. Neither the machine's systemd
(there need not be one) nor its network is touched. The daemon and criu are root on a node, so a node has every capability.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

from integration.harness import PATIENCE_S, until
from integration.systemd.network import Network, network
from migrator.lab.layout import cgroup2_root

NSPAWN = ("systemd-nspawn", "--boot", "--quiet", "--register=no", "--keep-unit", "--capability=all", "--console=pipe")
#: Without these nspawn would put a seccomp filter around the node, which criu cannot restore, and make /proc/sys read-only.
NSPAWN_ENVIRONMENT = {"SYSTEMD_SECCOMP": "0", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1"}
#: What Debian's systemd-sysctl sets at boot and no namespace holds back.
SETTINGS = ("fs/protected_*", "kernel/pid_max", "kernel/sysrq", "fs/file-max", "fs/nr_open", "vm/max_map_count")


class Node:
    """One machine with systemd as its first process."""

    def __init__(
        self, name: str, address: str, folder: Path, home: Path, switch: Network, *, hybrid: bool = False
    ) -> None:
        """A node has cgroup v2 alone, also on a machine with hybrid cgroups. `hybrid`: as the machine has them."""
        self.name, self.address, self.folder, self.home = name, address, folder, home
        self.root = folder / "root"
        self.network = switch
        self._process: subprocess.Popen[bytes] | None = None
        self._console: IO[bytes] | None = None
        self._hierarchy = {} if hybrid else {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        self._cgroup = cgroup2_root() / f"{switch.name}-{name}"

    def create(self, image: Path) -> None:
        """Copies the root file system."""
        self.folder.mkdir(parents=True)
        subprocess.run(["cp", "-a", "--reflink=auto", image, self.root], check=True)
        # A node has every capability, but no kernel modules of its own.
        (self.root / "etc/systemd/system/systemd-modules-load.service").symlink_to("/dev/null")
        (self.root / "etc" / "hostname").write_text(f"{self.name}\n")
        (self.root / "etc" / "machine-id").write_text(f"{uuid.uuid4().hex}\n")  # without one it would be a first boot

    def boot(self) -> None:
        """Returns when systemd says that the node runs."""
        self._cgroup.mkdir(exist_ok=True)
        namespace = self.network.attach(self.name, self.address)
        self._console = (self.folder / "console").open("ab")
        self._process = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"', "sh", str(self._cgroup)),
                *NSPAWN,
                f"--directory={self.root}",
                f"--machine={self.name}",
                f"--network-namespace-path=/run/netns/{namespace}",
                f"--bind={self.home}:/home",
            ],
            env={**os.environ, **NSPAWN_ENVIRONMENT, **self._hierarchy},
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until(f"{self.name} to boot", self._booted)

    def _booted(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (
            f"{self.name} did not boot:\n{(self.folder / 'console').read_text()[-2000:]}"
        )
        if self._init() is None:
            return False
        state = self.ask("systemctl", "is-system-running").stdout.strip()
        assert state != "degraded", self.ask("systemctl", "--failed").stdout
        return state == "running"

    def _init(self) -> int | None:
        """The process id of systemd, as this machine sees it: the child of nspawn."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def ask(self, *command: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs a command as root on the node."""
        inside = ["nsenter", "--target", str(self._init()), "--all", "--wdns=/"]
        path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            [*inside, *command], env=path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> str:
        """Runs a command as root on the node, and fails unless it succeeds."""
        done = self.ask(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{self.name}: {command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def session(self, script: str, user: str = "root", timeout_s: float = 600) -> str:
        """What the commands print that a user types one after the other in a shell; each must succeed.

        As a service, in a cgroup of the node: other commands of the tests are in one that the node does not see."""
        home = "/root" if user == "root" else f"/home/{user}"
        return self.run(
            *("systemd-run", "--quiet", "--pipe", "--wait", "--collect", f"--uid={user}", f"--setenv=HOME={home}"),
            *(f"--working-directory={home}", "bash", "-eux", "-c", script),
            timeout_s=timeout_s,
        )

    def journal(self, unit: str = "snapshotd") -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    def show(self, unit: str, setting: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={setting}", unit).strip()

    def shut_down(self) -> None:
        """Ends the node: in order if systemd still answers, else at once."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, OSError):
                self.ask("systemctl", "poweroff", timeout_s=30)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(60)
            if self._process.poll() is None:
                (self._cgroup / "cgroup.kill").write_text("1")
                self._process.wait(30)
        self._clean()

    def lose_power(self) -> None:
        """Ends every process of the node at once, and its network."""
        assert self._process is not None
        self.network.detach(self.name)
        (self._cgroup / "cgroup.kill").write_text("1")
        self._process.wait(60)
        self._clean()

    def _clean(self) -> None:
        if self._console is not None:
            self._console.close()
        if self._cgroup.exists():
            remove_cgroup(self._cgroup)
        for old in Path("/sys/fs/cgroup").glob(
            f"*/{self._cgroup.name}"
        ):  # nspawn makes them on a machine with hybrid ones
            for folder in sorted((old, *old.rglob("*/")), key=lambda place: -len(place.parts)):
                until(f"{folder} to be empty", partial(_removed, folder), 30)
        self.network.detach(self.name)

    def discard(self) -> None:
        self.shut_down()
        shutil.rmtree(self.folder, ignore_errors=True)


def remove_cgroup(top: Path) -> None:
    """Ends what is left in the cgroup, and removes it with everything below."""
    (top / "cgroup.kill").write_text("1")
    for folder in sorted((place for place in top.rglob("*") if place.is_dir()), key=lambda p: -len(p.parts)):
        until(f"{folder} to be empty", partial(_removed, folder), 30)
    until(f"{top} to be empty", lambda: _removed(top), 30)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        time.sleep(0.05)
        return False
    return True


@contextlib.contextmanager
def kernel_settings_kept() -> Iterator[None]:
    """The settings that a booting systemd changes, because they belong to the whole machine, are as before at the end."""
    before = {path: path.read_text() for pattern in SETTINGS for path in Path("/proc/sys").glob(pattern)}
    try:
        yield
    finally:
        for path, value in before.items():
            if path.read_text() != value:
                path.write_text(value)


@contextlib.contextmanager
def booted(folder: Path, image: Path, addresses: Mapping[str, str]) -> Iterator[dict[str, Node]]:
    """Running nodes, by name. They and everything that they wrote are removed at the end."""
    name = f"sd{os.getpid()}"
    home = folder / "home"
    home.mkdir(parents=True)
    nodes: dict[str, Node] = {}
    with kernel_settings_kept(), network(name) as switch, contextlib.ExitStack() as stack:
        for node, address in addresses.items():
            nodes[node] = Node(node, address, folder / node, home, switch)
            stack.callback(nodes[node].discard)
            nodes[node].create(image)
        for each in nodes.values():
            each.boot()
        yield nodes
