"""The addresses under which others reach this node."""

from __future__ import annotations

import ipaddress


def of_this_node() -> list[str]:
    """Every address with its prefix length, "10.0.0.1/24"; no loopback, nothing of a single link. IPv4 first. Blocking."""
    from pyroute2 import IPRoute  # half a second the first time

    with IPRoute() as netlink:
        rows = [(row.get("IFA_LOCAL") or row.get("IFA_ADDRESS"), row["prefixlen"]) for row in netlink.get_addr()]
    found = [ipaddress.ip_interface(f"{ip}/{length}") for ip, length in rows if ip]
    usable = [item for item in found if not item.ip.is_loopback and not item.ip.is_link_local]
    return [str(item) for item in sorted(usable, key=lambda item: item.version)]
