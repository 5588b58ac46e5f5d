"""The network between nodes with systemd: a bridge in a namespace of its own, and a namespace with `eth0` for each node."""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Network:
    def __init__(self, name: str) -> None:
        self.name, self._switch, self._ports = name, f"{name}-switch", 0
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def attach(self, node: str, address: str) -> str:
        """The name of a new namespace for a node that boots: nothing is left in it of what ran there before."""
        space, port = f"{self.name}-{node}", f"port{self._ports}"
        self._ports += 1
        self.detach(node)
        _ip("netns", "add", space)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        # A node that reboots has the same network card.
        card = "02:00:" + ":".join(f"{byte:02x}" for byte in ipaddress.ip_address(address).packed)
        _ip("-n", space, "link", "set", "eth0", "address", card, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return space

    def detach(self, node: str) -> None:
        space = f"{self.name}-{node}"
        if Path("/run/netns", space).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # it has no link any more
                _ip("-n", space, "link", "delete", "eth0")
            _ip("netns", "delete", space)

    def remove(self) -> None:
        _ip("netns", "delete", self._switch)


@contextlib.contextmanager
def network(name: str) -> Iterator[Network]:
    made = Network(name)
    try:
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
