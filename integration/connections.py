"""Helpers for the tests of connections: functions inside a node's network namespace, and the sockets that a process sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute

from integration.harness import PATIENCE_S, WORKLOADS, Cluster, Job, processes_of, until
from migrator import pki
from migrator.lab.inside import CLONE_NEWNET, setns
from migrator.lab.layout import DAEMON_PORT, write
from snapshotd.api.credentials import Credentials
from snapshotd.moves.peers.node_addresses import NodeAddresses
from snapshotd.net import nft

Result = TypeVar("Result")

STREAMS = str(WORKLOADS / "streams.py")
_NODAD = 0x02


def in_node(nodes: Cluster, node: str, act: Callable[[], Result]) -> Result:
    """Runs act() in the network namespace of a node, in a separate thread."""

    def work() -> Result:
        record = nodes.lab.layout.load()
        assert record is not None
        descriptor = os.open(f"/proc/{record.holders[node].pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(descriptor, CLONE_NEWNET)
        finally:
            os.close(descriptor)
        return act()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def tables(nodes: Cluster) -> dict[str, list[str]]:
    """The nftables tables of snapshotd by node: packet filters and forwardings."""
    found = {node: in_node(nodes, node, nft.tables) for node in nodes.lab.nodes}
    return {node: names for node, names in found.items() if names}


def filters(nodes: Cluster) -> list[str]:
    """The filters of moves only: forwardings stay as long as the job runs."""
    return [f"{node}: {name}" for node, names in tables(nodes).items() for name in names if name.startswith("m-")]


def forwardings(nodes: Cluster) -> list[str]:
    return [f"{node}: {name}" for node, names in tables(nodes).items() for name in names if name.startswith("fwd-")]


def give_ipv6(nodes: Cluster) -> None:
    """Gives every node the address fd13::N, where N is the last number of its IPv4 address, and a certificate that names it:
    the daemons do not listen there."""
    for node in nodes.lab.nodes:

        def act(node: str = node) -> None:
            with IPRoute() as netlink:
                cable = netlink.link_lookup(ifname="eth0")[0]
                netlink.addr("replace", index=cable, address=ipv6(nodes, node), prefixlen=64, flags=_NODAD)

        in_node(nodes, node, act)
        _name_in_certificate(nodes, node, ipv6(nodes, node))


@contextlib.contextmanager
def shared_address(nodes: Cluster, ip: str) -> Iterator[None]:
    """Every node has this address, as those with Docker have that of its bridge. On `lo`, so that it is listed first."""

    def change(verb: str) -> None:
        with IPRoute() as netlink:
            netlink.addr(verb, index=netlink.link_lookup(ifname="lo")[0], address=ip, prefixlen=16)

    for node in nodes.lab.nodes:
        in_node(nodes, node, partial(change, "add"))
    try:
        yield
    finally:
        for node in nodes.lab.nodes:
            in_node(nodes, node, partial(change, "del"))


def unfinished(nodes: Cluster) -> list[str]:
    """The moves that `migrator status` lists."""
    done = nodes.migrator("status", "--json")
    return [move["move"] for move in json.loads(done.stdout)["moves"]]


def _name_in_certificate(nodes: Cluster, node: str, ip: str) -> None:
    """Replaces the certificate of a node, as `migrator pki` would, and waits until its daemon shows the new one."""
    layout, address = nodes.lab.layout, nodes.lab.address(node)
    with tempfile.TemporaryDirectory() as name:
        ca = Path(name)
        for file in ("ca.crt", "ca.key"):
            shutil.copy(layout.run / "pki" / file, ca)
        made = pki.issue_node(ca, node, [address, ip])
        write(layout.node(node) / "tls.crt", made.cert.read_text())
        write(layout.node(node) / "tls.key", made.key.read_text(), 0o600)
        proofs = NodeAddresses(Credentials(made.ca, made.cert, made.key))
        endpoint = f"{address}:{DAEMON_PORT}"
        until(
            f"the new certificate of {node}",
            lambda: in_node(nodes, node, lambda: proofs.belongs(ip, node, endpoint)),
        )


def ipv6(nodes: Cluster, node: str) -> str:
    return f"fd13::{nodes.lab.address(node).rpartition('.')[2]}"


def visible(pid: int) -> dict[str, str]:
    """The open descriptors of a process with their inodes, and the registrations of its epoll sets."""
    found: dict[str, str] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
            if "eventpoll" in found[fd]:
                text = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                found[f"{fd} watches"] = "; ".join(sorted(re.findall(r"tfd:.*", text)))
    return found


class Endpoints:
    """The programs of one test, which all stop on request: ranks under `migrator run`, and unprotected peers."""

    def __init__(self, nodes: Cluster, name: str) -> None:
        self.nodes, self.name = nodes, name
        self.until = nodes.folder / f"{name}.end"
        self.stall = nodes.folder / f"{name}.stall"
        for path in (self.until, self.stall):
            path.unlink(missing_ok=True)
        self.jobs: list[Job] = []

    def rank(self, node: str, *arguments: str, rank: int = 0) -> Job:
        """Starts a protected program and waits until it is ready."""
        job = self.nodes.start(node, self._command(arguments), job=self.name, rank=rank)
        return self._ready(job)

    def peer(self, node: str, *arguments: str, ready: bool = True) -> Job:
        """Starts an unprotected program."""
        out = self.nodes.folder / f"{self.name}-peer{len(self.jobs)}.out"
        with out.open("wb") as file:
            process = self.nodes.lab.spawn(
                node, self._command(arguments), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        job = Job(self.nodes.lab, process, out, out.name)
        self.nodes.jobs.append(job)
        if not ready:
            self.jobs.append(job)
            return job
        return self._ready(job)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, STREAMS, *arguments, "--until", str(self.until)]

    def _ready(self, job: Job) -> Job:
        self.jobs.append(job)
        until(f"{job.name} to be ready", lambda: "READY" in job.text() or job.process.poll() is not None)
        assert job.process.poll() is None, job.text()
        return job

    def await_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until all programs are connected."""
        for job in self.jobs:
            until(f"{job.name} to be connected", partial(self._is_ready, job), timeout_s)

    def _is_ready(self, job: Job) -> bool:
        self.well()
        return "READY" in job.text()

    def flow(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until every program has received more records, none of them lost or wrong."""
        for job in self.jobs:
            try:
                job.await_progress(3, timeout_s)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.output()}\n{self.nodes.logs()}") from None
        self.well()

    def well(self) -> None:
        text = self.output()
        assert not any(word in text for word in ("LOST", "WRONG", "Traceback")), f"{text}\n{self.nodes.logs()}"

    def end(self) -> None:
        """Ends all streams. Every record has arrived once."""
        self.until.touch()
        for job in self.jobs:
            try:
                assert job.finish() == 0, f"{self.output()}\n{self.nodes.logs()}"
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{job.name} does not end\n{self.output()}\n{self.nodes.logs()}") from None
            assert job.lines()[-1] == "DONE", self.output()

    def output(self) -> str:
        return "\n".join(f"--- {job.name}\n{job.text()[-300:]}" for job in self.jobs)

    def copies(self) -> list[int]:
        """The processes of all programs on all nodes, without `migrator run`."""
        return processes_of(str(self.until))


def pid_of(job: Job) -> int:
    """The pid of a peer: the spawned process has become the program itself."""
    return job.process.pid


def no_filters(nodes: Cluster, timeout_s: float = PATIENCE_S) -> None:
    until(f"all filters to be gone, {filters(nodes)}", lambda: not filters(nodes), timeout_s)


def checks(nodes: Cluster, job: Job, to: str) -> dict[str, dict[str, Any]]:
    """The checks of `migrator check` by name."""
    done = nodes.migrator("check", "--rank", "0", "--job", job.name, "--to", to, "--json")
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}
