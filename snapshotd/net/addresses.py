"""The addresses at which other nodes reach this one."""

from __future__ import annotations

import ipaddress


def of_this_node() -> list[str]:
    """Every address with its prefix length, "10.0.0.1/24", except loopback and link-local ones. IPv4 first. Blocks."""
    from pyroute2 import IPRoute  # takes half a second the first time

    with IPRoute() as netlink:
        rows = [(row.get("IFA_LOCAL") or row.get("IFA_ADDRESS"), row["prefixlen"]) for row in netlink.get_addr()]
    found = [ipaddress.ip_interface(f"{ip}/{length}") for ip, length in rows if ip]
    usable = [item for item in found if not item.ip.is_loopback and not item.ip.is_link_local]
    return [str(item) for item in sorted(usable, key=lambda item: item.version)]
