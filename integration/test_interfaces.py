"""Two nodes with a second network interface: a move uses both, and goes on with one when the other's cable is out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Cluster, until
from migrator.lab import network
from migrator.lab.layout import LabProcess

SOURCE, TARGET = "node-1", "spare-1"
CABLE = "rail1"
ADDRESSES = {SOURCE: "10.99.0.1", TARGET: "10.99.0.2"}
SIZE_MIB = 64


def resident(nodes: Cluster, node: str) -> LabProcess:
    record = nodes.lab.layout.load()
    assert record is not None
    return record.holders[node]


def received_bytes(nodes: Cluster, node: str, interface: str) -> int:
    rows = Path(f"/proc/{resident(nodes, node).pid}/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(counts.split()[0]) for name, _, counts in (row.partition(":") for row in rows)}[interface]


def set_cable(nodes: Cluster, node: str, state: str) -> None:
    def act(netlink: Any) -> None:
        netlink.link("set", index=netlink.link_lookup(ifname=CABLE)[0], state=state)

    network.in_netns(resident(nodes, node), act)


def failing(nodes: Cluster) -> list[str]:
    """What `migrator doctor` says about data ports between the two nodes."""
    found = json.loads(nodes.migrator("doctor", "--json").stdout)["between"]
    return [one["text"] for one in found if one["check"] == "data-port" and set(one["nodes"]) == {SOURCE, TARGET}]


@pytest.fixture
def two_cables(nodes: Cluster) -> Iterator[Cluster]:
    """A cable from one node to the other beside that to the switch, named in both configurations."""

    def plug_in(netlink: Any) -> None:
        peer = {"ifname": CABLE, "net_ns_pid": resident(nodes, TARGET).pid}
        netlink.link("add", ifname=CABLE, kind="veth", peer=peer)

    network.in_netns(resident(nodes, SOURCE), plug_in)
    before = {node: nodes.lab.config(node).read_text() for node in ADDRESSES}
    try:
        for node, address in ADDRESSES.items():

            def name(netlink: Any, address: str = address) -> None:
                cable = netlink.link_lookup(ifname=CABLE)[0]
                netlink.addr("add", index=cable, address=address, prefixlen=24)
                netlink.link("set", index=cable, state="up")

            network.in_netns(resident(nodes, node), name)
            addresses = json.dumps([nodes.lab.address(node), address])
            nodes.lab.config(node).write_text(f"data_addresses = {addresses}\n{before[node]}")
            nodes.lab.restart_daemon(node)
        yield nodes
    finally:
        for node, text in before.items():
            nodes.lab.config(node).write_text(text)
            nodes.lab.restart_daemon(node)

        def unplug(netlink: Any) -> None:
            netlink.link("del", index=netlink.link_lookup(ifname=CABLE)[0])

        network.in_netns(resident(nodes, SOURCE), unplug)


def test_a_move_uses_both_interfaces_and_survives_the_loss_of_one(two_cables: Cluster) -> None:
    nodes = two_cables
    end = nodes.folder / "end"
    end.unlink(missing_ok=True)
    job = nodes.workload(SOURCE, "memory.py", "--mib", str(SIZE_MIB), "--end-file", str(end))
    until("the rank to allocate its memory", lambda: "READY" in job.lines())
    assert not failing(nodes)
    before = {interface: received_bytes(nodes, TARGET, interface) for interface in ("eth0", CABLE)}
    nodes.move(job, TARGET)
    used = {interface: received_bytes(nodes, TARGET, interface) - before[interface] for interface in before}
    assert min(used.values()) > SIZE_MIB << 18  # each at least a quarter of the rank's memory

    set_cable(nodes, SOURCE, "down")
    assert any(ADDRESSES[SOURCE] in text for text in failing(nodes))
    nodes.move(job, SOURCE)  # by the other interface alone
    job.end_soon(end)
    assert job.finish() == 0  # it has compared its memory
