"""Accepts answers to a loopback address from an interface, for connections that `forward` sends out from 127.0.0.1 or ::1.

IPv4 has a switch for it, `route_localnet`. IPv6 has none, but the kernel looks for a route to ::1 through the interface
that a packet came from, and accepts a second one, with a metric so bad that nothing else ever uses it. The kernel drops
a packet with ::1 from the wire before that look-up; for 127.0.0.1 `forward` has a rule that does the same.

Invariant: `close_loopback` removes only what `open_loopback` made: the route is marked by its protocol number and metric.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from snapshotd.api.errors import Internal

_TABLE_LOCAL, _TYPE_LOCAL, _SCOPE_HOST = 255, 2, 254  # RT_TABLE_LOCAL, RTN_LOCAL, RT_SCOPE_HOST
_OUR_PROTOCOL, _OUR_METRIC = 217, 1 << 30


def interface_towards(ip: str) -> str:
    """The interface through which packets to `ip` leave this node ("lo" for its own addresses)."""
    try:
        with IPRoute() as netlink:
            (route,) = netlink.route("get", dst=ip)
            (link,) = netlink.get_links(route.get_attr("RTA_OIF"))
            return str(link.get_attr("IFLA_IFNAME"))
    except NetlinkError as error:
        raise Internal(f"there is no route to {ip}: {error}") from error


def loopback_is_open(interface: str) -> bool:
    """Whether it accepts answers to 127.0.0.1."""
    return _switch(interface).read_text().strip() != "0"


def open_loopback(interface: str) -> None:
    """Idempotent. The caller ensures that packets with a loopback address from the wire are dropped."""
    _switch(interface).write_text("1")
    with IPRoute() as netlink:
        if Path("/proc/sys/net/ipv6").exists():
            netlink.route("replace", **_route(netlink, interface))


def close_loopback(interface: str) -> None:
    """Idempotent; also if the interface itself is gone."""
    if not _switch(interface).exists():
        return
    _switch(interface).write_text("0")
    with IPRoute() as netlink:
        try:
            netlink.route("del", **_route(netlink, interface))
        except NetlinkError as error:
            if error.code not in (errno.ESRCH, errno.ENOENT):
                raise Internal(f"the route to ::1 through {interface} cannot be removed: {error}") from error


def _switch(interface: str) -> Path:
    return Path("/proc/sys/net/ipv4/conf", interface, "route_localnet")


def _route(netlink: Any, interface: str) -> dict[str, Any]:
    return {
        "family": socket.AF_INET6,
        "dst": "::1/128",
        "oif": netlink.link_lookup(ifname=interface)[0],
        "table": _TABLE_LOCAL,
        "type": _TYPE_LOCAL,
        "scope": _SCOPE_HOST,
        "proto": _OUR_PROTOCOL,
        "priority": _OUR_METRIC,
    }
