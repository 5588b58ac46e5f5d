"""Three hosts on one switch, as network namespaces of this machine, and functions to run something inside one.

A namespace is kept by a process that reads its standard input. When the test process exits, for whatever reason, the input
ends, that process exits, and namespace, links and addresses are gone. Nothing is added to the machine's own network.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pyroute2 import IPRoute

from migrator.lab.inside import CLONE_NEWNET, setns

REPOSITORY = Path(__file__).resolve().parents[2]
IFA_F_NODAD = 0x02  # an IPv6 address that can be used at once

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Host:
    """A network namespace with `eth0` and `lo`. `pid` is the process that holds it."""

    name: str
    pid: int
    ip4: str
    ip6: str

    def call(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Calls function(…) in a thread inside this host; a socket it returns stays a socket of this host."""

        def work() -> Result:
            descriptor = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(descriptor, CLONE_NEWNET)
            finally:
                os.close(descriptor)
            return function(*args, **kwargs)

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name) as thread:
            return thread.submit(work).result()

    def argv(self, *argv: str) -> list[str]:
        """The command that runs `argv` inside this host, with the same pid."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *argv]

    @contextlib.contextmanager
    def program(self, argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
        """A program inside this host with its stdin and stdout as text pipes; killed at the end."""
        settings: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} | options
        process: subprocess.Popen[str] = subprocess.Popen(self.argv(*argv), **settings)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def python(self, source: str, *args: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
        """`program` for Python source; it can import the repository."""
        options.setdefault("cwd", REPOSITORY)
        return self.program([sys.executable, "-c", source, *args], **options)


@dataclass(frozen=True)
class Hosts:
    h1: Host
    h2: Host
    h3: Host

    def __iter__(self) -> Iterator[Host]:
        return iter((self.h1, self.h2, self.h3))


@contextlib.contextmanager
def three_hosts() -> Iterator[Hosts]:
    """h1, h2 and h3 at 10.9.1.1–3 and fd09:1::1–3, all of which reach each other."""
    with contextlib.ExitStack() as stack:
        switch = Host("switch", stack.enter_context(_namespace()), "", "")
        hosts = [Host(f"h{n}", stack.enter_context(_namespace()), f"10.9.1.{n}", f"fd09:1::{n}") for n in (1, 2, 3)]
        switch.call(_make_switch, hosts)
        for host in hosts:
            host.call(_address_host, host)
        yield Hosts(*hosts)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        if holder.stdout.readline() != b"\n":  # an answer: it is `cat` now, inside the namespace
            raise RuntimeError("no network namespace can be made; are you root?")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def _make_switch(hosts: Sequence[Host]) -> None:
    with IPRoute() as netlink:
        netlink.link("add", ifname="br0", kind="bridge", br_mcast_snooping=0)
        bridge = netlink.link_lookup(ifname="br0")[0]
        netlink.link("set", index=bridge, state="up")
        for host in hosts:
            netlink.link("add", ifname=host.name, kind="veth", peer={"ifname": "eth0", "net_ns_pid": host.pid})
            netlink.link("set", index=netlink.link_lookup(ifname=host.name)[0], master=bridge, state="up")


def _address_host(host: Host) -> None:
    with IPRoute() as netlink:
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        cable = netlink.link_lookup(ifname="eth0")[0]
        netlink.addr("add", index=cable, address=host.ip4, prefixlen=24)
        netlink.addr("add", index=cable, address=host.ip6, prefixlen=64, flags=IFA_F_NODAD)
        netlink.link("set", index=cable, state="up")
