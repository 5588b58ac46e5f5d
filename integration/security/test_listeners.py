"""A user's rank that moves does not take connections of another user's service along."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from integration.harness import Cluster, until
from integration.security.user_ranks import USER, UserFolder, await_line, user_folder
from migrator.lab.lab import Lab

pytestmark = pytest.mark.root

HOME, TARGET, CLIENT = "node-1", "spare-1", "node-2"
PORT = 15432
OTHER_USER = 1501

#: Listens at the port over IPv6 only, beside the service, and over IPv4 as soon as it can: on another node.
RANK = f"""
import select, socket
sixth = socket.socket(socket.AF_INET6)
sixth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
sixth.bind(("::", {PORT}))
sixth.listen()
print("listens", flush=True)
fourth = None
while True:
    if fourth is None:
        fourth = socket.socket()
        try:
            fourth.bind(("0.0.0.0", {PORT}))
            fourth.listen()
            print("stole the port", flush=True)
        except OSError:
            fourth.close()
            fourth = None
    ready = [one for one in (sixth, fourth) if one is not None]
    for one in select.select(ready, [], [], 0.05)[0]:
        connection, _ = one.accept()
        connection.sendall(b"the rank")
        connection.close()
"""

SERVICE = f"""
import socket
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("0.0.0.0", {PORT}))
listener.listen()
print("serves", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"the service")
    connection.close()
"""

CALL = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).makefile("rb").read().decode())
except OSError as error:
    print(error)
"""


@pytest.fixture
def folder() -> Iterator[UserFolder]:
    with user_folder() as made:
        yield made


def answers(lab: Lab, node: str, host: str) -> str:
    with lab.spawn(node, ["python3", "-c", CALL, host, str(PORT)], stdout=subprocess.PIPE, text=True) as call:
        return str(call.communicate(timeout=60)[0]).strip()


def until_answered(lab: Lab, node: str, host: str) -> None:
    until(f"{node} to be answered", lambda: answers(lab, node, host).startswith("the "))


def test_port_that_a_rank_has_over_ipv6_only_is_not_taken_from_a_service_over_ipv4(
    nodes: Cluster, folder: UserFolder
) -> None:
    listed = json.loads(nodes.migrator("nodes", "--json").stdout)["nodes"]
    host = next(one["endpoint"] for one in listed if one["name"] == HOME).rpartition(":")[0]
    command = ["setpriv", "--reuid", str(OTHER_USER), "--regid", str(OTHER_USER), "--clear-groups"]
    with nodes.lab.spawn(
        HOME, [*command, "/usr/bin/python3", "-c", SERVICE], stdout=subprocess.PIPE, cwd="/"
    ) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline() == b"serves\n"
            job = folder.start(nodes, HOME, RANK, "thief")
            await_line(job, "listens")
            assert answers(nodes.lab, CLIENT, host) == "the service"
            nodes.move(job, TARGET)
            await_line(job, "stole the port")  # that of the other node, which is free there
            for node in (CLIENT, TARGET, HOME):
                until_answered(nodes.lab, node, host)
                for _ in range(5):
                    assert answers(nodes.lab, node, host) == "the service", f"user {USER} has got one from {node}"
        finally:
            service.kill()
