"""Jobs of an ordinary user on nodes with systemd: started by the system's and by the user's service manager, and moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from integration.harness import until
from integration.systemd.cluster import USER, USER_ID, SystemdCluster
from integration.systemd.nodes import Node

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_users_job_moves_there_and_back_with_restarts_of_the_daemons(installed: SystemdCluster) -> None:
    out = installed.start_job("night")
    installed.move("night", "node-2")
    installed.await_steps(out)
    assert USER in installed.nodes["node-2"].run("ps", "--no-headers", "-o", "user:20,args", "-C", "python3")

    for node in installed.nodes.values():  # the rank continues while its daemons restart
        node.run("systemctl", "restart", "snapshotd", timeout_s=300)
    installed.await_steps(out)
    installed.await_known("night", "node-2")

    installed.move("night", "spare-1")
    installed.await_steps(out)
    installed.move("night", "node-1")
    installed.await_steps(out)
    installed.end_job("night")


def journal_of(node: Node, move: str) -> list[dict[str, str]]:
    shown = node.run("journalctl", "--no-pager", "--output=json", f"MOVE_ID={move}")
    return [json.loads(line) for line in shown.splitlines()]


def has_phases(read: Callable[[], list[dict[str, str]]]) -> bool:
    """journald writes what it was given a moment later."""
    return len({entry["PHASE"] for entry in read() if "PHASE" in entry}) > 1


def test_the_journal_shows_a_move_by_its_id(installed: SystemdCluster) -> None:
    out = installed.start_job("journalled")
    moved = installed.move("journalled", "node-2")
    for name in ("node-1", "node-2"):
        read = partial(journal_of, installed.nodes[name], moved["move"])
        until("records of several phases", partial(has_phases, read))
        entries = read()
        assert {entry["NODE"] for entry in entries} == {name}
        assert {entry["_SYSTEMD_UNIT"] for entry in entries} == {"snapshotd.service"}
        assert {entry["RANK"] for entry in entries} == {"0"}
        assert all(moved["move"] in entry["MESSAGE"] for entry in entries), "as text too"
    bystander = installed.nodes["spare-1"].ask("journalctl", "--no-pager", "--quiet", f"MOVE_ID={moved['move']}")
    assert bystander.stdout == ""
    installed.await_steps(out)
    installed.end_job("journalled")


def test_a_service_of_the_users_own_manager_moves_there_and_back(installed: SystemdCluster) -> None:
    first = installed.nodes["node-1"]
    first.run("loginctl", "enable-linger", USER)
    until("the user's manager", lambda: first.show(f"user@{USER_ID}", "ActiveState") == "active")
    out = installed.start_job("own", of_user_manager=True)
    installed.move("own", "node-2")
    installed.await_steps(out)
    installed.move("own", "node-1")
    installed.await_steps(out)
    installed.end_job("own", of_user_manager=True)
