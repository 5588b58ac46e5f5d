"""The network interfaces of this node, by their addresses, and how fast their links are. Blocking."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

_CLASS = Path("/sys/class/net")
_MBIT_BYTES = 10**6 // 8


@dataclass(frozen=True)
class Link:
    interface: str
    bytes_per_s: float  # 0: not known


def links() -> dict[str, Link]:
    """By address. None if the kernel does not say."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    found: dict[str, Link] = {}
    try:
        with IPRoute() as netlink:
            names = {link["index"]: str(link.get("IFLA_IFNAME") or "") for link in netlink.get_links()}
            for row in netlink.get_addr():
                address, name = row.get("IFA_LOCAL") or row.get("IFA_ADDRESS"), names.get(row["index"], "")
                if address and name:
                    found[normal(address)] = Link(name, bytes_per_s(name))
    except (OSError, NetlinkError):
        return {}
    return found


def normal(host: str) -> str:
    """An address as `links` has it; a name stays as it is."""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host


def bytes_per_s(interface: str, folder: Path = _CLASS) -> float:
    """As the driver of the interface says; 0 if it does not: most virtual ones do not, nor does a link that is down."""
    try:
        mbits = int((folder / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return float(max(mbits, 0) * _MBIT_BYTES)
