"""The addresses at which other nodes reach this one."""

from __future__ import annotations

import ipaddress
import socket

#: IFA_F_SECONDARY (of IPv6: IFA_F_TEMPORARY) and IFA_F_DEPRECATED.
_SECOND_CHOICE = 0x01 | 0x20


def of_this_node() -> list[tuple[str, str]]:
    """Every address with its prefix length, "10.0.0.1/24", and its interface, except loopback and link-local ones. IPv4 comes
    first, and secondary and temporary addresses last. Blocks."""
    from pyroute2 import IPRoute  # takes half a second the first time

    found = []
    with IPRoute() as netlink:
        for row in netlink.get_addr():
            if not (ip := row.get("IFA_LOCAL") or row.get("IFA_ADDRESS")):
                continue
            item = ipaddress.ip_interface(f"{ip}/{row['prefixlen']}")
            if not item.ip.is_loopback and not item.ip.is_link_local:
                last = bool((row.get("IFA_FLAGS") or row["flags"]) & _SECOND_CHOICE)
                found.append(((item.version, last), str(item), _name(row["index"])))
    return [(text, interface) for _, text, interface in sorted(found, key=lambda each: each[0])]


def _name(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:  # removed since
        return ""
