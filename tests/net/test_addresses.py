"""The addresses that a node reports, each with its interface."""

from __future__ import annotations

import pytest
from pyroute2 import IPRoute

from snapshotd.net import addresses
from tests.net.hosts import IFA_F_NODAD, Hosts

pytestmark = pytest.mark.root


def test_addresses_are_reported_with_their_interfaces_and_the_secondary_ones_last(hosts: Hosts) -> None:
    def change() -> None:
        with IPRoute() as netlink:
            netlink.link("add", ifname="data0", kind="bridge")
            data = netlink.link_lookup(ifname="data0")[0]
            netlink.link("set", index=data, state="up")
            netlink.addr("add", index=data, address="10.8.0.1", prefixlen=16)
            netlink.addr("add", index=data, address="fd08::1", prefixlen=64, flags=IFA_F_NODAD)
            cable = netlink.link_lookup(ifname="eth0")[0]
            netlink.addr("add", index=cable, address="10.9.1.91", prefixlen=24)

    hosts.h1.call(change)
    found = hosts.h1.call(addresses.of_this_node)
    assert found == [
        ("10.9.1.1/24", "eth0"),
        ("10.8.0.1/16", "data0"),
        ("10.9.1.91/24", "eth0"),
        ("fd09:1::1/64", "eth0"),
        ("fd08::1/64", "data0"),
    ]
