"""The network interface of this node."""

from __future__ import annotations

import ipaddress


def mtu_of(host: str) -> int:
    """The MTU of the interface with this address; 0 if there is none. Blocks."""
    from pyroute2 import IPRoute

    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return 0
    with IPRoute() as netlink:
        for row in netlink.get_addr():
            found = row.get("IFA_LOCAL") or row.get("IFA_ADDRESS")
            if found and ipaddress.ip_address(found) == wanted:
                (link,) = netlink.get_links(row["index"])
                return int(link.get("IFLA_MTU") or 0)
    return 0
